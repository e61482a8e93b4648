"""What a slot is: the values of the slot table.

Decided by dmp/slots/slot_table.py and its helpers, written down by dmp/segment/segment.py, read by
transports.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final

from tierkv.dmp.segment.extents import Extent
from tierkv.kvcore.block import BlockSpec
from tierkv.policies.eviction import NO_FACTS, BlockFacts

_NOWHERE: Final = Extent(-1)


class SlotState(IntEnum):
    """What a slot's bytes are; the numbers are stored in the segment."""

    FREE = 0
    WRITING = 1
    SEALED = 2
    QUARANTINED = 3


@dataclass(slots=True, eq=False)
class Slot:
    """A slot in use; mutated only by SlotTable and its helpers.

    Attributes:
        index: slot number in the segment.
        generation: which use of this slot number; never repeats in a segment's life.
        block: what is in it.
        state: never FREE; free slots have no Slot.
        extent: the extent it lies in, whose slot size is its own.
        offset: where its payload begins, counted from the first extent.
        deadline: when a WRITING slot expires.
        pins: transfers touching the bytes right now; a pinned slot is not reused.
        holders: holds per owner ("" for nobody in particular); count until ``hold_deadline``.
        hold_deadline: the latest deadline of its holds.
        last_used: position in the order of uses.
        doomed: expired or aborted while pinned; freed with the last pin.
        owner: who reserved it, while it is WRITING.
        clean: a copy rests in the lower tier, so that evicting it loses nothing.
        leased: a lease keeps it from eviction.
        known: the eviction policy of its size knows it; so it is with sealed blocks, but for those
            that a restart found, until somebody uses them.
        offered: that policy may name it as the next to go.
        used_at: time of the last use that the policy was told.
        facts: what that policy is told; NO_FACTS of what a restart found.
        spare: clean, and not used since the copy was made: among the next to be evicted.
    """

    index: int
    generation: int
    block: BlockSpec
    state: SlotState
    extent: Extent = _NOWHERE
    offset: int = 0
    deadline: float = 0.0
    pins: int = 0
    holders: dict[str, int] = field(default_factory=dict)
    hold_deadline: float = 0.0
    last_used: int = 0
    doomed: bool = False
    owner: str = ""
    clean: bool = False
    spare: bool = False
    leased: bool = False
    known: bool = False
    offered: bool = False
    used_at: float = 0.0
    facts: BlockFacts = NO_FACTS

    @property
    def length(self) -> int:
        """Payload bytes."""
        ranges = self.block.ranges
        return ranges.size_bytes * ranges.count


@dataclass(frozen=True, slots=True)
class Reserved:
    """A decision: clear ``victims``, note the extent's size, then let ``slot`` be written."""

    slot: Slot
    victims: tuple[Slot, ...]
