"""Health of the RDMA rails to a node, and the distribution of work over rails.

A rail is a local port paired with a port of the node. Pure: no sockets, clock or pyverbs; called by
dmp/transport/verbs/lane.py and dmp/transport/verbs/rail_board.py, which pass the time. RailHealth
is a circuit breaker: a rail that fails often gets no traffic for a while, then a trial.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

R = TypeVar("R")
T = TypeVar("T")

TRIP_ERRORS: Final = 3
TRIP_WINDOW_S: Final = 10.0
COOLDOWN_S: Final = 30.0
MAX_COOLDOWN_S: Final = 300.0


@dataclass(slots=True)
class RailHealth:
    """Errors of one rail and the state of its circuit breaker.

    Attributes:
        errors: times of recent errors, oldest first.
        tripped_until: no traffic before this time.
        cooldown_s: duration of the last trip; doubles with each consecutive trip; 0 when healthy.
        reason: the last error, human-readable.
    """

    errors: list[float] = field(default_factory=list)
    tripped_until: float = 0.0
    cooldown_s: float = 0.0
    reason: str = ""

    def is_usable(self, now: float) -> bool:
        """Return True if the rail may carry traffic."""
        return now >= self.tripped_until

    def is_on_trial(self, now: float) -> bool:
        """Return True if the rail was tripped and has not succeeded since."""
        return self.cooldown_s > 0.0 and self.is_usable(now)

    def succeeded(self, now: float) -> None:
        """Note a successful transfer; the first success after a trip ends the trial."""
        if self.is_on_trial(now):
            self.errors.clear()
            self.cooldown_s = 0.0
            self.reason = ""

    def failed(self, now: float, reason: str) -> bool:
        """Note an error; return True if the error trips the rail."""
        self.reason = reason
        self.errors = [at for at in self.errors if now - at < TRIP_WINDOW_S] + [now]
        if not self.is_on_trial(now) and len(self.errors) < TRIP_ERRORS:
            return False
        self.errors.clear()
        self.cooldown_s = min(2 * self.cooldown_s, MAX_COOLDOWN_S) or COOLDOWN_S
        self.tripped_until = now + self.cooldown_s
        return True


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes that travel in one work request.

    Attributes:
        local: address in this process.
        at: offset in the node's segment file.
        size: number of bytes, at least 1.
    """

    local: int
    at: int
    size: int


def cut(piece: Piece, limit: int) -> list[Piece]:
    """Cut a piece into work requests of at most ``limit`` bytes."""
    return [
        Piece(piece.local + start, piece.at + start, min(limit, piece.size - start))
        for start in range(0, piece.size, limit)
    ]


def join(pieces: Sequence[Piece]) -> list[Piece]:
    """Join pieces that are adjacent on both sides, to save requests."""
    joined: list[Piece] = []
    for piece in pieces:
        last = joined[-1] if joined else None
        ends = (last.local + last.size, last.at + last.size) if last else None
        if last is not None and ends == (piece.local, piece.at):
            joined[-1] = Piece(last.local, last.at, last.size + piece.size)
        else:
            joined.append(piece)
    return joined


def share_out(
    items: Sequence[T], sizes: Sequence[int], rails: Sequence[R]
) -> list[tuple[R, list[T]]]:
    """Give every item to the rail with the fewest bytes so far; omit rails without items.

    A rail keeps the order of its items, so neighbours in memory stay neighbours on the wire.
    """
    shares: list[list[T]] = [[] for _ in rails]
    loads = [0] * len(rails)
    for item, size in zip(items, sizes, strict=True):
        least = loads.index(min(loads))
        loads[least] += size
        shares[least].append(item)
    return [(rail, share) for rail, share in zip(rails, shares, strict=True) if share]


def nearest(rails: Sequence[R], distances: Sequence[int]) -> list[R]:
    """Return the rails at the least distance: all rails if no distance is known."""
    least = min(distances, default=0)
    return [rail for rail, distance in zip(rails, distances, strict=True) if distance == least]


def pair_ports(local: Sequence[str], remote: Sequence[str]) -> list[tuple[int, int]]:
    """Pair our ports with the node's, each at most once, by the longest common address prefix.

    Networks for RDMA have a plane per port, each plane with a subnet of its own, so ports of one
    plane find each other. If one side has more ports, the extra ports stay unused: the other side's
    ports are the bottleneck.

    Args:
        local: GIDs of our ports.
        remote: GIDs of the node's ports.

    Returns:
        pairs of indices, sorted.
    """
    ranked = sorted(
        (-_common_bits(a, b), i, j) for i, a in enumerate(local) for j, b in enumerate(remote)
    )
    pairs: list[tuple[int, int]] = []
    for _, i, j in ranked:
        if all(i != taken and j != gone for taken, gone in pairs):
            pairs.append((i, j))
    return sorted(pairs)


def _common_bits(a: str, b: str) -> int:
    differ = int(ipaddress.IPv6Address(a)) ^ int(ipaddress.IPv6Address(b))
    return 128 - differ.bit_length()
