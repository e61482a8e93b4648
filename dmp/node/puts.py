"""Writes to a DMP node: reserve, write, seal, or abort.

A part of DmpNode, called from any thread; dmp/node/state.py explains the lock.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tierkv.dmp.config import MAX_RESERVE_S
from tierkv.dmp.node.state import NodeState
from tierkv.dmp.node.turn_order import TransferKind
from tierkv.dmp.segment.slots import Slot, SlotState
from tierkv.dmp.slots.accounts import EVERYONE
from tierkv.dmp.slots.slot_table import NO_DEADLINE
from tierkv.dmp.wire.messages import RangeRef, Sealing, check_put
from tierkv.dmp.wire.range_codec import ANY_SIZE, WHOLE, Ref, as_ref
from tierkv.kvcore.block import BlockSpec, Location, Tier
from tierkv.kvcore.block_event import BlockEvent, BlockRemoved
from tierkv.kvcore.errors import BlockNotFoundError


@dataclass(slots=True, eq=False)
class WriteTicket:
    """Pinned ranges of reserved slots: destinations of the bytes; ended by ``end_write``."""

    views: list[memoryview]
    slots: list[Slot]


@dataclass(slots=True, eq=False)
class PutTicket:
    """Whole blocks to be stored: destination of each block's bytes, None without a slot."""

    views: list[memoryview | None]
    slots: list[Slot | None]


