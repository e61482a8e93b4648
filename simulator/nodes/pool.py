"""The shared pool of the simulated cluster: a cache behind a link, with a bounded write backlog.

Nodes load blocks from the pool and write computed blocks to the pool; simulator/cluster.py
schedules the ends of writes.
"""

from __future__ import annotations

from dataclasses import dataclass

from tierkv.costing.service_time import Line
from tierkv.simulator.nodes.pool_link import PoolLink, Transfer
from tierkv.simulator.nodes.prefix_cache import PrefixCache
from tierkv.simulator.nodes.serving_model import NodeConstants


@dataclass(frozen=True, slots=True)
class Write:
    """A write in progress.

    Attributes:
        chain: blocks up to the last written block.
        new: the written blocks.
        ticket: the link's ticket of the write.
    """

    chain: tuple[int, ...]
    new: tuple[int, ...]
    ticket: float


class SimPool:
    """Contents and transfers of the pool.

    Attributes:
        cache: blocks of the pool.
        link: link between the nodes and the pool.
        read_bytes: bytes moved from the pool.
        write_bytes: bytes moved to the pool.
        skipped_write_bytes: bytes not written because the link was behind.
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
        """Return the seconds of a load on an idle link."""
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
        """Record the use of a chain, and write its new blocks.

        No block is written while writes are behind, or if the policy would not admit the blocks.
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
        """Add the blocks of a finished write to the cache.

        Returns:
            seconds until the next check; 0.0: the write is finished.
        """
        rest_s = self.link.rest_of_write_s(write.ticket, now)
        if rest_s:
            return rest_s
        self._being_written.difference_update(write.new)
        self.cache.add(write.chain, now)
        return 0.0
