"""A DMP node: memory for blocks, what it tells the meta server, and its life.

Called by the doors (dmp/server/server.py, dmp/transport/inproc.py) from any thread. This file is
the front of its parts: puts, gets, reports, and the threads that scrub, demote and promote.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from tierkv.dmp.config import DmpConfig
from tierkv.dmp.node.demoter import Demoter
from tierkv.dmp.node.gets import Gets, ReadTicket
from tierkv.dmp.node.lower_tier import LowerTier
from tierkv.dmp.node.promoter import Promoter
from tierkv.dmp.node.puts import Puts, PutTicket, WriteTicket
from tierkv.dmp.node.reports import Reports
from tierkv.dmp.node.scrubber import Scrubber
from tierkv.dmp.node.state import NodeState, shape_of
from tierkv.dmp.pool_node import PoolNodeStats, PutRequest
from tierkv.dmp.segment.segment import Segment
from tierkv.dmp.segment.segment_file import open_segment
from tierkv.dmp.segment.slots import SlotState
from tierkv.dmp.wire.messages import RangeRef, Sealing
from tierkv.dmp.wire.range_ref import Ref, as_ref
from tierkv.dmp.wire.stored import StoredBlock
from tierkv.kvcore.block_event import BlockReporter, BlockStored
from tierkv.kvcore.clock import Clock
from tierkv.kvcore.hold import HoldOrder
from tierkv.kvcore.ids import BlockKey, HostId, Incarnation, NodeId
from tierkv.kvcore.location import Location
from tierkv.kvcore.node import NodeInfo, NodeReport

log = logging.getLogger(__name__)
_DRAIN_LOOK_S: Final = 0.01


@dataclass(frozen=True, slots=True)
class OpenRange:
    """A pinned range of a slot: its bytes in the segment and its stored checksum."""

    view: memoryview
    checksum: int


class DmpNode:
    """One node's memory.

    Attributes:
        config: what it was told.
        scrubber: checks blocks in the background.
        demoter: copies blocks down, while started; None without a lower tier.
    """

    def __init__(
        self,
        config: DmpConfig,
        reporter: BlockReporter,
        clock: Clock,
        open_lower: Callable[[], LowerTier] | None = None,
    ) -> None:
        """Prepare a node.

        Args:
            config: what it is told.
            reporter: where block events go.
            clock: its time.
            open_lower: opens where blocks rest below its memory; called at each start, when the
                segment is ours, and closed at the stop. None for a node without such a tier.
        """
        self.config = config
        self._state = NodeState(config, reporter, clock)
        self._puts = Puts(self._state)
        self._gets = Gets(self._state)
        self._reports = Reports(self._state)
        self._open_lower = open_lower
        self._lower: LowerTier | None = None
        self.scrubber = Scrubber(self._state)
        self.demoter: Demoter | None = None
        self._promoter: Promoter | None = None
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
    def incarnation(self) -> Incarnation:
        """Start number: grows with each start; 0 before the first."""
        return self._state.incarnation

    @property
    def segment(self) -> Segment:
        """The open segment, for a door that registers it with a network device."""
        return self._state.segment

    @property
    def running(self) -> bool:
        """Whether it is started and not stopped."""
        return self._state.running

    # Life

    def start(self) -> None:
        """Open the segment, keep its sealed blocks, begin a new incarnation.

        Waits ``attach_wait_s`` for another process to give the segment up.

        Raises:
            ConfigError: the segment can't be used; the message says why and what to do.
        """
        config = self.config
        segment = open_segment(config.segment_file, shape_of(config), wait_s=config.attach_wait_s)
        if config.nameless:
            segment.path.unlink()
        try:
            self._lower = self._open_lower() if self._open_lower is not None else None
        except BaseException:
            segment.close()
            raise
        kept = self._state.attach(segment, has_lower_tier=self._lower is not None)
        segment.set_owner(config.owner_folder)
        self._stopping.clear()
        self._ticker = threading.Thread(target=self._tick_forever, name="dmp-tick", daemon=True)
        self._ticker.start()
        self.scrubber.start()
        if self._lower is not None:
            self._start_lower(self._lower)
        log.info("dmp %s: %s, %d blocks kept", config.node_id, segment.path, kept)

    def _start_lower(self, lower: LowerTier) -> None:
        self._reports.lower = lower
        self._promoter = Promoter(self._state, self._puts, self._gets, lower, self._reports)
        self.demoter = Demoter(self._state, lower, self._reports)
        self._puts.sealed = self.demoter.wake
        self._promoter.start()
        self.demoter.start()

    def _stop_lower(self) -> None:
        if self._promoter is not None and self.demoter is not None:
            self._promoter.stop()
            self.demoter.stop()
        lower, self._lower, self._reports.lower = self._lower, None, None
        if lower is not None:
            lower.close()

    def drain(self, timeout_s: float | None = None) -> bool:
        """Give no more reservations, and let the open ones and running transfers end.

        Args:
            timeout_s: how long to wait; None means ``drain_s``.

        Returns:
            Whether they all ended.
        """
        self._state.draining = True
        looks = int((self.config.drain_s if timeout_s is None else timeout_s) / _DRAIN_LOOK_S)
        for _ in range(looks):
            if not self._busy():
                return True
            self._stopping.wait(_DRAIN_LOOK_S)
        return not self._busy()

    def _busy(self) -> bool:
        with self._state.lock:
            if not self._state.running:
                return False
            table = self._state.table
            return table.count(SlotState.WRITING) > 0 or table.pinned > 0

    def stop(self) -> None:
        """Close the segment; its sealed blocks stay in memory, which is all that it keeps."""
        self._stopping.set()
        self.scrubber.stop()
        self._stop_lower()
        if self._ticker is not None:
            self._ticker.join()
            self._ticker = None
        kept = self._state.kept()
        segment = self._state.detach()
        if segment is not None:
            if self.config.remove_on_stop:
                segment.path.unlink(missing_ok=True)  # Before the lock goes: it may be wanted.
            else:
                segment.keep_only(kept)
            segment.close()

    def tick(self) -> None:
        """End expired reservations and holds; called by its own thread and by tests."""
        with self._state.lock:
            if self._state.running:
                self._state.expire()

    def _tick_forever(self) -> None:
        while not self._stopping.wait(self.config.tick_interval_s):
            self.tick()

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
        return self._puts.reserve(puts, deadline_s=deadline_s, owner=owner)

    def begin_write(self, refs: Sequence[Ref]) -> WriteTicket:
        """Pin ranges of reserved slots to fill their ``views``; ``end_write`` must follow.

        The index ``WHOLE`` (dmp/wire/range_ref.py) is the whole payload.

        Raises:
            StaleEpochError, LeaseExpiredError: a reservation is gone; nothing is pinned.
            BlockNotFoundError: no such range, or it is not as long as the caller thinks.
        """
        return self._puts.begin_write(refs)

    def end_write(self, ticket: WriteTicket) -> None:
        """Release the views and unpin the slots."""
        self._puts.end_write(ticket)

    @contextlib.contextmanager
    def open_write(self, location: Location, index: int) -> Iterator[memoryview]:
        """Give the bytes of one range of a reserved slot, pinned while they are filled.

        Raises:
            StaleEpochError, LeaseExpiredError: the reservation is gone.
            BlockNotFoundError: no such range.
        """
        ticket = self._puts.begin_write([as_ref(RangeRef(location, index))])
        try:
            yield ticket.views[0]
        finally:
            self._puts.end_write(ticket)

    def seal(self, items: Sequence[Sealing]) -> list[Location | None]:
        """Make written slots readable, checksums first and state last; None where too late."""
        return self._puts.seal(items)

    def abort(self, locations: Sequence[Location]) -> None:
        """Give reservations up; unknown ones are ignored."""
        self._puts.abort(locations)

    def begin_put(
        self, puts: Sequence[PutRequest], *, deadline_s: float = 30.0, owner: str = ""
    ) -> PutTicket:
        """Reserve whole blocks to fill their ``views``; ``end_put`` or ``abort_put`` must follow.

        The caller has checked the requests. A view is None where the block is here already or
        there is no room.
        """
        return self._puts.begin_put(puts, deadline_s=deadline_s, owner=owner)

    def end_put(
        self, ticket: PutTicket, checksums: Sequence[tuple[int, ...]]
    ) -> list[Location | None]:
        """Make the filled blocks readable; None where there was no slot, or too late.

        Args:
            ticket: from ``begin_put``; its views are released.
            checksums: per block, the xxh3_64 of each range.
        """
        return self._puts.end_put(ticket, checksums)

    def abort_put(self, ticket: PutTicket) -> None:
        """Give the slots of a put up; its views are released."""
        self._puts.abort_put(ticket)

    def release_owner(self, owner: str) -> None:
        """Abort the unsealed reservations of a client that is gone, and end its holds.

        O(its reservations and holds); an unknown or empty owner is ignored.
        """
        self._puts.release_owner(owner)

    # Gets

    def lookup(self, keys: Sequence[BlockKey]) -> list[Location | None]:
        """Return where each block is sealed, or None."""
        return self._gets.lookup(keys)

    def promote(self, keys: Sequence[BlockKey]) -> list[Location | None]:
        """Return where each block is sealed, bringing those that rest in the lower tier up.

        May take as long as ``promote_timeout_s``; what does not come by then is None.
        """
        return self._promoter.promote(keys) if self._promoter else self._gets.lookup(keys)

    def describe(self, keys: Sequence[BlockKey]) -> list[StoredBlock | None]:
        """Return where each block is sealed and how it is cut into ranges, or None."""
        return self._gets.describe(keys)

    def begin_read(self, refs: Sequence[Ref]) -> ReadTicket:
        """Pin ranges of sealed slots to read their ``views``; ``end_read`` must follow.

        Raises:
            StaleEpochError, BlockNotFoundError: one of them is gone; nothing is pinned.
        """
        return self._gets.begin_read(refs)

    def end_read(self, ticket: ReadTicket) -> None:
        """Release the views and unpin the slots."""
        self._gets.end_read(ticket)

    @contextlib.contextmanager
    def open_read(self, refs: Sequence[RangeRef]) -> Iterator[list[OpenRange]]:
        """Give the bytes of ranges of sealed slots, pinned while they are read.

        Raises:
            StaleEpochError, BlockNotFoundError: one of them is gone; nothing is pinned.
        """
        ticket = self._gets.begin_read([as_ref(ref) for ref in refs])
        try:
            yield [OpenRange(*pair) for pair in zip(ticket.views, ticket.checksums, strict=True)]
        finally:
            self._gets.end_read(ticket)

    def hold(self, locations: Sequence[Location], *, ttl_s: float, owner: str = "") -> list[bool]:
        """Keep blocks from eviction; answers which are still there."""
        return self._gets.hold(locations, ttl_s=ttl_s, owner=owner)

    def release(self, locations: Sequence[Location], *, owner: str = "") -> None:
        """Undo one hold of that owner on each."""
        self._gets.release(locations, owner=owner)

    def lease(self, order: HoldOrder) -> None:
        """Keep blocks from eviction for a lease of the meta server, or let go of them.

        At most ``lease_share`` of the memory is kept; a node that is not running keeps nothing.
        """
        self._gets.lease(order)

    def touch(self, locations: Sequence[Location], *, read_bytes: int) -> None:
        """Count reads that a process of this host made without asking."""
        self._gets.touch(locations, read_bytes=read_bytes)

    def suspect(self, refs: Sequence[RangeRef]) -> list[bool]:
        """Check ranges a reader found bad; a slot that really is bad is never used again.

        The reader's word is not enough: its network or memory may be at fault.
        """
        return self._gets.suspect(refs)

    # Reports

    def inventory(self) -> list[BlockStored]:
        """Return every readable block, for a meta server that lost track."""
        return self._reports.inventory()

    def stats(self) -> PoolNodeStats:
        """Return the counters."""
        return self._reports.stats()

    def info(self, *, data_address: str = "") -> NodeInfo:
        """Return the registration for the meta server."""
        return self._reports.info(data_address=data_address)

    def report(self) -> NodeReport:
        """Return what goes into a heartbeat."""
        return self._reports.report()

    def check_invariants(self) -> None:
        """Assert that table and segment agree; O(slots)."""
        with self._state.lock:
            self._state.table.check_invariants()
            for slot in self._state.table.sealed():
                self._state.segment.check_header(slot)
