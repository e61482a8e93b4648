"""Transfers wait for their turn at a pool node: the threads around dmp/node/turn_order.py.

Connections wait here (over DmpNode.turns); gets and puts charge or refuse without a wait. The
lock is taken after the node's lock, never before.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

from tierkv.dmp.node.turn_order import PLACES, STALL_S, Moved, TransferKind, Turn, TurnOrder
from tierkv.dmp.slots.accounts import EVERYONE, Quota
from tierkv.kvcore.clock import Clock
from tierkv.kvcore.errors import ThrottledError, TransportError


class Turns:
    """The order of a node's transfers, for threads."""

    def __init__(self, clock: Clock, *, pinned_bytes: int, places: int = PLACES) -> None:
        self._clock = clock
        self._order = TurnOrder(pinned_bytes=pinned_bytes, places=places)
        self._lock = threading.Lock()

    def set_quotas(self, quotas: Mapping[int, Quota]) -> None:
        """Take the weights and rates of all accounts."""
        with self._lock:
            self._order.set_quotas(quotas)
            self._wake(self._clock.now())

    def take(self, turn: Turn, *, timeout_s: float) -> None:
        """Wait for the turn of a transfer; ``end`` must follow.

        Raises:
            ThrottledError: the account has used a rate.
            TransportError: no turn came in time.
        """
        with self._lock:
            now = self._clock.now()
            if not self._order.may_begin(turn, now):
                name = self._order.shares[turn.account].quota.name
                raise ThrottledError(f"namespace {name} has used its rate at this node")
            if self._order.ask(turn, now):
                return
            turn.woken = threading.Event()
        self._wait(turn, turn.woken, now + timeout_s)

    def go_on(self, turn: Turn, piece: int, *, timeout_s: float) -> None:
        """Wait for the turn of a transfer's next piece.

        Raises:
            TransportError: no turn came in time; ``end`` must follow as well.
        """
        with self._lock:
            now = self._clock.now()
            if self._order.go_on(turn, piece, now):
                return
            turn.woken = threading.Event()
        self._wait(turn, turn.woken, now + timeout_s)

    @property
    def has_shares(self) -> bool:
        """Whether large transfers should move in pieces: for a quicker turn of the rest."""
        return bool(self._order.shares)

    def end(self, turn: Turn) -> bool:
        """End a transfer's turn; return whether the peer was slow."""
        with self._lock:
            now = self._clock.now()
            slow = self._order.end(turn, now)
            if self._order.waiting:
                self._wake(now)
        return slow

    def _wait(self, turn: Turn, woken: threading.Event, until: float) -> None:
        while True:
            with self._lock:
                now = self._clock.now()
                self._wake(now)
                if turn.granted_s >= 0:
                    return
                if now >= until:
                    self._order.leave(turn)
                    self._wake(now)
                    raise TransportError("too many bytes are being moved at once")
                # The first looks for places of slow peers.
                wait_s = min(STALL_S if self._order.is_first(turn) else 1.0, until - now)
            woken.wait(wait_s)

    def _wake(self, now: float) -> None:
        """Begin turns and wake the waiting threads. Lock held."""
        for turn in self._order.give_turns(now):
            if turn.woken is not None:
                turn.woken.set()

    def charge(self, account: int, kind: TransferKind, size: int) -> None:
        """Charge bytes moved without a turn."""
        if account == EVERYONE:
            return
        with self._lock:
            share = self._order.shares.get(account)
            if share is not None:
                share.charge(kind, size, self._clock.now())

    def may_write(self, account: int) -> bool:
        """Return whether a block may be written, or count a refusal: the rate is used."""
        if account == EVERYONE:
            return True
        with self._lock:
            return self._order.may_write(account, self._clock.now())

    @property
    def pinned_bytes(self) -> int:
        """Bytes of the reads in their turn."""
        return self._order.pinned

    @property
    def waiting(self) -> int:
        """Number of waiting transfers."""
        return self._order.waiting

    def moved(self) -> dict[str, Moved]:
        """Return what each namespace with limits moved."""
        with self._lock:
            return {
                share.quota.name: Moved(share.read_bytes, share.write_bytes, share.throttled)
                for share in self._order.shares.values()
            }
