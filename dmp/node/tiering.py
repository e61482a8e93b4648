"""Blocks on their way between memory and the lower tier: down before eviction, up on demand.

Parts of DmpNode. The demoter, a thread in the node's life, is active while the exposed bytes
(dmp/slots/slot_table.py) exceed the share ``demote_above`` of the memory; eviction then loses
nothing. It copies blocks in the order of eviction and never delays a reservation: a slot is pinned
only during the copy, and a block evicted before the copy is simply lost. Threads of the promoter
read several blocks at a time, straight into reserved slots. Concurrent requests for the same block
share a read; a read that fails or takes too long is a miss. The eraser removes blocks from both.
"""

from __future__ import annotations

import logging
import struct
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Final

from tierkv.dmp.node.disk_ledger import DiskLedger
from tierkv.dmp.node.gets import Gets
from tierkv.dmp.node.lower_tier import LowerTier, resting
from tierkv.dmp.node.puts import Puts
from tierkv.dmp.node.reports import Reports
from tierkv.dmp.node.scrubber import is_sound
from tierkv.dmp.node.state import NodeState
from tierkv.dmp.segment.slots import Slot, SlotState
from tierkv.dmp.slots.accounts import Quota
from tierkv.dmp.wire.messages import RangeRef, Sealing
from tierkv.dmp.wire.range_codec import WHOLE, as_ref
from tierkv.kvcore.block import BlockSpec, Erased, Location, Tier
from tierkv.kvcore.block_event import BlockEvent, BlockRemoved
from tierkv.kvcore.errors import CacheError, RemoteProtocolError, TransportError
from tierkv.kvcore.ids import BlockKey

log = logging.getLogger(__name__)
_RETRY_S: Final = 5.0
"""Pause after the lower tier refused a block: the tier is full or broken, and its stats say so."""

_ERASED_AT_ONCE: Final = 32
"""Blocks that are overwritten under one hold of the lock."""

_ERASE_WAIT_S: Final = 30.0
"""Longest wait for transfers of erased blocks; a transfer ends or times out before."""

_Coming = Future[Location | None]


class Demoter:
    """The demotion thread."""

    def __init__(self, state: NodeState, lower: LowerTier, reports: Reports) -> None:
        self._state = state
        self._lower = lower
        self._ledger = DiskLedger(lower)
        self._ledger.set(state.quotas)
        self._reports = reports
        self._limit_bytes = 0
        self._awake = threading.Event()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        lower.set_listener(self.gone_below)
        reports.ledger = self._ledger

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

    def set_quotas(self, quotas: Sequence[Quota]) -> None:
        """Have copies keep to quotas too: from the thread's next step on."""
        self._ledger.set(quotas)
        self.wake()

    def demote_one(self, *, limit_bytes: int) -> bool:
        """Copy the next block; False if no block is due.

        Due are blocks of namespaces on disks only, and any block while more than ``limit_bytes``
        are exposed.

        Raises:
            CacheError: the lower tier did not store the block.
        """
        state = self._state
        with state.lock:
            table = state.table
            slot = table.quotas.next_due_below()
            if slot is None and table.exposed_bytes > limit_bytes:
                slot = table.next_dirty()
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
                state.unpin([slot])
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
        if is_new and not self._ledger.takes(block):
            with self._state.lock:
                if self._state.running:
                    self._state.table.clean.mark(slot)  # Settled: there will be no copy.
            return False
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
        if is_new:
            self._tell_deleted(self._ledger.entered(block))
        if self._lower.find(key) is None:  # The copy left before it was marked.
            self.gone_below([key])
        return is_new

    def gone_below(self, keys: Sequence[BlockKey]) -> None:
        """Note that blocks left the lower tier by themselves."""
        state = self._state
        self._ledger.left(keys)
        with state.lock:
            state.tell([BlockRemoved(key, Tier.L4) for key in keys])
            if not state.running:
                return
            for key in keys:
                slot = state.table.store.peek(key)
                if slot is not None:
                    state.table.clean.unmark(slot)

    def _tell_deleted(self, keys: Sequence[BlockKey]) -> None:
        """Report copies lost by their namespace; memory keeps the marks, for no new copies."""
        if keys:
            with self._state.lock:
                self._state.tell([BlockRemoved(key, Tier.L4) for key in keys])

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._awake.wait()
            self._awake.clear()
            self._copy_all_due()

    def _copy_all_due(self) -> None:
        while not self._stopping.is_set():
            try:
                deleted = self._ledger.delete_some()
                self._tell_deleted(deleted)
                if not self.demote_one(limit_bytes=self._limit_bytes) and not deleted:
                    return
            except CacheError as error:
                log.debug("a block was not copied down: %s", error)
                self._stopping.wait(_RETRY_S)
            except Exception:
                log.exception("copying blocks down failed")
                self._stopping.wait(_RETRY_S)


