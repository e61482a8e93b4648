"""Leases on located blocks: which node keeps which blocks, until when. A pure core.

Called by metaserver/state.py with ``now`` passed in. Each change returns the orders for the
affected nodes; the shell delivers the orders. Expiry needs no order: nodes know the same deadline.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Final

from tierkv.kvcore import limits
from tierkv.kvcore.block_event import NO_LEASE, HoldOrder, LeaseId
from tierkv.kvcore.ids import BLOCK_KEY_BYTES, BlockKey, NodeId

MAX_KEPT_KEYS: Final = 4 << 20
"""Keys in all live leases, counted for the chain and again for each node that keeps them: 64 MiB of
names."""


@dataclass(frozen=True, slots=True)
class Asked:
    """An order and its node; keys are concatenated, because an order may have thousands of keys."""

    node_id: NodeId
    lease: LeaseId
    keys: bytes
    ttl_s: float

    def order(self) -> HoldOrder:
        """Build the order for the node."""
        return HoldOrder(self.lease, cut_keys(self.keys), self.ttl_s)


@dataclass(frozen=True, slots=True)
class LeaseChange:
    """Result of a change to a lease.

    Attributes:
        lease: the lease given, extended or ended; NO_LEASE if nothing changed.
        orders: orders to send to nodes.
        chain: for an ended lease, the located keys, concatenated.
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
    """Counts of lease changes since the start; ``refused`` by reason."""

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

    A lease goes live -> ended or expired; either removes the lease, and its number is never used
    again.

    Attributes:
        counts: lease changes so far.
        _live: leases whose deadline has not passed, or was not noticed yet.
        _deadlines: (deadline, lease) heap; entries of extended or ended leases are skipped.
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
            first_lease: a number above all earlier leases, so an old lease is unknown.
            max_leases: largest number of live leases.
            max_kept_keys: largest number of keys in live leases, counted per chain and node.
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
        """Keys of all live leases, counted per chain and per holding node."""
        return self._kept_keys

    @property
    def queued_deadlines(self) -> int:
        """Entries of the deadline heap, including outdated entries."""
        return len(self._deadlines)

    def grant(
        self, chain: bytes, held: Mapping[NodeId, bytes], ttl_s: float, now: float
    ) -> LeaseChange:
        """Reserve located blocks for ``ttl_s``; a refusal is counted and returns NO_CHANGE.

        Args:
            chain: the located keys, concatenated; a commit counts as a use of these keys.
            held: the keys that each node is to keep, concatenated.
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
        """Give a lease a new time from now; an invalid time leaves the lease unchanged."""
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
        """End a lease: commit (``used``) or abort."""
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
        """Remove leases whose time is over; no node has to be told."""
        while self._deadlines and self._deadlines[0][0] <= now:
            deadline, lease = heappop(self._deadlines)
            live = self._live.get(lease)
            if live is not None and live.deadline == deadline:
                self._take(lease)
                self.counts.expired += 1

    def drop_node(self, node_id: NodeId) -> None:
        """Remove a node from all leases after the node left or restarted. O(leases)."""
        for live in self._live.values():
            raw = live.held.pop(node_id, None)
            if raw is not None:
                live.kept_keys -= len(raw) // BLOCK_KEY_BYTES
                self._kept_keys -= len(raw) // BLOCK_KEY_BYTES

    def orders_of(self, node_id: NodeId, now: float) -> tuple[Asked, ...]:
        """Return all active orders of a node, older leases first."""
        return tuple(
            Asked(node_id, lease, live.held[node_id], live.deadline - now)
            for lease, live in self._live.items()
            if node_id in live.held and live.deadline > now
        )

    def chains(self) -> tuple[bytes, ...]:
        """Return the chain of each live lease, keys concatenated."""
        return tuple(live.chain for live in self._live.values())

    def check_invariants(self) -> None:
        """Assert that the sums and the deadline heap match the live leases."""
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
        """Rebuild the heap when most entries are outdated."""
        if len(self._deadlines) > 2 * len(self._live) + 64:
            self._deadlines = sorted((live.deadline, id_) for id_, live in self._live.items())


def cut_keys(raw: bytes) -> tuple[BlockKey, ...]:
    """Cut concatenated keys apart."""
    step = BLOCK_KEY_BYTES
    return tuple([BlockKey(raw[at : at + step]) for at in range(0, len(raw), step)])


def _is_ttl(ttl_s: float) -> bool:
    return math.isfinite(ttl_s) and 0.0 < ttl_s <= limits.MAX_LEASE_S
