"""The link between nodes and pool: one shared rate, loads before writes.

Loads of all nodes run in the order of their requests; writes use the remaining time, in order. The
simulation models no other part of the network: a pool spread over the nodes has the sum of the
nodes' rates.
"""

from __future__ import annotations

from dataclasses import dataclass

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
