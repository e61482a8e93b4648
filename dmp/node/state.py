"""Shared state of the parts of a DMP node: one lock, the slot table, the segment, the identity.

Used by dmp/node/node.py and its parts (puts, gets, reports, scrubber, demoter, promoter). The lock
guards decisions and headers for microseconds; payload bytes move outside the lock, in pinned slots.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np

from tierkv.dmp.config import DmpConfig
from tierkv.dmp.node.turns import Turns
from tierkv.dmp.segment.geometry import Geometry
from tierkv.dmp.segment.segment import Segment
from tierkv.dmp.segment.segment_file import scan_segment
from tierkv.dmp.segment.slots import Slot, SlotState, slot_bytes_for
from tierkv.dmp.slots.accounts import Quota
from tierkv.dmp.slots.eviction import policy_for
from tierkv.dmp.slots.slot_table import SlotTable
from tierkv.kvcore.block import Location, Tier
from tierkv.kvcore.block_event import BlockEvent, BlockRemoved, BlockReporter, BlockStored
from tierkv.kvcore.clock import Clock
from tierkv.kvcore.errors import (
    BlockNotFoundError,
    CacheError,
    LeaseExpiredError,
    StaleEpochError,
    TransportError,
)
from tierkv.kvcore.ids import Incarnation
from tierkv.policies.eviction import EvictionPolicy

_WINDOW_S: Final = 3600.0


class DamageLog:
    """Counts bad slots.

    Attributes:
        count: number of bad slots since the process began.
    """

    def __init__(self, alert_per_hour: int) -> None:
        self.count = 0
        self._alert_per_hour = alert_per_hour
        self._recent: deque[float] = deque()
        self._quiet_until = float("-inf")

    def note(self, now: float) -> bool:
        """Count a bad slot; True when an alert is due, which happens at most once an hour."""
        self.count += 1
        self._recent.append(now)
        while self._recent[0] <= now - _WINDOW_S:
            self._recent.popleft()
        if len(self._recent) < self._alert_per_hour or now < self._quiet_until:
            return False
        self._quiet_until = now + _WINDOW_S
        return True


log = logging.getLogger(__name__)


class NodeState:
    """The state that the parts of a node share. Methods marked "Lock held" require the lock.

    Attributes:
        config: the node's settings.
        clock: the node's clock.
        lock: guards all other state.
        incarnation: grows with each start; 0 before the first.
        draining: True when new reservations are refused.
        sealed_order: number of the last sealing; keeps the age of blocks over a restart.
        stored_tokens: tokens sealed in this life.
        read_bytes: payload bytes read by clients.
        write_bytes: payload bytes sealed.
        damage: slots found bad in this life.
        quotas: what namespaces may keep.
        turns: the order of transfers; has its own lock, taken after ``lock``.
        erasing: erased slots that transfers still touch, by number and generation.
        erased: notified when a slot leaves ``erasing``.
    """

    def __init__(self, config: DmpConfig, reporter: BlockReporter, clock: Clock) -> None:
        self.config = config
        self.clock = clock
        self.lock = threading.Lock()
        self.erasing: set[tuple[int, int]] = set()
        self.erased = threading.Condition(self.lock)
        self.incarnation = Incarnation(0)
        self.draining = False
        self.sealed_order = 0
        self.stored_tokens = 0
        self.read_bytes = 0
        self.write_bytes = 0
        self.damage = DamageLog(config.damage_alert_per_hour)
        self._reporter = reporter
        self._table: SlotTable | None = None
        self._segment: Segment | None = None
        self.quotas: tuple[Quota, ...] = ()
        self.turns = Turns(clock, pinned_bytes=config.capacity_bytes // 2)

    @property
    def running(self) -> bool:
        """Whether a segment is attached."""
        return self._segment is not None

    @property
    def table(self) -> SlotTable:
        """The slot table; TransportError when the node is not running. Lock held."""
        if self._segment is None or self._table is None:
            raise TransportError(f"DMP node {self.config.node_id} is not running")
        return self._table

    @property
    def segment(self) -> Segment:
        """The segment; TransportError when the node is not running."""
        if self._segment is None:
            raise TransportError(f"DMP node {self.config.node_id} is not running")
        return self._segment

    def attach(self, segment: Segment, *, has_lower_tier: bool) -> int:
        """Keep a segment's sealed blocks, drop the rest, begin a new incarnation.

        Returns:
            Number of blocks kept.
        """
        shape = segment.geometry
        table = SlotTable(
            extent_count=shape.extent_count,
            extent_bytes=shape.extent_bytes,
            slots_per_extent=shape.slots_per_extent,
            has_lower_tier=has_lower_tier,
            make_policy=self._make_policy,
            lease_share=self.config.lease_share,
        )
        scan = scan_segment(segment)
        refused = table.restore(
            scan.extent_sizes, scan.sealed, scan.quarantined, generation=scan.generation
        )
        for index in [*scan.dropped, *refused]:
            segment.headers.set_state(index, SlotState.FREE)
        # Even after the loss of a segment, the incarnation must exceed all that the meta server
        # remembers.
        started_ms = int(self.clock.wall() * 1000)
        with self.lock:
            self.incarnation = Incarnation(max(segment.incarnation + 1, started_ms))
            segment.set_incarnation(self.incarnation)
            segment.set_generation(scan.generation)
            self.sealed_order = scan.last_order
            self.draining = False
            self._table, self._segment = table, segment
            self.erasing.clear()
            self.obey(self.quotas)
        segment.backing.start(owns=True)
        segment.backing.prepare(table.extents.upcoming(self.config.extents_ahead))
        return table.store.counts[SlotState.SEALED]

    def kept(self) -> list[Slot]:
        """Return the slots that the next life may serve; empty when the node is not running."""
        with self.lock:
            return self._table.store.sealed() if self._table is not None else []

    def detach(self) -> Segment | None:
        """Stop serving; return the segment to close."""
        with self.lock:
            segment, self._segment = self._segment, None
            self._table = None
        return segment

    # Under the lock

    def expire(self) -> None:
        """End overdue reservations, holds and leases. Lock held."""
        for slot in self.table.expire(self.clock.now()):
            self.segment.headers.set_state(slot.index, SlotState.FREE)
        self.tell(self.clear_removed())

    def obey(self, quotas: Sequence[Quota]) -> None:
        """Have the table and the transfers keep to quotas. Lock held."""
        self.table.quotas.set(quotas, self.clock.now())
        self.tell(self.clear_removed())
        accounts = self.table.accounts.by_number.items()
        self.turns.set_quotas({number: account.quota for number, account in accounts})

    def clear_removed(self) -> list[BlockEvent]:
        """Clear the headers of blocks that a quota removed; return what to report. Lock held."""
        removed = self.table.quotas.take_removed()
        for slot in removed:
            self.segment.headers.set_state(slot.index, SlotState.FREE)
        return [BlockRemoved(slot.block.key, Tier.L2) for slot in removed]

    def has_memory(self, slot: Slot) -> bool:
        """Allocate memory for a slot's bytes; on failure, end the reservation. Lock held."""
        backing, extent = self.segment.backing, slot.extent.index
        if backing.has(extent):
            return True
        if backing.back(extent):
            ahead = self.table.extents.upcoming(self.config.extents_ahead)
            backing.prepare([extent, *ahead])
            return True
        self.table.abort(slot.index, slot.generation)
        self.table.alloc_failures += 1
        return False

    def unpin(self, slots: Iterable[Slot]) -> None:
        """End transfers, even if the node has stopped, or started again, meanwhile. Lock held."""
        if self._table is not None and self._segment is not None:
            for freed in self._table.unpin(slots):
                self._segment.headers.set_state(freed.index, SlotState.FREE)
                if (freed.index, freed.generation) in self.erasing:
                    self.wipe(freed)
                    self.erasing.remove((freed.index, freed.generation))
                    self.erased.notify_all()

    def erase(self, slot: Slot) -> None:
        """Take a block out and overwrite its bytes, after the last transfer at the latest. Lock
        held."""
        freed = self.table.drop(slot)
        self.segment.headers.set_state(slot.index, SlotState.FREE)
        if freed is None:
            self.erasing.add((slot.index, slot.generation))
        else:
            self.wipe(freed)

    def wipe(self, slot: Slot) -> None:
        """Overwrite the bytes of a freed slot. Lock held."""
        ranges = slot.block.ranges  # The extent of a freed slot may have no slot size any more.
        size = slot_bytes_for(ranges.size_bytes, ranges.count)
        with self.segment.span(slot.offset, 0, size) as view:
            np.frombuffer(view, np.uint8)[:] = 0

    def _make_policy(self, slot_bytes: int, quota: Quota | None) -> EvictionPolicy:
        per_extent = self.config.extent_bytes // slot_bytes * slot_bytes
        return policy_for(
            quota, self.config.eviction_policy, slot_bytes=slot_bytes,
            capacity_bytes=self.config.extent_count * per_extent,
        )  # fmt: skip

    def is_mine(self, location: Location) -> bool:
        """Return True if a reference belongs to this life. Lock held."""
        return location.incarnation == self.incarnation and location.segment == 0

    def resolve(
        self, incarnation: int, segment: int, index: int, generation: int, state: SlotState
    ) -> Slot:
        """Return the slot of a reference if the slot is in the given state. Lock held.

        Raises:
            StaleEpochError, BlockNotFoundError, LeaseExpiredError: the precise reason of the
                failure.
        """
        if incarnation == self.incarnation and segment == 0:
            slot = self.table.get(index, generation)
            if slot is not None and slot.state is state:
                if state is SlotState.WRITING and slot.deadline <= self.clock.now():
                    raise LeaseExpiredError(f"the reservation of slot {index} expired")
                return slot
        raise self._why_not(incarnation, segment, index, generation, state)

    def _why_not(
        self, incarnation: int, segment: int, index: int, generation: int, state: SlotState
    ) -> CacheError:
        node = self.config.node_id
        if incarnation != self.incarnation:
            return StaleEpochError(
                f"{node} is in incarnation {self.incarnation}, not {incarnation}"
            )
        if segment != 0 or not 0 <= index < self.segment.geometry.slot_count:
            return BlockNotFoundError(f"{node} has no slot {index}")
        if self.table.get(index, generation) is None and self.table.store.at(index) is not None:
            return StaleEpochError(f"slot {index} was reused")
        return BlockNotFoundError(f"slot {index} holds no {state.name.lower()} block")

    def location(self, slot: Slot) -> Location:
        """Return the reference to a slot."""
        return Location(
            self.config.node_id, self.incarnation, 0, slot.index, slot.generation, slot.length
        )

    def stored(self, slot: Slot) -> BlockStored:
        """Return the event that a sealed slot is readable."""
        return BlockStored(slot.block, Tier.L2, self.location(slot))

    def tell(self, events: Sequence[BlockEvent]) -> None:
        """Report events, under the lock, so that "stored" and "removed" of a block never swap."""
        if events:
            self._reporter.report(events)

    def quarantine(self, index: int, generation: int) -> bool:
        """Take a slot with bad bytes out of use; False if the slot was gone. Lock held."""
        slot = self.table.quarantine(index, generation)
        if slot is None:
            return False
        self.segment.headers.write(slot)
        self.tell([BlockRemoved(slot.block.key, Tier.L2)])
        log.error("dmp %s: slot %d has bad bytes, quarantined", self.config.node_id, index)
        if self.damage.note(self.clock.now()):
            log.critical(
                "dmp %s: %d slots with bad bytes within an hour; the memory of this machine may be "
                "failing, or a process writes where it should not",
                self.config.node_id,
                self.config.damage_alert_per_hour,
            )
        return True


def shape_of(config: DmpConfig) -> Geometry:
    """Return the geometry that a configuration describes."""
    return Geometry.of(extent_count=config.extent_count, extent_bytes=config.extent_bytes)
