"""The order of one node's event batches: repeats, gaps and inventories in parts. A pure core.

Used by metaserver/directory/directory.py, one Feed per node and incarnation. It only classifies
batches; the directory interprets the events.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from tierkv.kvwire.event_records import EventRecords


class Verdict(Enum):
    """How to handle a batch."""

    REPEATED = auto()
    """A batch seen before: do nothing."""
    EVENTS = auto()
    """Apply the events; nothing else changes."""
    FIRST_PART = auto()
    """An inventory begins: copies that it does not name are dropped at its end."""
    NEXT_PART = auto()
    """The inventory goes on."""


@dataclass(slots=True)
class Feed:
    """Progress through the numbered batches of one incarnation.

    Attributes:
        last_seq: highest number seen; batches at or below this number are repeats.
        synced: an inventory was completed and nothing is missing since.
        next_part: the inventory part expected next; None outside an inventory.
    """

    last_seq: int = 0
    synced: bool = False
    next_part: int | None = None

    @property
    def wants_inventory(self) -> bool:
        """Return whether the node should report all blocks held."""
        return not self.synced and self.next_part is None

    def admit(self, batch: EventRecords) -> Verdict:
        """Record a batch and classify it.

        After a gap the events are still true (later events about a block win), but only an
        inventory can recover the lost events.
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
