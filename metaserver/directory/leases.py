"""Leases on located blocks: who promised to keep what, until when. A pure core.

Called by metaserver/state.py with ``now`` handed in. Each change answers the orders that the nodes
concerned must get; their delivery is the shell's business. Expiry needs no order: nodes know the
same deadline.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Final

from tierkv.kvcore import limits
from tierkv.kvcore.hold import NO_LEASE, HoldOrder, LeaseId
from tierkv.kvcore.ids import BLOCK_KEY_BYTES, BlockKey, NodeId

MAX_KEPT_KEYS: Final = 4 << 20
"""Keys in all live leases, counted for the chain and again for each node that keeps them: 64 MiB
of names."""


@dataclass(frozen=True, slots=True)
class Asked:
    """An order and the node it is for; keys are concatenated, for there may be thousands."""

    node_id: NodeId
    lease: LeaseId
    keys: bytes
    ttl_s: float

    def order(self) -> HoldOrder:
        """Build what the node gets."""
        return HoldOrder(self.lease, cut_keys(self.keys), self.ttl_s)


@dataclass(frozen=True, slots=True)
class LeaseChange:
    """What came of a lease: its id (NO_LEASE: nothing), whom to tell, and what it covered.

    Attributes:
        lease: the lease that was given, prolonged or ended; NO_LEASE when there is none.
        orders: what to send to nodes.
        chain: of a lease that ended, the located keys, concatenated.
    """

    lease: LeaseId = NO_LEASE
    orders: tuple[Asked, ...] = ()
    chain: bytes = b""


NO_CHANGE: Final = LeaseChange()


@dataclass(slots=True)
class _Lease:
    chain: bytes
    held: dict[NodeId, bytes]
    deadline: float
    kept_keys: int


@dataclass(slots=True)
class LeaseCounts:
    """What happened to leases since the start; ``refused`` by reason."""

    granted: int = 0
    extended: int = 0
    committed: int = 0
    aborted: int = 0
    expired: int = 0
    unknown: int = 0
    refused_ttl: int = 0
    refused_full: int = 0


class Leases:
    """The live leases. Mutated only through its public methods.

    A lease goes live -> ended or expired; both forget it, and its number is never used again.

    Attributes:
        counts: what happened so far.
        _live: leases whose deadline has not passed, or was not noticed yet.
        _deadlines: (deadline, lease) heap; entries whose deadline moved or ended are skipped.
        _kept_keys: keys of all live leases, per chain and per node.
    """

    def __init__(
        self,
        *,
        first_lease: int = 1,
        max_leases: int = limits.MAX_LEASES,
        max_kept_keys: int = MAX_KEPT_KEYS,
    ) -> None:
        """Start empty.

        Args:
            first_lease: a number above those of earlier lives, so that an old lease is unknown.
            max_leases: most live leases.
            max_kept_keys: most keys in them, counted per chain and node.
        """
        self.counts = LeaseCounts()
        self._next = first_lease
        self._max_leases = max_leases
        self._max_kept_keys = max_kept_keys
        self._live: dict[LeaseId, _Lease] = {}
        self._deadlines: list[tuple[float, LeaseId]] = []
        self._kept_keys = 0

    def __len__(self) -> int:
        return len(self._live)

    @property
    def kept_keys(self) -> int:
        """Keys in the table, counted per chain and per node that keeps them."""
        return self._kept_keys

    @property
    def queued_deadlines(self) -> int:
        """Deadlines that wait to be looked at, those that moved included."""
        return len(self._deadlines)

    def grant(
        self, chain: bytes, held: Mapping[NodeId, bytes], ttl_s: float, now: float
    ) -> LeaseChange:
        """Reserve located blocks for ``ttl_s``; NO_CHANGE when that can't be, and it is counted.

        Args:
            chain: the located keys, concatenated; a commit counts as a use of these.
            held: which of them each node is to keep, concatenated.
            ttl_s: in (0, limits.MAX_LEASE_S].
            now: seconds.
        """
        if not _is_ttl(ttl_s):
            self.counts.refused_ttl += 1
            return NO_CHANGE
        keys = (len(chain) + sum(map(len, held.values()))) // BLOCK_KEY_BYTES
        if len(self._live) >= self._max_leases or self._kept_keys + keys > self._max_kept_keys:
            self.counts.refused_full += 1
            return NO_CHANGE
        lease = LeaseId(self._next)
        self._next += 1
        self._live[lease] = _Lease(chain, dict(held), now + ttl_s, keys)
        self._kept_keys += keys
        heappush(self._deadlines, (now + ttl_s, lease))
        self.counts.granted += 1
        orders = tuple(Asked(node, lease, raw, ttl_s) for node, raw in held.items())
        return LeaseChange(lease, orders)

    def extend(self, lease: LeaseId, ttl_s: float, now: float) -> LeaseChange:
        """Give a lease a new time from now; a time that can't be leaves it as it is."""
        if not _is_ttl(ttl_s):
            self.counts.refused_ttl += 1
            return NO_CHANGE
        live = self._live.get(lease)
        if live is None:
            self.counts.unknown += 1
            return NO_CHANGE
        live.deadline = now + ttl_s
        heappush(self._deadlines, (live.deadline, lease))
        self._forget_old_deadlines()
        self.counts.extended += 1
        return LeaseChange(lease, tuple(Asked(node, lease, b"", ttl_s) for node in live.held))

    def end(self, lease: LeaseId, *, used: bool) -> LeaseChange:
        """Let go of a lease: commit (``used``) or abort."""
        live = self._take(lease)
        if live is None:
            self.counts.unknown += 1
            return NO_CHANGE
        if used:
            self.counts.committed += 1
        else:
            self.counts.aborted += 1
        orders = tuple(Asked(node, lease, b"", 0.0) for node in live.held)
        return LeaseChange(lease, orders, live.chain)

    def expire(self, now: float) -> None:
        """Forget leases whose time is over; nobody need be told."""
        while self._deadlines and self._deadlines[0][0] <= now:
            deadline, lease = heappop(self._deadlines)
            live = self._live.get(lease)
            if live is not None and live.deadline == deadline:
                self._take(lease)
                self.counts.expired += 1

    def drop_node(self, node_id: NodeId) -> None:
        """Forget what a node was asked to keep: it is gone, or has started again. O(leases)."""
        for live in self._live.values():
            raw = live.held.pop(node_id, None)
            if raw is not None:
                live.kept_keys -= len(raw) // BLOCK_KEY_BYTES
                self._kept_keys -= len(raw) // BLOCK_KEY_BYTES

    def orders_of(self, node_id: NodeId, now: float) -> tuple[Asked, ...]:
        """Return everything a node is to keep at this moment, older leases first."""
        return tuple(
            Asked(node_id, lease, live.held[node_id], live.deadline - now)
            for lease, live in self._live.items()
            if node_id in live.held and live.deadline > now
        )

    def chains(self) -> tuple[bytes, ...]:
        """Return the chain of each live lease, keys concatenated."""
        return tuple(live.chain for live in self._live.values())

    def check_invariants(self) -> None:
        """Assert that the sums and the queue of deadlines fit the live leases."""
        for live in self._live.values():
            raw = len(live.chain) + sum(map(len, live.held.values()))
            assert live.kept_keys == raw // BLOCK_KEY_BYTES
        assert self._kept_keys == sum(live.kept_keys for live in self._live.values())
        assert self._kept_keys <= self._max_kept_keys and len(self._live) <= self._max_leases
        queued = set(self._deadlines)
        assert all((live.deadline, lease) in queued for lease, live in self._live.items())

    def _take(self, lease: LeaseId) -> _Lease | None:
        live = self._live.pop(lease, None)
        if live is not None:
            self._kept_keys -= live.kept_keys
        return live

    def _forget_old_deadlines(self) -> None:
        """Rebuild the queue when most of it is of deadlines that moved."""
        if len(self._deadlines) > 2 * len(self._live) + 64:
            self._deadlines = sorted((live.deadline, id_) for id_, live in self._live.items())


def cut_keys(raw: bytes) -> tuple[BlockKey, ...]:
    """Cut concatenated keys apart."""
    step = BLOCK_KEY_BYTES
    return tuple([BlockKey(raw[at : at + step]) for at in range(0, len(raw), step)])


def _is_ttl(ttl_s: float) -> bool:
    return math.isfinite(ttl_s) and 0.0 < ttl_s <= limits.MAX_LEASE_S
