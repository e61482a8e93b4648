"""The order of one node's event batches: repeats, gaps and inventories in parts. A pure core.

Used by metaserver/directory/directory.py, one Feed per node and incarnation. It decides what a
batch is; what the events mean is the directory's business.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from tierkv.kvwire.event_records import EventRecords


class Verdict(Enum):
    """What to do with a batch."""

    REPEATED = auto()
    """It was taken before: do nothing."""
    EVENTS = auto()
    """Apply the events; nothing else changes."""
    FIRST_PART = auto()
    """An inventory begins: from here on, what it doesn't name is gone when it ends."""
    NEXT_PART = auto()
    """The inventory goes on."""


@dataclass(slots=True)
class Feed:
    """What has arrived of one incarnation's numbered batches.

    Attributes:
        last_seq: highest number seen; batches at or below it are repeats.
        synced: an inventory was completed and nothing is missing since.
        next_part: the inventory part expected next; None outside an inventory.
    """

    last_seq: int = 0
    synced: bool = False
    next_part: int | None = None

    @property
    def wants_inventory(self) -> bool:
        """Whether the node should report everything it holds."""
        return not self.synced and self.next_part is None

    def admit(self, batch: EventRecords) -> Verdict:
        """Take a batch in and say what it is.

        After a gap the events are still true (later news of a block wins), but what was lost
        can only be learnt from an inventory.
        """
        if batch.seq <= self.last_seq:
            return Verdict.REPEATED
        contiguous = batch.seq == self.last_seq + 1
        self.last_seq = batch.seq
        if not batch.inventory:
            if not contiguous or self.next_part is not None:
                self._lose()
            return Verdict.EVENTS
        if batch.part == 0:
            self._advance(batch)
            return Verdict.FIRST_PART
        if contiguous and batch.part == self.next_part:
            self._advance(batch)
            return Verdict.NEXT_PART
        self._lose()
        return Verdict.EVENTS

    def _lose(self) -> None:
        self.synced = False
        self.next_part = None

    def _advance(self, batch: EventRecords) -> None:
        self.synced = not batch.more
        self.next_part = batch.part + 1 if batch.more else None
