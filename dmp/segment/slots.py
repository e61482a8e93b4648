"""The values of the slot table: slots and their states.

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
    """State of a slot's bytes; the numbers are stored in the segment."""

    FREE = 0
    WRITING = 1
    SEALED = 2
    QUARANTINED = 3


@dataclass(slots=True, eq=False)
class Slot:
    """A slot in use; mutated only by SlotTable and its helpers.

    Attributes:
        index: slot number in the segment.
        generation: number of this use of the slot; never repeats in a segment's life.
        block: block in the slot.
        state: never FREE; free slots have no Slot.
        extent: extent of the slot, which determines the slot size.
        offset: where the payload begins, counted from the first extent.
        deadline: when a WRITING slot expires.
        pins: number of running transfers that touch the bytes; a pinned slot is not reused.
        holders: number of holds per owner ("" for no owner); valid until ``hold_deadline``.
        hold_deadline: the latest deadline of the holds.
        last_used: position in the order of uses.
        doomed: expired or aborted while pinned; freed with the last pin.
        owner: client that reserved the slot, while the slot is WRITING.
        clean: a copy rests in the lower tier, so eviction loses nothing.
        leased: a lease keeps the slot from eviction.
        known: the eviction policy of the slot size knows the slot. True for all sealed blocks,
            except for blocks found at a restart until their first use.
        offered: the policy may name the slot as the next victim.
        used_at: time of the last use reported to the policy.
        facts: facts reported to the policy; NO_FACTS for a block found at a restart.
        spare: clean, and not used since the copy was made: among the next victims.
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