class Promoter:
    """Reads from the lower tier into slots."""

    def __init__(
        self, state: NodeState, puts: Puts, gets: Gets, lower: LowerTier, reports: Reports
    ) -> None:
        self._state = state
        self._puts = puts
        self._gets = gets
        self._lower = lower
        self._reports = reports
        self._lock = threading.Lock()
        self._coming: dict[BlockKey, _Coming] = {}
        self._workers: ThreadPoolExecutor | None = None

    def start(self) -> None:
        """Create the thread pool; threads start with the first block."""
        self._workers = ThreadPoolExecutor(
            self._state.config.promote_threads, thread_name_prefix="dmp-promote"
        )

    def stop(self) -> None:
        """End the threads; running reads are finished, queued reads are cancelled."""
        with self._lock:
            workers, self._workers = self._workers, None
        if workers is not None:
            workers.shutdown(wait=True, cancel_futures=True)

    def promote(self, keys: Sequence[BlockKey]) -> list[Location | None]:
        """Return the location of each block, in memory already or now; None for a miss."""
        found = self._gets.lookup(keys)
        coming = {
            index: self._begin(key)
            for index, key in enumerate(keys)
            if found[index] is None and self._lower.find(key) is not None
        }
        some = [future for future in coming.values() if future is not None]
        wait(some, timeout=self._state.config.promote_timeout_s)
        for index, future in coming.items():
            if future is not None:
                found[index] = _result(future)
        return found

    def _begin(self, key: BlockKey) -> _Coming | None:
        """Join the running read of a block, or begin a read; None when stopping."""
        with self._lock:
            future = self._coming.get(key)
            if future is None and self._workers is not None:
                future = self._coming[key] = self._workers.submit(self._read, key)
                future.add_done_callback(lambda _: self._ended(key))
            return future

    def _ended(self, key: BlockKey) -> None:
        # Runs in a worker, or directly in ``_begin`` if the worker was very quick; ``_begin`` holds
        # the lock, hence no lock here. Removing one key from a dictionary is a single step.
        self._coming.pop(key, None)

    def _read(self, key: BlockKey) -> Location | None:
        block = self._lower.find(key)
        if block is None:
            return None
        try:
            (place,) = self._puts.reserve(
                [block],
                deadline_s=60.0 + self._state.config.promote_timeout_s,
                owner="",
                must=True,  # A caller waits for the block.
            )
            if place is None:  # The block was stored meanwhile, or no room is left.
                return self._gets.lookup([key])[0]
            return self._fill(block, place)
        except (
            CacheError,
            RemoteProtocolError,
        ) as error:  # An archive may hold foreign data.
            log.debug("dmp: block %s was not promoted: %s", key.hex(), error)
            return None

    def _fill(self, block: BlockSpec, place: Location) -> Location | None:
        """Read a block into its slot and seal the slot."""
        try:
            ticket = self._puts.begin_write([as_ref(RangeRef(place, WHOLE))])
            try:
                # Not computed from the slot, which a late writer may have spoilt meanwhile.
                packed = self._lower.get_block(block.key, ticket.views[0])
            finally:
                self._puts.end_write(ticket)
            sums = struct.unpack(f"<{block.ranges.count}Q", packed)
            (sealed,) = self._puts.seal([Sealing(place, sums)])
        except CacheError:
            self._puts.abort([place])
            raise
        self._reports.promoted_blocks += sealed is not None
        with self._state.lock:
            slot = self._state.table.store.peek(block.key)
            if slot is not None:
                self._state.table.clean.mark(slot, spare=False)
        return sealed


def _result(future: _Coming) -> Location | None:
    """Return the result of a read; None if not done in time. A queued read is then cancelled."""
    if future.cancel() or not future.done() or future.cancelled():
        return None
    return future.result()


class Eraser:
    """Erases blocks of one node: out of memory, disk and archive, with their bytes overwritten.

    The order makes sure that no copy comes back: memory first, then the end of the transfers that
    touched the blocks (among them a copy on its way to the disk), then the lower tier, then memory
    again, where a promotion may have put a block meanwhile.
    """

    def __init__(
        self,
        state: NodeState,
        lower: LowerTier | None,
        gone_below: Callable[[Sequence[BlockKey]], None],
    ) -> None:
        """Use a node's parts; ``gone_below`` is told about blocks that left the lower tier."""
        self._state = state
        self._lower = lower
        self._gone_below = gone_below

    def erase(self, keys: Sequence[BlockKey]) -> Erased:
        """Erase all copies of blocks; see PoolNode.

        Raises:
            TransportError: a transfer still touches a block, or the lower tier failed.
        """
        removed = self._out_of_memory(keys)
        self._await_transfers()
        if self._lower is None:
            return removed
        blocks, size = self._lower.erase(keys)
        self._gone_below(keys)
        again = self._out_of_memory(keys)
        self._await_transfers()
        return removed + again + Erased(resting_blocks=blocks, resting_bytes=size)

    def _out_of_memory(self, keys: Sequence[BlockKey]) -> Erased:
        blocks = size = 0
        state = self._state
        for at in range(0, len(keys), _ERASED_AT_ONCE):
            events: list[BlockEvent] = []
            with state.lock:
                for key in keys[at : at + _ERASED_AT_ONCE]:
                    slot = state.table.store.find(key)
                    if slot is None or slot.state is SlotState.QUARANTINED:
                        continue
                    if slot.state is SlotState.SEALED:
                        events.append(BlockRemoved(key, Tier.L2))
                        blocks, size = blocks + 1, size + slot.length
                    state.erase(slot)
                state.tell(events)
        return Erased(blocks, size)

    def _await_transfers(self) -> None:
        """Wait until no transfer touches a slot that is being erased."""
        state = self._state
        with state.lock:
            waited = set(state.erasing)
            if not state.erased.wait_for(lambda: not waited & state.erasing, _ERASE_WAIT_S):
                raise TransportError(
                    f"{len(waited & state.erasing)} erased blocks of {state.config.node_id} are "
                    "still being read"
                )
