"""Reads from a DMP node: look up, pin and read, hold, lease, touch, and report suspect ranges.

A part of DmpNode, called from any thread; dmp/node/state.py explains the lock.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import xxhash

from tierkv.dmp.config import MAX_HOLD_S
from tierkv.dmp.node.puts import range_span
from tierkv.dmp.node.state import NodeState
from tierkv.dmp.node.turn_order import TransferKind
from tierkv.dmp.segment.slots import Slot, SlotState
from tierkv.dmp.slots.accounts import EVERYONE
from tierkv.dmp.wire.messages import RangeRef
from tierkv.dmp.wire.range_codec import DescribedBlock, Ref, as_ref
from tierkv.kvcore.block import Location
from tierkv.kvcore.block_event import HoldOrder
from tierkv.kvcore.errors import CacheError
from tierkv.kvcore.ids import BlockKey

_LEASE_STEP: Final = 512
"""Blocks leased under one lock: less than a millisecond."""


@dataclass(slots=True, eq=False)
class ReadTicket:
    """Pinned ranges of sealed slots: bytes and stored checksums; ended by ``end_read``."""

    views: list[memoryview]
    checksums: list[int]
    slots: list[Slot]


@dataclass(frozen=True, slots=True)
class OpenRange:
    """A pinned range of a slot: the bytes in the segment and the stored checksum."""

    view: memoryview
    checksum: int


class Gets:
    """The reading side of a node."""

    def __init__(self, state: NodeState) -> None:
        self._state = state

    def lookup(self, keys: Sequence[BlockKey]) -> list[Location | None]:
        """Return the location of each sealed block, or None."""
        state = self._state
        with state.lock:
            table = state.table
            table.now = state.clock.now()
            slots = [table.find(key) for key in keys]
            return [state.location(slot) if slot else None for slot in slots]

    def describe(self, keys: Sequence[BlockKey]) -> list[DescribedBlock | None]:
        """Return the location and the range shape of each sealed block, or None."""
        state = self._state
        with state.lock:
            state.table.now = state.clock.now()
            slots = [state.table.find(key) for key in keys]
            return [
                DescribedBlock(state.location(slot), slot.block.ranges) if slot else None
                for slot in slots
            ]

    def account_of(self, ref: Ref) -> int:
        """Return the number of the account of a slot; everyone's if the slot is gone.

        Without the lock for a slot with an object: one look into a dictionary. If the slot changes
        the account at the same time, the old or the new account is charged.
        """
        state = self._state
        if not state.quotas:
            return EVERYONE
        slot = state.table.store.warm.get(ref[2])
        if slot is None:
            with state.lock:
                slot = state.table.store.at(ref[2])
        return EVERYONE if slot is None or slot.generation != ref[3] else slot.account

    def begin_read(self, refs: Sequence[Ref]) -> ReadTicket:
        """Pin ranges of sealed slots to read their ``views``; ``end_read`` must follow.

        Raises:
            StaleEpochError, BlockNotFoundError: a range is gone; no slot is pinned.
        """
        state = self._state
        slots: list[Slot] = []
        spans: list[tuple[int, int]] = []
        with state.lock:
            segment, table = state.segment, state.table
            table.now = state.clock.now()
            resolve, sealed = state.resolve, SlotState.SEALED
            for incarnation, file, index, generation, part, size in refs:
                slot = resolve(incarnation, file, index, generation, sealed)
                spans.append(range_span(slot, part, size))
                slots.append(slot)
            ticket = ReadTicket([], [], slots)
            views, sums = ticket.views, ticket.checksums
            pin, span, checksum = table.pin_for_read, segment.span, segment.stored_checksum
            # Nothing can fail from here on: every pinned slot has a ticket.
            for slot, (start, stop), ref in zip(slots, spans, refs, strict=True):
                pin(slot)
                views.append(span(slot.offset, start, stop))
                sums.append(checksum(slot, ref[4]))
        return ticket

    def end_read(self, ticket: ReadTicket) -> None:
        """Release the views and unpin the slots."""
        size = 0
        for view in ticket.views:
            size += len(view)
            view.release()
        state = self._state
        with state.lock:
            state.read_bytes += size
            state.unpin(ticket.slots)

    @contextlib.contextmanager
    def open_read(self, refs: Sequence[RangeRef]) -> Iterator[list[OpenRange]]:
        """Yield the bytes of ranges of sealed slots, pinned during the read.

        Raises:
            StaleEpochError, BlockNotFoundError: a range is gone; no slot is pinned.
        """
        ticket = self.begin_read([as_ref(ref) for ref in refs])
        try:
            yield [OpenRange(*pair) for pair in zip(ticket.views, ticket.checksums, strict=True)]
        finally:
            self.end_read(ticket)

    def hold(self, locations: Sequence[Location], *, ttl_s: float, owner: str = "") -> list[bool]:
        """Keep blocks from eviction; return which locations are still valid."""
        state = self._state
        with state.lock:
            table = state.table
            until = state.clock.now() + min(ttl_s, MAX_HOLD_S)
            return [
                state.is_mine(place)
                and table.hold(place.slot, place.generation, until=until, owner=owner)
                for place in locations
            ]

    def release(self, locations: Sequence[Location], *, owner: str = "") -> None:
        """Undo one hold of the owner on each location."""
        state = self._state
        with state.lock:
            table = state.table
            for place in locations:
                if state.is_mine(place):
                    table.release(place.slot, place.generation, owner=owner)

    def lease(self, order: HoldOrder) -> None:
        """Keep blocks from eviction for a lease of the meta server, or prolong or end the lease.

        Leases keep at most ``lease_share`` of the memory; a node that is not running keeps nothing.
        """
        state = self._state
        for at in range(0, max(1, len(order.keys)), _LEASE_STEP):
            part = replace(order, keys=order.keys[at : at + _LEASE_STEP])
            with state.lock:
                if state.running:
                    state.table.leases.carry_out(part, state.clock.now())

    def touch(self, locations: Sequence[Location], *, read_bytes: int) -> None:
        """Count a process's own reads in the segment, and charge their namespaces afterwards."""
        state = self._state
        moved: Counter[int] = Counter()
        with state.lock:
            table = state.table
            table.now = state.clock.now()
            state.read_bytes += read_bytes
            for place in locations:
                if state.is_mine(place):
                    table.touch(place.slot, place.generation)
                    slot = table.get(place.slot, place.generation) if state.quotas else None
                    if slot is not None and slot.account:
                        moved[slot.account] += slot.length
        whole = sum(place.length for place in locations) if moved else 0
        for account, size in moved.items():
            # Parts of blocks may have been read: each block counts with its part of all bytes.
            state.turns.charge(account, TransferKind.READ, size * read_bytes // max(1, whole))

    def suspect(self, refs: Sequence[RangeRef]) -> list[bool]:
        """Check ranges that a reader found bad; quarantine a slot whose bytes really are bad.

        The reader's report is not enough: the reader's network or memory may be at fault.
        """
        return [self._is_bad(ref) for ref in refs]

    def _is_bad(self, ref: RangeRef) -> bool:
        """Hash the range again, outside the lock; quarantine its slot if the bytes are bad."""
        try:
            ticket = self.begin_read([as_ref(ref)])
        except CacheError:
            return False
        bad = xxhash.xxh3_64_intdigest(ticket.views[0]) != ticket.checksums[0]
        self.end_read(ticket)
        if not bad:
            return False
        with self._state.lock:
            return self._state.running and self._state.quarantine(
                ref.location.slot, ref.location.generation
            )
