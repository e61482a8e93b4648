"""Turns of transfers at a pool node: by class, by the weights of namespaces, within their rates.

```
next turn   of the first class with a waiting transfer, the smallest start tag
start tag   max(now in virtual bytes, end tag of the account's last transfer)
end tag     start tag + bytes / weight        now in virtual bytes: start tag of the last turn given
may begin   now >= full_at - 1 s, for each rate of the account
full_at     max(full_at, now) + amount / rate, for each transfer; for a small one at its end
```

Moves of blocks between nodes come last, but at least one goes in each ``MOVE_PAUSE_S``. Few
transfers move bytes at a time, long replies in pieces; the rest wait here, so that their order
counts. Sockets alone would give each connection the same share, and a namespace more for each
further connection. Start tags share the bytes by weight as a deficit round robin does, for frames
of any size, and without a list of rounds. The connection of a slow peer, for example behind a slow
network, takes no place: the place would stay taken while bytes wait in the kernel. Slow is relative
to the geometric mean of measured seconds per byte.

A transfer beyond a rate is refused at once. A wait would count as slowness of this node: clients
measure their reads, and would compute more for every tenant. Bytes over shared memory or one-sided
RDMA move without this node and are charged afterwards, to the account's next transfers here.

Pure; dmp/node/turns.py puts a lock and threads around it. Refs: start-time fair queueing (Goyal,
Vin, Cheng 1996); the generic cell rate algorithm (ITU-T I.371, annex A).
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final, NamedTuple

from tierkv.dmp.slots.accounts import Quota

BURST_S: Final = 1.0
"""A bucket holds what its rate allows in this time."""
PLACES: Final = 2
"""Transfers moving at a time, of any size, once a namespace has limits. With more the kernel would
choose the order; with fewer the network would idle between two."""
_PLACE_BYTES: Final = 256 << 10
"""Further small transfers move as well, up to so many bytes for each place together."""
_MORE_UNSHARED: Final = 8
"""Times as many places without namespaces with limits: only the classes have an order then."""
STALL_S: Final = 0.02
_SLOW: Final = 4.0
"""A peer is slow if a byte takes this many times as long as usual, after a wait of ``STALL_S``."""
_FIRST_BYTE_S: Final = 2.5e-9
"""Seconds per byte, before any is measured: a network of 400 MB/s."""
_LEARNED: Final = 0.05
_LEARNED_OF_SLOW: Final = 0.005
"""Weight of a new measurement. Slow peers count less, but they count: the network may have become
slower for all."""
MOVE_PAUSE_S: Final = 0.5
"""A waiting move gets a turn so often, however many others wait: moves end at any load."""
_MEASURED_BYTES: Final = 512 << 10
"""Smaller transfers fit the kernel's buffers, which says nothing about the network."""


class TransferKind(IntEnum):
    """Class of a transfer: a lower number goes first.

    Attributes:
        READ: a call waits for the bytes.
        AHEAD: a read before anybody asked.
        WRITE: KV to be kept.
        MOVE_OUT, MOVE_IN: the reads and writes of a client that moves blocks between nodes.
        writes: whether bytes come to the node. Plain, because every transfer asks several times.
    """

    writes: bool

    READ = 0
    AHEAD = 1
    WRITE = 2
    MOVE_OUT = 3
    MOVE_IN = 4

    def __new__(cls, value: int) -> TransferKind:
        """Make a member."""
        kind = int.__new__(cls, value)
        kind._value_ = value
        kind.writes = value in (2, 4)
        return kind


_READ_BYTES, _WRITE_BYTES, _REQUESTS = range(3)
"""What rates limit; the first two are ``kind.writes``."""


def _rates(quota: Quota) -> tuple[float, float, float]:
    """Return the rates of bytes read, bytes written, and requests."""
    return quota.read_bytes_per_s, quota.write_bytes_per_s, quota.requests_per_s


@dataclass(slots=True)
class Share:
    """An account's part of a node's transfers.

    Attributes:
        quota: gives the weight and the rates.
        weight: the quota's.
        read_bytes: bytes read, over any path.
        write_bytes: bytes written, over any path.
        throttled: transfers and blocks refused because of a rate.
        full_at: when the bucket of each rate is full again; 0.0 without a rate.
    """

    quota: Quota
    read_bytes: int = 0
    write_bytes: int = 0
    throttled: int = 0
    weight: float = field(init=False)
    _rates: tuple[float, float, float] = field(init=False)
    full_at: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])

    def __post_init__(self) -> None:
        self._rates, self.weight = _rates(self.quota), self.quota.weight

    def obey(self, quota: Quota) -> None:
        """Take a new quota: a new rate begins with a full bucket."""
        rates = _rates(quota)
        for rate, (before, after) in enumerate(zip(self._rates, rates, strict=True)):
            if before != after:
                self.full_at[rate] = 0.0
        self.quota, self._rates, self.weight = quota, rates, quota.weight

    def charge(self, kind: TransferKind, size: int, now: float) -> None:
        """Take a transfer from the buckets, into debt if need be."""
        full = self.full_at
        if kind.writes:
            self.write_bytes += size
            at, per_s = _WRITE_BYTES, self._rates[_WRITE_BYTES]
        else:
            self.read_bytes += size
            at, per_s = _READ_BYTES, self._rates[_READ_BYTES]
        if per_s:
            before = full[at]
            full[at] = (before if before > now else now) + size / per_s
        if per_s := self._rates[_REQUESTS]:
            before = full[_REQUESTS]
            full[_REQUESTS] = (before if before > now else now) + 1.0 / per_s


