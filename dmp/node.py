"""A DMP node: the slot table, its segment file, and what it tells the meta server.

Called by dmp/server.py and dmp/transport/inproc.py from any thread. One lock guards decisions and
headers (microseconds); payload bytes move outside it, in slots pinned meanwhile.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import xxhash

from dmp.config import MAX_HOLD_S, MAX_RESERVE_S, DmpConfig
from dmp.geometry import Geometry
from dmp.messages import RangeRef, Sealing, check_put
from dmp.pool_node import PoolNodeStats, PutRequest
from dmp.segment import Segment, open_segment
from dmp.slots import Slot, SlotState, SlotTable
from dmp.stored import StoredBlock
from kvcore.block_event import BlockEvent, BlockRemoved, BlockReporter, BlockStored
from kvcore.clock import Clock
from kvcore.errors import (
    BlockNotFoundError,
    CacheError,
    LeaseExpiredError,
    StaleEpochError,
    TransportError,
)
from kvcore.ids import BlockKey, HostId, Incarnation, NodeId
from kvcore.location import Location, Tier
from kvcore.node import NodeInfo, NodeLoad, NodeReport, NodeRole, TierStats

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OpenRange:
    """A pinned range of a slot: its bytes in the segment and its stored checksum."""

    view: memoryview
    checksum: int


class DmpNode:
    """One node's memory.

    Attributes:
        config: what it was told.
        incarnation: grows with each start; 0 before ``start``.
    """

    def __init__(self, config: DmpConfig, reporter: BlockReporter, clock: Clock) -> None:
        self.config = config
        self.incarnation = Incarnation(0)
        self._reporter = reporter
        self._clock = clock
        self._lock = threading.Lock()
        self._segment: Segment | None = None
        self._table: SlotTable | None = None
        self._sealed_count = 0
        self._quarantined = 0
        self._stored_tokens = 0
        self._read_bytes = 0
        self._write_bytes = 0
        self._stopping = threading.Event()
        self._ticker: threading.Thread | None = None

    @property
    def node_id(self) -> NodeId:
        """Its name."""
        return self.config.node_id

    @property
    def host(self) -> HostId:
        """Its machine."""
        return self.config.host

    @property
    def segment(self) -> Segment:
        """The open segment, for a door that registers it with a network device."""
        return self._parts()[1]

    # Life

    def start(self) -> None:
        """Open the segment, keep its sealed blocks, begin a new incarnation.

        Raises:
            ConfigError: the segment can't be used; the message says why and what to do.
        """
        config = self.config
        shape = Geometry.of(extent_count=config.extent_count, extent_bytes=config.extent_bytes)
        segment = open_segment(config.segment_file, shape)
        if config.nameless:
            segment.path.unlink()
        self._table = SlotTable(
            extent_count=shape.extent_count,
            extent_bytes=shape.extent_bytes,
            slots_per_extent=shape.slots_per_extent,
        )
        kept = self._attach(segment, self._table)
        # A lost segment must not make the node younger than the meta server remembers it.
        started_ms = int(self._clock.wall() * 1000)
        self.incarnation = Incarnation(max(segment.incarnation + 1, started_ms))
        segment.set_incarnation(self.incarnation)
        segment.populate()
        self._segment = segment
        self._stopping.clear()
        self._ticker = threading.Thread(target=self._tick_forever, name="dmp-tick", daemon=True)
        self._ticker.start()
        log.info("dmp %s: %s, %d blocks kept", config.node_id, segment.path, kept)

    def stop(self) -> None:
        """Close the segment; its sealed blocks are there at the next start."""
        self._stopping.set()
        if self._ticker is not None:
            self._ticker.join()
            self._ticker = None
        with self._lock:
            segment, self._segment = self._segment, None
        if segment is not None:
            segment.close()
            if self.config.remove_on_stop:
                segment.path.unlink(missing_ok=True)

    def tick(self) -> None:
        """End expired reservations and holds; called by its own thread and by tests."""
        with self._lock:
            if self._segment is not None:
                self._expire()

    def _tick_forever(self) -> None:
        while not self._stopping.wait(self.config.tick_interval_s):
            self.tick()

    def _attach(self, segment: Segment, table: SlotTable) -> int:
        scan = segment.scan()
        refused = table.restore(scan.generations, scan.extent_sizes, scan.slots)
        for index in [*scan.dropped, *(slot.index for slot in refused)]:
            segment.set_state(index, SlotState.FREE)
        self._sealed_count = scan.last_order
        return table.count(SlotState.SEALED)

    # Puts

    def reserve(
        self, puts: Sequence[PutRequest], *, deadline_s: float = 30.0, owner: str = ""
    ) -> list[Location | None]:
        """Take a slot per block, in order; None where it is here already or there is no room.

        Args:
            puts: the blocks.
            deadline_s: when the reservations expire.
            owner: client whose death ends them early (``release_owner``); empty for none.
        """
        for put in puts:
            check_put(put)
        removed: list[BlockEvent] = []
        with self._lock:
            self._expire()
            deadline = self._clock.now() + min(deadline_s, MAX_RESERVE_S)
            answer = [self._reserve_one(put, deadline, removed, owner) for put in puts]
            self._report(removed)
        return answer

    def _reserve_one(
        self, put: PutRequest, deadline: float, removed: list[BlockEvent], owner: str
    ) -> Location | None:
        table, segment = self._parts()
        decision = table.reserve(put, deadline=deadline, owner=owner)
        if decision is None:
            return None
        for victim in decision.victims:
            segment.set_state(victim.index, SlotState.FREE)
            removed.append(BlockRemoved(victim.put.key, Tier.L2))
        segment.set_extent_size(decision.extent, decision.slot_bytes)
        segment.write_header(decision.slot)
        return self._location(decision.slot)

    @contextlib.contextmanager
    def open_write(self, location: Location, index: int) -> Iterator[memoryview]:
        """Give the bytes of one range of a reserved slot, pinned while they are filled.

        Raises:
            StaleEpochError, LeaseExpiredError: the reservation is gone.
            BlockNotFoundError: no such range.
        """
        with self._lock:
            table, segment = self._parts()
            slot = self._resolve(location, SlotState.WRITING)
            start, stop = _range_of(slot.put, index)
            table.pin(slot)
            size = table.extents.of(slot.index).slot_bytes
            view = segment.payload(slot.index, size, start, stop)
        try:
            yield view
        finally:
            view.release()
            with self._lock:
                self._unpin(slot)

    def seal(self, items: Sequence[Sealing]) -> list[Location | None]:
        """Make written slots readable, checksums first and state last; None where too late."""
        events: list[BlockEvent] = []
        with self._lock:
            table, segment = self._parts()
            now = self._clock.now()
            answer: list[Location | None] = []
            for item in items:
                slot = self._seal_one(item, table, segment, now)
                answer.append(self._location(slot) if slot else None)
                events.extend([self._stored(slot)] if slot else [])
            self._report(events)
        return answer

    def _seal_one(
        self, item: Sealing, table: SlotTable, segment: Segment, now: float
    ) -> Slot | None:
        location = item.location
        if location.incarnation != self.incarnation or location.segment != 0:
            return None
        slot = table.get(location.slot, location.generation)
        if slot is None or len(item.checksums) != slot.put.range_count:
            return None
        slot = table.seal(location.slot, location.generation, now=now)
        if slot is None:
            return None
        size = table.extents.of(slot.index).slot_bytes
        segment.write_checksums(slot.index, size, item.checksums)
        self._sealed_count += 1
        self._stored_tokens += slot.put.tokens
        self._write_bytes += slot.put.range_bytes * slot.put.range_count
        segment.write_header(slot, order=self._sealed_count)
        return slot

    def abort(self, locations: Sequence[Location]) -> None:
        """Give reservations up; unknown ones are ignored."""
        with self._lock:
            table, segment = self._parts()
            for location in locations:
                if location.incarnation == self.incarnation and location.segment == 0:
                    slot = table.abort(location.slot, location.generation)
                    if slot is not None:
                        segment.set_state(slot.index, SlotState.FREE)

    def release_owner(self, owner: str) -> None:
        """Abort the unsealed reservations of a client that is gone, and end its holds.

        O(its reservations and holds); an unknown or empty owner is ignored.
        """
        if not owner:
            return
        with self._lock:
            if self._table is not None and self._segment is not None:
                for slot in self._table.release_owner(owner):
                    self._segment.set_state(slot.index, SlotState.FREE)

    # Gets

    def lookup(self, keys: Sequence[BlockKey]) -> list[Location | None]:
        """Return where each block is sealed, or None."""
        with self._lock:
            table, _ = self._parts()
            slots = [table.find(key) for key in keys]
            return [self._location(slot) if slot else None for slot in slots]

    def describe(self, keys: Sequence[BlockKey]) -> list[StoredBlock | None]:
        """Return where each block is sealed and how it is cut into ranges, or None."""
        with self._lock:
            table, _ = self._parts()
            slots = [table.find(key) for key in keys]
            return [
                StoredBlock(self._location(slot), slot.put.range_bytes, slot.put.range_count)
                if slot
                else None
                for slot in slots
            ]

    def promote(self, keys: Sequence[BlockKey]) -> list[Location | None]:
        """Return where each block is sealed, bringing those that rest in the lower tier up."""
        return self.lookup(keys)

    @contextlib.contextmanager
    def open_read(self, refs: Sequence[RangeRef]) -> Iterator[list[OpenRange]]:
        """Give the bytes of ranges of sealed slots, pinned while they are read.

        Raises:
            StaleEpochError, BlockNotFoundError: one of them is gone; nothing is pinned.
        """
        with self._lock:
            table, segment = self._parts()
            slots = [self._resolve(ref.location, SlotState.SEALED) for ref in refs]
            spans = [_range_of(s.put, r.index) for s, r in zip(slots, refs, strict=True)]
            opened = []
            for slot, ref, (start, stop) in zip(slots, refs, spans, strict=True):
                size = table.extents.of(slot.index).slot_bytes
                table.pin(slot)
                table.touch(slot.index, slot.generation)
                checksum = segment.checksum(slot.index, size, ref.index, slot.put.range_count)
                opened.append(OpenRange(segment.payload(slot.index, size, start, stop), checksum))
        try:
            yield opened
        finally:
            for item in opened:
                item.view.release()
            with self._lock:
                self._read_bytes += sum(stop - start for start, stop in spans)
                for slot in slots:
                    self._unpin(slot)

    def hold(self, locations: Sequence[Location], *, ttl_s: float, owner: str = "") -> list[bool]:
        """Keep blocks from eviction; answers which are still there."""
        with self._lock:
            table, _ = self._parts()
            until = self._clock.now() + min(ttl_s, MAX_HOLD_S)
            return [
                self._is_mine(place)
                and table.hold(place.slot, place.generation, until=until, owner=owner)
                for place in locations
            ]

    def release(self, locations: Sequence[Location], *, owner: str = "") -> None:
        """Undo one hold of that owner on each."""
        with self._lock:
            table, _ = self._parts()
            for place in locations:
                if self._is_mine(place):
                    table.release(place.slot, place.generation, owner=owner)

    def touch(self, locations: Sequence[Location], *, read_bytes: int) -> None:
        """Count reads that a process of this host made without asking."""
        with self._lock:
            table, _ = self._parts()
            self._read_bytes += read_bytes
            for place in locations:
                if self._is_mine(place):
                    table.touch(place.slot, place.generation)

    def suspect(self, refs: Sequence[RangeRef]) -> list[bool]:
        """Check ranges a reader found bad; a slot that really is bad is never used again.

        The reader's word is not enough: its network or memory may be at fault.
        """
        return [self._suspect_one(ref) for ref in refs]

    def _suspect_one(self, ref: RangeRef) -> bool:
        try:
            with self.open_read([ref]) as (item,):
                if xxhash.xxh3_64_intdigest(item.view) == item.checksum:
                    return False
        except CacheError:
            return False
        with self._lock:
            table, segment = self._parts()
            slot = table.quarantine(ref.location.slot, ref.location.generation)
            if slot is None:
                return False
            self._quarantined += 1
            segment.write_header(slot)
            self._report([BlockRemoved(slot.put.key, Tier.L2)])
        log.error("dmp %s: slot %d has bad bytes, quarantined", self.node_id, slot.index)
        return True

    # Reports

    def inventory(self) -> list[BlockStored]:
        """Return every readable block, for a meta server that lost track."""
        with self._lock:
            table, _ = self._parts()
            return [self._stored(slot) for slot in table.sealed()]

    def stats(self) -> PoolNodeStats:
        """Return the counters."""
        with self._lock:
            table, segment = self._parts()
            shape = segment.geometry
            return PoolNodeStats(
                capacity_bytes=shape.extent_count * shape.extent_bytes,
                used_bytes=table.extents.used_bytes,
                slots_total=table.extents.slots_total,
                slots_sealed=table.count(SlotState.SEALED),
                slots_writing=table.count(SlotState.WRITING),
                evicted_blocks=table.evicted_blocks,
                quarantined_slots=table.count(SlotState.QUARANTINED),
                alloc_failures=table.alloc_failures,
                read_bytes=self._read_bytes,
                write_bytes=self._write_bytes,
            )

    def info(self, *, data_address: str = "") -> NodeInfo:
        """Return the registration for the meta server."""
        return NodeInfo(
            node_id=self.node_id,
            incarnation=self.incarnation,
            role=NodeRole.DMP,
            host=self.host,
            data_address=data_address,
            segment_path="" if self.config.nameless else str(self.config.segment_file),
            capacity_bytes=self.config.extent_count * self.config.extent_bytes,
        )

    def report(self) -> NodeReport:
        """Return what goes into a heartbeat."""
        stats = self.stats()
        tier = TierStats(
            tier=Tier.L2,
            medium="shm",
            capacity_bytes=stats.capacity_bytes,
            used_bytes=stats.used_bytes,
            blocks_total=stats.slots_total,
            blocks_used=stats.slots_sealed,
            stored_tokens=self._stored_tokens,
            evicted_blocks=stats.evicted_blocks,
            read_bytes=stats.read_bytes,
            write_bytes=stats.write_bytes,
            alloc_failures=stats.alloc_failures,
        )
        errors = (("checksum_mismatch", self._quarantined),) if self._quarantined else ()
        return NodeReport(
            load=NodeLoad(kv_usage=stats.used_bytes / stats.capacity_bytes),
            tiers=(tier,),
            cache_errors=errors,
            transfer_bytes_in=stats.write_bytes,
            transfer_bytes_out=stats.read_bytes,
        )

    def check_invariants(self) -> None:
        """Assert that table and segment agree; O(slots)."""
        with self._lock:
            table, segment = self._parts()
            table.check_invariants()
            for slot in table.sealed():
                header = segment.read_header(slot.index)
                assert header.intact and header.put == slot.put, slot
                assert header.state == slot.state and header.generation == slot.generation, slot

    # Under the lock

    def _parts(self) -> tuple[SlotTable, Segment]:
        if self._table is None or self._segment is None:
            raise TransportError(f"DMP node {self.node_id} is not running")
        return self._table, self._segment

    def _expire(self) -> None:
        table, segment = self._parts()
        for slot in table.expire(self._clock.now()):
            segment.set_state(slot.index, SlotState.FREE)

    def _unpin(self, slot: Slot) -> None:
        if self._table is not None and self._segment is not None:
            freed = self._table.unpin(slot)
            if freed is not None:
                self._segment.set_state(freed.index, SlotState.FREE)

    def _is_mine(self, location: Location) -> bool:
        return location.incarnation == self.incarnation and location.segment == 0

    def _resolve(self, location: Location, state: SlotState) -> Slot:
        """Turn a reference into a slot, or say precisely why it can't be."""
        table, _ = self._parts()
        if location.incarnation != self.incarnation:
            raise StaleEpochError(
                f"{self.node_id} is in incarnation {self.incarnation}, not {location.incarnation}"
            )
        if location.segment != 0 or location.slot >= len(table.generations):
            raise BlockNotFoundError(f"{self.node_id} has no slot {location.slot}")
        slot = table.get(location.slot, location.generation)
        if slot is None and table.generations[location.slot] != location.generation:
            raise StaleEpochError(f"slot {location.slot} was reused")
        if slot is None or slot.state is not state:
            raise BlockNotFoundError(f"slot {location.slot} holds no {state.name.lower()} block")
        if state is SlotState.WRITING and slot.deadline <= self._clock.now():
            raise LeaseExpiredError(f"the reservation of slot {location.slot} expired")
        return slot

    def _location(self, slot: Slot) -> Location:
        length = slot.put.range_bytes * slot.put.range_count
        return Location(self.node_id, self.incarnation, 0, slot.index, slot.generation, length)

    def _stored(self, slot: Slot) -> BlockStored:
        put = slot.put
        place = self._location(slot)
        return BlockStored(put.key, put.parent, Tier.L2, put.tokens, place, put.model, put.tenant)

    def _report(self, events: Sequence[BlockEvent]) -> None:
        # Under the lock, so that "stored" and "removed" of a block never swap; it never blocks.
        if events:
            self._reporter.report(events)


def _range_of(put: PutRequest, index: int) -> tuple[int, int]:
    if not 0 <= index < put.range_count:
        raise BlockNotFoundError(f"range {index} is outside [0, {put.range_count})")
    return index * put.range_bytes, (index + 1) * put.range_bytes
