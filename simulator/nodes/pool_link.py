"""The link between nodes and pool: one rate for everybody, loads before writes.

Loads of all nodes go in the order in which they were asked for; writes take what time is left, in
their order. It is the whole of what the simulation knows of the network: a pool that is spread over
the nodes has the sum of their rates.
"""

from __future__ import annotations

from dataclasses import dataclass

MOVED_WITHIN_S = 1e-6
"""A write that is so close to its end has ended: rounding must not keep it alive."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """When bytes move: they wait for their turn until ``start_s``."""

    start_s: float
    end_s: float


class PoolLink:
    """Two queues on one wire.

    Attributes:
        bytes_per_s: its rate; 0.0 moves nothing and is never asked to.
        busy_s: seconds of moving that were asked for.
        _loads_end_s: when all loads asked for so far will have moved.
        _seen_s: up to when ``_written_s`` is known.
        _written_s: seconds of writes that moved.
        _asked_s: seconds of writes that were asked for.
    """

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self.busy_s = 0.0
        self._loads_end_s = 0.0
        self._seen_s = 0.0
        self._written_s = 0.0
        self._asked_s = 0.0

    def queue_s(self, now: float) -> float:
        """Seconds until a load asked for now would begin."""
        return max(0.0, self._loads_end_s - now)

    def write_backlog_s(self, now: float) -> float:
        """Seconds of moving that writes still need."""
        self._look(now)
        return self._asked_s - self._written_s

    def load(self, size_bytes: int, now: float) -> Transfer:
        """Queue a load and say when it will have happened."""
        self._look(now)
        start_s = max(now, self._loads_end_s)
        self._loads_end_s = start_s + self._take(size_bytes)
        return Transfer(start_s, self._loads_end_s)

    def write(self, size_bytes: int, now: float) -> float:
        """Queue a write.

        Returns:
            its ticket, for ``rest_of_write_s``.
        """
        self._look(now)
        self._asked_s += self._take(size_bytes)
        return self._asked_s

    def rest_of_write_s(self, ticket: float, now: float) -> float:
        """Seconds until a write will have happened if no more loads come; 0.0: it has."""
        self._look(now)
        rest_s = ticket - self._written_s
        return self.queue_s(now) + rest_s if rest_s > MOVED_WITHIN_S else 0.0

    def _take(self, size_bytes: int) -> float:
        seconds = size_bytes / self.bytes_per_s
        self.busy_s += seconds
        return seconds

    def _look(self, now: float) -> None:
        """Let writes have the time that loads left."""
        idle_from_s = max(self._seen_s, self._loads_end_s)
        if now > idle_from_s:
            self._written_s = min(self._asked_s, self._written_s + now - idle_from_s)
        self._seen_s = max(self._seen_s, now)