@dataclass(slots=True, eq=False)
class Turn:
    """A transfer, before and during its turn.

    Attributes:
        account: owner of the bytes.
        kind: class of the transfer.
        size: bytes of the whole transfer.
        piece: bytes until the next turn of the same transfer; at most ``size``.
        counts: whether the transfer takes a place; False for a slow peer's.
        charges: whether the buckets are still to be charged: not for bytes charged before.
        share: the account's share when the transfer asked; None without limits.
        tag: start tag.
        granted_s: begin of the turn; negative before.
        continues: whether earlier pieces have moved: charged, and in memory.
        woken: set at the begin of the turn, for a waiting thread.
    """

    account: int
    kind: TransferKind
    size: int
    counts: bool = True
    charges: bool = True
    share: Share | None = None
    tag: float = 0.0
    granted_s: float = -1.0
    woken: threading.Event | None = None
    piece: int = 0
    continues: bool = False

    def __post_init__(self) -> None:
        self.piece = self.piece or self.size


class Moved(NamedTuple):
    """Bytes of a namespace, and transfers and blocks refused because of its rates."""

    read_bytes: int = 0
    write_bytes: int = 0
    throttled: int = 0


class TurnOrder:
    """Which transfer goes next. Pure; times are seconds of any clock.

    Attributes:
        shares: by number of the account; without a share, weight 1 and no rate.
        waiting: number of waiting transfers.
        pinned: bytes of the reads in their turn.
    """

    def __init__(self, *, pinned_bytes: int, places: int = PLACES) -> None:
        """Begin with nothing to move.

        Args:
            pinned_bytes: bound on the bytes of all reads; a larger read runs alone.
            places: large transfers moving at a time, besides slow peers'.
        """
        self.shares: dict[int, Share] = {}
        self.waiting = 0
        self._pinned_most, self.pinned = pinned_bytes, 0
        self._places, self._window = places, 0
        self._most = places * _MORE_UNSHARED
        self._lanes: tuple[dict[int, deque[Turn]], ...] = tuple({} for _ in TransferKind)
        self._ends: dict[int, float] = {}
        self._virtual = 0.0
        self._moves_from_s = -math.inf
        self._moving: dict[Turn, None] = {}
        self._usual = math.log(_FIRST_BYTE_S)
        self._slow_byte_s = _SLOW * _FIRST_BYTE_S

    def set_quotas(self, quotas: Mapping[int, Quota]) -> None:
        """Take new weights and rates; counts, and buckets with the same rate, stay."""
        for number in list(self.shares):
            if number not in quotas or quotas[number].name != self.shares[number].quota.name:
                del self.shares[number]
                self._ends.pop(number, None)
        for number, quota in quotas.items():
            if number in self.shares:
                self.shares[number].obey(quota)
            else:
                self.shares[number] = Share(quota)
        self._most = self._places * (1 if self.shares else _MORE_UNSHARED)

    def may_begin(self, turn: Turn, now: float) -> bool:
        """Return whether the rates of a transfer's account allow it; a refusal is counted."""
        share = self.shares.get(turn.account)
        if share is None or not turn.charges:
            return True
        full, most = share.full_at, now + BURST_S
        if full[turn.kind.writes] <= most and full[_REQUESTS] <= most:
            return True
        share.throttled += 1
        return False

    def may_write(self, account: int, now: float) -> bool:
        """Return whether the account's rates allow a write; a refusal is counted."""
        return self.may_begin(Turn(account, TransferKind.WRITE, 0), now)

    def ask(self, turn: Turn, now: float) -> bool:
        """Add and charge a transfer; return whether the turn begins at once.

        A small transfer with a place is charged at the end: the charge does not delay the reply,
        and no more bytes than the window are uncharged.
        """
        self._set_tag(turn)
        if not self.waiting and self._has_memory(turn) and self._has_place(turn, now):
            self._grant(turn, now)
            if turn.size <= _PLACE_BYTES and turn.counts:
                return True
        if turn.share is not None and turn.charges:
            turn.share.charge(turn.kind, turn.size, now)
        turn.charges = False
        if turn.granted_s >= 0.0:
            return True
        if turn.kind >= TransferKind.MOVE_OUT and not any(self._lanes[TransferKind.MOVE_OUT :]):
            self._moves_from_s = max(self._moves_from_s, now + MOVE_PAUSE_S)
        self._lanes[turn.kind].setdefault(turn.account, deque()).append(turn)
        self.waiting += 1
        return False

    def go_on(self, turn: Turn, piece: int, now: float) -> bool:
        """End a piece of a transfer and ask for the next; return whether it has its turn at once.

        A transfer in progress goes before further transfers of its account.
        """
        self._free_place(turn)
        turn.piece, turn.continues = piece, True
        self._set_tag(turn)
        if not self.waiting and self._has_place(turn, now):
            self._grant(turn, now)
            return True
        turn.granted_s = -1.0
        self._lanes[turn.kind].setdefault(turn.account, deque()).appendleft(turn)
        self.waiting += 1
        return False

    def _set_tag(self, turn: Turn) -> None:
        now, end = self._virtual, self._ends.get(turn.account, 0.0)
        share = turn.share = self.shares.get(turn.account)
        tag = turn.tag = now if now > end else end
        self._ends[turn.account] = tag + (
            turn.piece if share is None else turn.piece / share.weight
        )

    def _free_place(self, turn: Turn) -> None:
        if turn in self._moving:
            del self._moving[turn]
            self._window -= turn.piece

    def give_turns(self, now: float) -> list[Turn]:
        """Begin the turns of waiting transfers and return them."""
        given: list[Turn] = []
        while self.waiting:
            turn = self._next(now)
            if turn is None:
                break
            self.leave(turn)
            self._grant(turn, now)
            given.append(turn)
        return given

    def leave(self, turn: Turn) -> None:
        """Remove a waiting transfer: the turn begins, or the wait was in vain."""
        lanes = self._lanes[turn.kind]
        lane = lanes[turn.account]
        lane.remove(turn)  # Nearly always the first.
        if not lane:
            del lanes[turn.account]
        self.waiting -= 1

    def is_first(self, turn: Turn) -> bool:
        """Return whether a waiting transfer is the next of its account and class."""
        return self._lanes[turn.kind][turn.account][0] is turn

    def end(self, turn: Turn, now: float) -> bool:
        """End a transfer's turn; return whether the peer was slow."""
        if turn.charges and turn.share is not None:
            turn.share.charge(turn.kind, turn.size, now)
        slow = self._stalls(turn, now)
        if turn.piece >= _MEASURED_BYTES and now > turn.granted_s >= 0.0:
            byte_s = math.log((now - turn.granted_s) / turn.piece)
            step = min(byte_s, self._usual + math.log(2 * _SLOW)) - self._usual
            self._usual += step * (_LEARNED if turn.counts else _LEARNED_OF_SLOW)
            self._slow_byte_s = _SLOW * math.exp(self._usual)
        self._free_place(turn)
        if not turn.kind.writes:
            self.pinned -= turn.size
        return slow

    def _next(self, now: float) -> Turn | None:
        """Return the next transfer, if there is a place; reads without memory let the rest pass.

        Among the rest are replies begun before, whose end gives the memory back.
        """
        moves = TransferKind.MOVE_OUT
        starved = now >= self._moves_from_s and any(self._lanes[moves:])
        order = (*self._lanes[moves:], *self._lanes[:moves]) if starved else self._lanes
        for lanes in order:
            heads = (lane[0] for lane in lanes.values() if self._has_memory(lane[0]))
            turn = min(heads, key=lambda turn: turn.tag, default=None)
            if turn is not None:
                return turn if self._has_place(turn, now) else None
        return None

    def _has_memory(self, turn: Turn) -> bool:
        pins = not turn.kind.writes and self.pinned > 0 and not turn.continues
        return not pins or self.pinned + turn.size <= self._pinned_most

    def _has_place(self, turn: Turn, now: float) -> bool:
        if not turn.counts or self._has_free_place(turn):
            return True
        self._leave_out_slow(now)
        return self._has_free_place(turn)

    def _has_free_place(self, turn: Turn) -> bool:
        most = self._most
        return len(self._moving) < most or self._window + turn.piece <= most * _PLACE_BYTES

    def _leave_out_slow(self, now: float) -> None:
        """Free the places of slow peers."""
        for turn in list(self._moving):
            if self._stalls(turn, now):
                self._free_place(turn)

    def _stalls(self, turn: Turn, now: float) -> bool:
        waited_s = now - turn.granted_s
        return waited_s > STALL_S and waited_s > STALL_S + turn.piece * self._slow_byte_s

    def _grant(self, turn: Turn, now: float) -> None:
        turn.granted_s = now
        if turn.kind >= TransferKind.MOVE_OUT:
            self._moves_from_s = now + MOVE_PAUSE_S
        if turn.tag > self._virtual:
            self._virtual = turn.tag
        if not turn.kind.writes and not turn.continues:
            self.pinned += turn.size
        if turn.counts:
            self._moving[turn] = None
            self._window += turn.piece