class Puts:
    """The writing side of a node.

    Attributes:
        sealed: called (without the lock) after blocks were sealed.
    """

    def __init__(self, state: NodeState) -> None:
        self.sealed: Callable[[], None] = _nothing
        self._state = state

    def reserve(
        self,
        puts: Sequence[BlockSpec],
        *,
        deadline_s: float = 30.0,
        owner: str = "",
        must: bool = False,
    ) -> list[Location | None]:
        """Reserve a slot per block, in order; None where the block exists or no room is left.

        Args:
            puts: the blocks.
            deadline_s: seconds until the reservations expire.
            owner: client whose death ends the reservations early (``release_owner``); empty for no
                owner.
            must: store the blocks whatever their worth: skip the admission check. Leased and held
                blocks stay, so a reservation may still find no room.
        """
        for put in puts:
            check_put(put)
        state = self._state
        removed: list[BlockEvent] = []
        with state.lock:
            state.expire()
            if state.draining:
                return [None] * len(puts)
            deadline = state.clock.now() + min(deadline_s, MAX_RESERVE_S)
            answer = [self._reserve_one(put, deadline, removed, owner, must) for put in puts]
            state.segment.set_generation(state.table.generation)
            state.tell(removed)
        return answer

    def _reserve_one(
        self, put: BlockSpec, deadline: float, removed: list[BlockEvent], owner: str, must: bool
    ) -> Location | None:
        state = self._state
        account = state.table.accounts.of(put.owner) if state.quotas else EVERYONE
        if not must and not state.turns.may_write(account):
            return None
        slot = self._take_slot(put, deadline, removed, owner, must)
        if slot is None:
            return None
        if not must:
            state.turns.charge(account, TransferKind.WRITE, slot.length)
        state.segment.headers.write(slot)
        return state.location(slot)

    def _take_slot(
        self,
        put: BlockSpec,
        deadline: float,
        removed: list[BlockEvent],
        owner: str,
        must: bool = False,
    ) -> Slot | None:
        """Take a slot whose header still says FREE: a restart or mapped reader ignores the slot."""
        state = self._state
        decision = state.table.reserve(put, deadline=deadline, owner=owner, must=must)
        removed += state.clear_removed()
        if decision is None:
            return None
        slot, segment = decision.slot, state.segment
        for victim in decision.victims:
            segment.headers.set_state(victim.index, SlotState.FREE)
            removed.append(BlockRemoved(victim.block.key, Tier.L2))
        if not state.has_memory(slot):
            return None
        segment.set_extent_size(slot.extent.index, slot.extent.slot_bytes)
        return slot

    def account_of(self, put: BlockSpec) -> int:
        """Return the number of the account of a block to be stored."""
        state = self._state
        if not state.quotas:
            return EVERYONE
        with state.lock:
            return state.table.accounts.of(put.owner)

    def begin_put(self, puts: Sequence[BlockSpec]) -> PutTicket:
        """Reserve whole blocks to fill their ``views``; ``end_put`` or ``abort_put`` must follow.

        The reservations end with the ticket only: they have neither deadline nor owner. The caller
        has checked the requests. A view is None where the block exists or no room is left.
        """
        state = self._state
        ticket = PutTicket([], [])
        removed: list[BlockEvent] = []
        with state.lock:
            state.expire()
            segment, pin, draining = state.segment, state.table.pin, state.draining
            for put in puts:
                slot = None if draining else self._take_slot(put, NO_DEADLINE, removed, "")
                ticket.slots.append(slot)
                if slot is None:
                    ticket.views.append(None)
                    continue
                pin(slot)
                ticket.views.append(segment.span(slot.offset, 0, slot.length))
            segment.set_generation(state.table.generation)
            state.tell(removed)
        return ticket

    def end_put(
        self, ticket: PutTicket, checksums: Sequence[tuple[int, ...]]
    ) -> list[Location | None]:
        """Make the filled blocks readable; None without a slot or after the deadline.

        Args:
            ticket: from ``begin_put``; the views are released.
            checksums: per block, the xxh3_64 of each range.
        """
        _let_go(ticket)
        state = self._state
        events: list[BlockEvent] = []
        answer: list[Location | None] = []
        with state.lock:
            now = state.clock.now()
            state.unpin([slot for slot in ticket.slots if slot is not None])
            for slot, sums in zip(ticket.slots, checksums, strict=True):
                sealed = slot and self._seal_filled(slot, sums, now)
                if not sealed:
                    answer.append(None)
                    continue
                event = state.stored(sealed)
                events.append(event)
                answer.append(event.location)
            state.tell(events)
        self.sealed()
        return answer

    def abort_put(self, ticket: PutTicket) -> None:
        """Free the slots and release the views of a put."""
        _let_go(ticket)
        state = self._state
        with state.lock:
            slots = [slot for slot in ticket.slots if slot is not None]
            state.unpin(slots)
            for slot in slots:
                freed = state.running and state.table.abort(slot.index, slot.generation)
                if freed:
                    state.segment.headers.set_state(freed.index, SlotState.FREE)

    def _seal_filled(self, slot: Slot, checksums: tuple[int, ...], now: float) -> Slot | None:
        state = self._state
        if not state.running or state.table.seal(slot.index, slot.generation, now=now) is None:
            return None
        return self._write_down(slot, checksums)

    def begin_write(self, refs: Sequence[Ref]) -> WriteTicket:
        """Pin ranges of reserved slots to fill their ``views``; ``end_write`` must follow.

        The index ``WHOLE`` (dmp/wire/range_codec.py) is the whole payload.

        Raises:
            StaleEpochError, LeaseExpiredError: a reservation is gone; no slot is pinned.
            BlockNotFoundError: the range does not exist, or has another length than the caller's.
        """
        state = self._state
        ticket = WriteTicket([], [])
        with state.lock:
            segment, table = state.segment, state.table
            spans = []
            for incarnation, file, index, generation, part, size in refs:
                slot = state.resolve(incarnation, file, index, generation, SlotState.WRITING)
                spans.append(_written_span(slot, part, size))
                ticket.slots.append(slot)
            for slot, (start, stop) in zip(ticket.slots, spans, strict=True):
                table.pin(slot)
                ticket.views.append(segment.span(slot.offset, start, stop))
        return ticket

    def end_write(self, ticket: WriteTicket) -> None:
        """Release the views and unpin the slots."""
        for view in ticket.views:
            view.release()
        with self._state.lock:
            self._state.unpin(ticket.slots)

    @contextlib.contextmanager
    def open_write(self, location: Location, index: int) -> Iterator[memoryview]:
        """Yield the bytes of a range of a reserved slot, pinned until the caller is done.

        Raises:
            StaleEpochError, LeaseExpiredError: the reservation is gone.
            BlockNotFoundError: no such range.
        """
        ticket = self.begin_write([as_ref(RangeRef(location, index))])
        try:
            yield ticket.views[0]
        finally:
            self.end_write(ticket)

    def seal(self, items: Sequence[Sealing]) -> list[Location | None]:
        """Make written slots readable, checksums first and state last; None after the deadline."""
        state = self._state
        with state.lock:
            now = state.clock.now()
            slots = [self._seal_one(item, now) for item in items]
            state.tell([state.stored(slot) for slot in slots if slot])
            answer = [state.location(slot) if slot else None for slot in slots]
        self.sealed()
        return answer

    def _seal_one(self, item: Sealing, now: float) -> Slot | None:
        state, place = self._state, item.location
        if not state.is_mine(place):
            return None
        slot = state.table.get(place.slot, place.generation)
        if slot is None or len(item.checksums) != slot.block.ranges.count:
            return None
        slot = state.table.seal(place.slot, place.generation, now=now)
        return self._write_down(slot, item.checksums) if slot else None

    def _write_down(self, slot: Slot, checksums: Sequence[int]) -> Slot:
        """Store a sealed slot's checksums and header in the segment, the state last."""
        state = self._state
        state.segment.write_checksums(slot.index, slot.extent.slot_bytes, checksums)
        state.sealed_order += 1
        state.stored_tokens += slot.block.tokens
        state.write_bytes += slot.length
        state.segment.headers.write(slot, order=state.sealed_order)
        return slot

    def abort(self, locations: Sequence[Location]) -> None:
        """Free reserved slots; unknown reservations are ignored."""
        state = self._state
        with state.lock:
            for place in locations:
                if state.is_mine(place):
                    slot = state.table.abort(place.slot, place.generation)
                    if slot is not None:
                        state.segment.headers.set_state(slot.index, SlotState.FREE)

    def release_owner(self, owner: str) -> None:
        """Abort the unsealed reservations of a dead client, and end the client's holds.

        O(reservations and holds of the client); an unknown or empty owner is ignored.
        """
        state = self._state
        with state.lock:
            if owner and state.running:
                for slot in state.table.release_owner(owner):
                    state.segment.headers.set_state(slot.index, SlotState.FREE)


def range_span(slot: Slot, part: int, size: int) -> tuple[int, int]:
    """Return where a range lies in its slot.

    Raises:
        BlockNotFoundError: the range does not exist, or has another length than the caller's.
    """
    ranges = slot.block.ranges
    if not 0 <= part < ranges.count:
        raise BlockNotFoundError(f"range {part} is outside [0, {ranges.count})")
    if size not in (ANY_SIZE, ranges.size_bytes):
        raise BlockNotFoundError(f"the range has {ranges.size_bytes} bytes, not {size}")
    start = part * ranges.size_bytes
    return start, start + ranges.size_bytes


def _written_span(slot: Slot, part: int, size: int) -> tuple[int, int]:
    """Return where a range, or the whole payload, lies in its slot."""
    if part != WHOLE:
        return range_span(slot, part, size)
    if size not in (ANY_SIZE, slot.length):
        raise BlockNotFoundError(f"the payload has {slot.length} bytes, not {size}")
    return 0, slot.length


def _let_go(ticket: PutTicket) -> None:
    for view in ticket.views:
        if view is not None:
            view.release()


def _nothing() -> None:
    pass
