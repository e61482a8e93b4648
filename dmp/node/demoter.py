"""Copies blocks to the lower tier before eviction, so eviction loses nothing.

A thread in the node's life, active while the exposed bytes (dmp/slots/slot_table.py) exceed the
share ``demote_above`` of the memory. The thread copies blocks in the order of eviction and never
delays a reservation: a slot is pinned only during the copy, and a block evicted before the copy is
simply lost.
"""

from __future__ import annotations

import logging
import struct
import threading
from collections.abc import Sequence
from typing import Final

from tierkv.dmp.node.lower_tier import LowerTier, resting
from tierkv.dmp.node.reports import Reports
from tierkv.dmp.node.scrubber import is_sound
from tierkv.dmp.node.state import NodeState
from tierkv.dmp.segment.slots import Slot
from tierkv.kvcore.block_event import BlockRemoved
from tierkv.kvcore.errors import CacheError
from tierkv.kvcore.ids import BlockKey
from tierkv.kvcore.location import Tier

log = logging.getLogger(__name__)
_RETRY_S: Final = 5.0
"""Pause after the lower tier refused a block: the tier is full or broken, and its stats say so."""


class Demoter:
    """The demotion thread."""

    def __init__(self, state: NodeState, lower: LowerTier, reports: Reports) -> None:
        self._state = state
        self._lower = lower
        self._reports = reports
        self._limit_bytes = 0
        self._awake = threading.Event()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        lower.set_listener(self.gone_below)

    def start(self) -> None:
        """Start the thread."""
        config = self._state.config
        capacity = config.extent_count * config.extent_bytes
        self._limit_bytes = int(capacity * config.demote_above)
        self._stopping.clear()
        self._awake.set()
        self._thread = threading.Thread(target=self._run, name="dmp-demote", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread; a running copy is finished first."""
        self._stopping.set()
        self._awake.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def wake(self) -> None:
        """Look for due blocks again; called after blocks were sealed."""
        if not self._awake.is_set():
            self._awake.set()

    def demote_one(self, *, limit_bytes: int) -> bool:
        """Copy the next block if more than ``limit_bytes`` are exposed; False if no block is due.

        Raises:
            CacheError: the lower tier did not store the block.
        """
        state = self._state
        with state.lock:
            table = state.table
            slot = table.next_dirty() if table.exposed_bytes > limit_bytes else None
            if slot is None:
                return False
            table.pin(slot)
            view = state.segment.span(slot.offset, 0, slot.length)
            sums = [state.segment.stored_checksum(slot, i) for i in range(slot.block.ranges.count)]
        try:
            is_new = self._copy(slot, view, sums)
        finally:
            view.release()
            with state.lock:
                state.unpin(slot)
        self._reports.demoted_blocks += is_new
        return True

    def _copy(self, slot: Slot, view: memoryview, sums: Sequence[int]) -> bool:
        """Copy a pinned slot to the lower tier; False if no new copy was made.

        No copy is made if a copy exists (after a restart) or if bytes are bad. A slot with bad
        bytes is quarantined. The copy has the checksums of the block's writer.
        """
        block = slot.block.at_rest()
        key = block.key
        is_new = self._lower.find(key) is None
        if is_new and not is_sound(slot, view, sums):
            with self._state.lock:
                self._state.quarantine(slot.index, slot.generation)
            return False
        if is_new:
            self._lower.put(block, view, checksums=struct.pack(f"<{len(sums)}Q", *sums))
        with self._state.lock:
            if self._state.running:
                self._state.table.clean.mark(slot)
            if is_new:
                self._state.tell([resting(block)])
        if self._lower.find(key) is None:  # The copy left before it was marked.
            self.gone_below([key])
        return is_new

    def gone_below(self, keys: Sequence[BlockKey]) -> None:
        """Note that blocks left the lower tier by themselves."""
        state = self._state
        with state.lock:
            state.tell([BlockRemoved(key, Tier.L4) for key in keys])
            if not state.running:
                return
            for key in keys:
                slot = state.table.peek(key)
                if slot is not None:
                    state.table.clean.unmark(slot)

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._awake.wait()
            self._awake.clear()
            self._copy_all_due()

    def _copy_all_due(self) -> None:
        while not self._stopping.is_set():
            try:
                if not self.demote_one(limit_bytes=self._limit_bytes):
                    return
            except CacheError as error:
                log.debug("a block was not copied down: %s", error)
                self._stopping.wait(_RETRY_S)
            except Exception:
                log.exception("copying blocks down failed")
                self._stopping.wait(_RETRY_S)
