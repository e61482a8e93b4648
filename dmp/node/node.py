"""The DMP node: one process's share of the memory pool, with start and stop.

The servers (dmp/server/server.py, dmp/transport/inproc.py) and the composition root call the node
from any thread. Methods for reading, writing and reporting are in the parts of the node (``gets``,
``puts``, ``reports``).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Final

from tierkv.dmp.config import DmpConfig
from tierkv.dmp.node.gets import Gets
from tierkv.dmp.node.lower_tier import LowerTier
from tierkv.dmp.node.puts import Puts
from tierkv.dmp.node.reports import Reports
from tierkv.dmp.node.scrubber import Scrubber
from tierkv.dmp.node.state import NodeState, shape_of
from tierkv.dmp.node.tiering import Demoter, Eraser, Promoter
from tierkv.dmp.node.turns import Turns
from tierkv.dmp.segment.segment import Segment
from tierkv.dmp.segment.segment_file import open_segment
from tierkv.dmp.segment.slots import SlotState
from tierkv.dmp.slots.accounts import Quota
from tierkv.kvcore.block import Erased, Location
from tierkv.kvcore.block_event import BlockReporter
from tierkv.kvcore.clock import Clock
from tierkv.kvcore.ids import BlockKey, HostId, Incarnation, NodeId

log = logging.getLogger(__name__)
_OTHERS_TURN_S: Final = 0.002
"""Pause between two steps of removing blocks: requests that wait for the lock get it."""
_DRAIN_LOOK_S: Final = 0.01


class DmpNode:
    """A node's memory and its background threads.

    Attributes:
        config: the node's settings.
        puts: the writing side: reserve, write, seal, abort.
        gets: the reading side: look up, read, hold, touch.
        reports: inventory, counters, registration, heartbeat.
        scrubber: checks blocks in the background.
        demoter: copies blocks to the lower tier, while started; None without a lower tier.
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
            config: the node's settings.
            reporter: receiver of block events.
            clock: the node's clock.
            open_lower: opens the tier below the node's memory. Called at each start, after the node
                has locked the segment; the tier is closed at the stop. None for a node without a
                lower tier.
        """
        self.config = config
        self._state = NodeState(config, reporter, clock)
        self.puts = Puts(self._state)
        self.gets = Gets(self._state)
        self.reports = Reports(self._state)
        self._open_lower = open_lower
        self._lower: LowerTier | None = None
        self.scrubber = Scrubber(self._state)
        self.demoter: Demoter | None = None
        self._promoter: Promoter | None = None
        self._stopping = threading.Event()
        self._ticker: threading.Thread | None = None

    @property
    def node_id(self) -> NodeId:
        """Name of the node."""
        return self.config.node_id

    @property
    def host(self) -> HostId:
        """Name of the machine."""
        return self.config.host

    @property
    def incarnation(self) -> Incarnation:
        """Start number: grows with each start; 0 before the first."""
        return self._state.incarnation

    @property
    def segment(self) -> Segment:
        """The open segment, for an RDMA server that registers the segment with a network device."""
        return self._state.segment

    @property
    def turns(self) -> Turns:
        """The order of the node's transfers, for the server."""
        return self._state.turns

    @property
    def running(self) -> bool:
        """Whether the node is started and not stopped."""
        return self._state.running

    # Life

    def start(self) -> None:
        """Open the segment, keep its sealed blocks, begin a new incarnation.

        Waits ``attach_wait_s`` for another process to release the segment.

        Raises:
            ConfigError: the segment can't be used; the message gives the reason and a remedy.
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
        self.reports.lower = lower
        self._promoter = Promoter(self._state, self.puts, self.gets, lower, self.reports)
        self.demoter = Demoter(self._state, lower, self.reports)
        self.puts.sealed = self.demoter.wake
        self._promoter.start()
        self.demoter.start()

    def _stop_lower(self) -> None:
        if self._promoter is not None and self.demoter is not None:
            self._promoter.stop()
            self.demoter.stop()
        lower, self._lower, self.reports.lower = self._lower, None, None
        if lower is not None:
            lower.close()

    def drain(self, timeout_s: float | None = None) -> bool:
        """Refuse new reservations, and wait for open reservations and running transfers.

        Args:
            timeout_s: maximum wait; None means ``drain_s``.

        Returns:
            True if all reservations and transfers ended.
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
            return table.store.counts[SlotState.WRITING] > 0 or table.pinned > 0

    def stop(self) -> None:
        """Close the segment; only the memory of its sealed blocks is kept."""
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
                segment.path.unlink(missing_ok=True)  # Before unlocking: another process may wait.
            else:
                segment.keep_only(kept)
            segment.close()

    def set_quotas(self, quotas: Sequence[Quota]) -> None:
        """Have namespaces keep to quotas from now on, also after the next start."""
        state = self._state
        with state.lock:
            state.quotas = tuple(quotas)
            if state.running:
                state.obey(quotas)
        if self.demoter is not None:
            self.demoter.set_quotas(quotas)

    def tick(self) -> None:
        """End expired reservations and holds; called by a thread of the node and by tests."""
        with self._state.lock:
            if not self._state.running:
                return
            self._state.expire()
            some_due = self._state.table.quotas.some_due_below
        if some_due and self.demoter is not None:
            self.demoter.wake()

    def _remove_outdated(self) -> bool:
        """Remove some blocks of older versions of namespaces; return whether any went."""
        state = self._state
        with state.lock:
            if not (state.running and state.table.quotas.remove_outdated()):
                return False
            state.tell(state.clear_removed())
        return True

    def _tick_forever(self) -> None:
        while not self._stopping.wait(self.config.tick_interval_s):
            self.tick()
            while self._remove_outdated() and not self._stopping.wait(_OTHERS_TURN_S):
                """Requests use the table between two steps."""

    def promote(self, keys: Sequence[BlockKey]) -> list[Location | None]:
        """Return the location of each sealed block, after loading blocks from the lower tier.

        A call may take as long as ``promote_timeout_s``; a block that arrives later counts as None.
        """
        return self._promoter.promote(keys) if self._promoter else self.gets.lookup(keys)

    def erase(self, keys: Sequence[BlockKey]) -> Erased:
        """Remove blocks from memory, disk and archive, and overwrite their bytes; see PoolNode."""
        gone_below = self.demoter.gone_below if self.demoter else lambda keys: None
        return Eraser(self._state, self._lower, gone_below).erase(keys)

    def check_invariants(self) -> None:
        """Assert that table and segment agree; O(slots)."""
        with self._state.lock:
            self._state.table.check_invariants()
            for slot in self._state.table.store.sealed():
                self._state.segment.headers.check(slot)
