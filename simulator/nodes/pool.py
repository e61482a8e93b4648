"""The pool of the simulated cluster: a cache behind one link, with a bounded write backlog.

Nodes load blocks from the pool and write computed blocks to the pool; simulator/cluster.py
schedules the ends of writes. The link has one rate for all nodes: loads run in the order of their
requests, and writes use the remaining time, in order. The simulation models no other part of the
network: a pool spread over the nodes has the sum of the nodes' rates.
"""

from __future__ import annotations

from dataclasses import dataclass

from tierkv.costing.service_time import Line
from tierkv.simulator.nodes.prefix_cache import PrefixCache
from tierkv.simulator.nodes.serving_model import NodeConstants

MOVED_WITHIN_S = 1e-6
"""Remaining time at which a write counts as ended: rounding must not keep a write alive."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """Start and end of a transfer, which waits for its turn until ``start_s``."""

    start_s: float
    end_s: float


class PoolLink:
    """Two queues on one wire.

    Attributes:
        bytes_per_s: rate of the link; 0.0 without a pool, and then the link is never used.
        busy_s: seconds of all requested transfers.
        _loads_end_s: end time of all loads requested so far.
        _seen_s: time up to which ``_written_s`` is known.
        _written_s: seconds of finished writing.
        _asked_s: seconds of requested writing.
    """

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self.busy_s = 0.0
        self._loads_end_s = 0.0
        self._seen_s = 0.0
        self._written_s = 0.0
        self._asked_s = 0.0

    def queue_s(self, now: float) -> float:
        """Return the seconds until a load requested now would begin."""
        return max(0.0, self._loads_end_s - now)

    def write_backlog_s(self, now: float) -> float:
        """Return the seconds of transfer still needed by pending writes."""
        self._look(now)
        return self._asked_s - self._written_s

    def load(self, size_bytes: int, now: float) -> Transfer:
        """Queue a load and return its start and end."""
        self._look(now)
        start_s = max(now, self._loads_end_s)
        self._loads_end_s = start_s + self._take(size_bytes)
        return Transfer(start_s, self._loads_end_s)

    def write(self, size_bytes: int, now: float) -> float:
        """Queue a write.

        Returns:
            ticket for ``rest_of_write_s``.
        """
        self._look(now)
        self._asked_s += self._take(size_bytes)
        return self._asked_s

    def rest_of_write_s(self, ticket: float, now: float) -> float:
        """Return the seconds until a write ends if no more loads come; 0.0: the write has ended."""
        self._look(now)
        rest_s = ticket - self._written_s
        return self.queue_s(now) + rest_s if rest_s > MOVED_WITHIN_S else 0.0

    def _take(self, size_bytes: int) -> float:
        seconds = size_bytes / self.bytes_per_s
        self.busy_s += seconds
        return seconds

    def _look(self, now: float) -> None:
        """Give writes the time that loads left."""
        idle_from_s = max(self._seen_s, self._loads_end_s)
        if now > idle_from_s:
            self._written_s = min(self._asked_s, self._written_s + now - idle_from_s)
        self._seen_s = max(self._seen_s, now)


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
