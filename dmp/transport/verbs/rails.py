"""Which RDMA rails to a node may be used now, and what each of them carries.

A rail is a local port paired with a port of the node. Pure: no sockets, clock or pyverbs; called by
dmp/transport/verbs/lane.py with the time. Like a circuit breaker: a rail that fails often is left
alone for a while, then tried again.
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
    """Errors of one rail and what follows from them.

    Attributes:
        errors: times of recent errors, oldest first.
        tripped_until: no traffic before that time.
        cooldown_s: how long the last trip lasted; doubles with each one in a row; 0 when healthy.
        reason: the last error, for people.
    """

    errors: list[float] = field(default_factory=list)
    tripped_until: float = 0.0
    cooldown_s: float = 0.0
    reason: str = ""

    def is_usable(self, now: float) -> bool:
        """Say whether traffic may go this way."""
        return now >= self.tripped_until

    def is_on_trial(self, now: float) -> bool:
        """Say whether it was tripped and has not proved itself since."""
        return self.cooldown_s > 0.0 and self.is_usable(now)

    def succeeded(self, now: float) -> None:
        """Note a transfer; the first one after a trip ends the trial."""
        if self.is_on_trial(now):
            self.errors.clear()
            self.cooldown_s = 0.0
            self.reason = ""

    def failed(self, now: float, reason: str) -> bool:
        """Note an error; answers whether it tripped the rail."""
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
    """Join pieces that follow each other here and there: one request instead of several."""
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
    """Give every item to the rail with the fewest bytes so far; rails left without are left out.

    Order within a rail is the order given, so neighbours in memory stay neighbours on the wire.
    """
    shares: list[list[T]] = [[] for _ in rails]
    loads = [0] * len(rails)
    for item, size in zip(items, sizes, strict=True):
        least = loads.index(min(loads))
        loads[least] += size
        shares[least].append(item)
    return [(rail, share) for rail, share in zip(rails, shares, strict=True) if share]


def nearest(rails: Sequence[R], distances: Sequence[int]) -> list[R]:
    """Return the rails at the least distance: all of them where nothing is known."""
    least = min(distances, default=0)
    return [rail for rail, distance in zip(rails, distances, strict=True) if distance == least]


def pair_ports(local: Sequence[str], remote: Sequence[str]) -> list[tuple[int, int]]:
    """Pair our ports with the node's, one to one: those whose addresses have most bits in common.

    Networks for RDMA have a plane per port, each its own subnet, so ports of one plane find each
    other. Where one side has more, the rest stay unused: the other side's ports are the bottleneck.

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
