"""The link between nodes and pool: one rate for everybody, first come, first served.

Loads and writes of all nodes share it in the order in which they were asked for. It is the whole of
what the simulation knows of the network: a pool spread over the nodes has the sum of their rates.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Transfer:
    """When bytes move: they wait for their turn until ``start_s``."""

    start_s: float
    end_s: float


class PoolLink:
    """A queue of transfers.

    Attributes:
        bytes_per_s: its rate; 0.0 moves nothing and is never asked to.
        free_s: when it has moved everything asked for so far.
        busy_s: seconds it moved bytes.
    """

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self.free_s = 0.0
        self.busy_s = 0.0

    def queue_s(self, now: float) -> float:
        """Seconds until a transfer asked for now would begin."""
        return max(0.0, self.free_s - now)

    def move(self, size_bytes: int, now: float, *, latency_s: float = 0.0) -> Transfer:
        """Queue a transfer and say when it will have happened."""
        start_s = max(now, self.free_s)
        seconds = size_bytes / self.bytes_per_s
        self.free_s = start_s + seconds
        self.busy_s += seconds
        return Transfer(start_s + latency_s, self.free_s + latency_s)
