"""The shared pool of the simulated cluster: a cache behind a link, with a backlog it won't exceed.

Nodes load from it and write what they computed to it; simulator/cluster.py makes the ends of its
writes happen.
"""

from __future__ import annotations

from dataclasses import dataclass

from tierkv.costing.service_time import Line
from tierkv.simulator.nodes.pool_link import PoolLink, Transfer
from tierkv.simulator.nodes.prefix_cache import PrefixCache
from tierkv.simulator.nodes.serving_model import NodeConstants


@dataclass(frozen=True, slots=True)
class Write:
    """A write under way.

    Attributes:
        chain: up to the last block that is written.
        new: those that are.
        ticket: of the link.
    """

    chain: tuple[int, ...]
    new: tuple[int, ...]
    ticket: float


class SimPool:
    """What the pool holds and moves.

    Attributes:
        cache: its blocks.
        link: what they move over.
        read_bytes: moved from the pool.
        write_bytes: moved to the pool.
        skipped_write_bytes: not written because the link was behind.
    """

    def __init__(
        self,
        cache: PrefixCache,
        link: PoolLink,
        constants: NodeConstants,
        *,
        block_bytes: int,
    ) -> None:
        self.cache = cache
        self.link = link
        self._constants = constants
        self._block_bytes = block_bytes
        self._being_written: set[int] = set()
        self.read_bytes = self.write_bytes = self.skipped_write_bytes = 0

    def nominal_load_s(self, blocks: int) -> float:
        """Seconds to load blocks when nobody else does."""
        if not blocks:
            return 0.0
        path = Line(self._constants.fetch_latency_s, self.link.bytes_per_s)
        return path.seconds(blocks * self._block_bytes)

    def load(self, blocks: int, now: float) -> Transfer:
        """Queue a load."""
        size_bytes = blocks * self._block_bytes
        self.read_bytes += size_bytes
        moved = self.link.load(size_bytes, now)
        latency_s = self._constants.fetch_latency_s
        return Transfer(moved.start_s + latency_s, moved.end_s + latency_s)

    def keep(self, chain: tuple[int, ...], now: float) -> Write | None:
        """Note that a chain was used, and write what of it is new.

        Nothing is written while writes are behind, or when the policy would not let it in.
        """
        if not self.cache.capacity_blocks:
            return None
        self.cache.touch(chain, now)
        missing = chain[self.cache.depth(chain) :]
        new = tuple(block for block in missing if block not in self._being_written)
        if not new:
            return None
        size_bytes = int(len(new) * self._block_bytes * self._constants.write_share)
        if self.link.write_backlog_s(now) > self._constants.write_backlog_s:
            self.skipped_write_bytes += size_bytes
            return None
        if not self.cache.wants(chain, now):
            return None
        self._being_written.update(new)
        self.write_bytes += size_bytes
        return Write(chain, new, self.link.write(size_bytes, now))

    def written(self, write: Write, now: float) -> float:
        """Let in what arrived.

        Returns:
            seconds after which to ask again; 0.0: it is there.
        """
        rest_s = self.link.rest_of_write_s(write.ticket, now)
        if rest_s:
            return rest_s
        self._being_written.difference_update(write.new)
        self.cache.add(write.chain, now)
        return 0.0
