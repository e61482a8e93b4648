"""Loads blocks from the lower tier into memory on demand.

A part of DmpNode. Threads of the promoter read several blocks at a time, straight into reserved
slots. Concurrent requests for the same block share a read. A read that fails or takes too long is a
miss.
"""

from __future__ import annotations

import logging
import struct
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

from tierkv.dmp.node.gets import Gets
from tierkv.dmp.node.lower_tier import LowerTier
from tierkv.dmp.node.puts import Puts
from tierkv.dmp.node.reports import Reports
from tierkv.dmp.node.state import NodeState
from tierkv.dmp.wire.messages import RangeRef, Sealing
from tierkv.dmp.wire.range_codec import WHOLE, as_ref
from tierkv.kvcore.block import BlockSpec
from tierkv.kvcore.errors import CacheError, RemoteProtocolError
from tierkv.kvcore.ids import BlockKey
from tierkv.kvcore.location import Location

log = logging.getLogger(__name__)
Coming = Future[Location | None]


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
        self._coming: dict[BlockKey, Coming] = {}
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

    def _begin(self, key: BlockKey) -> Coming | None:
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
            slot = self._state.table.peek(block.key)
            if slot is not None:
                self._state.table.clean.mark(slot, spare=False)
        return sealed


def _result(future: Coming) -> Location | None:
    """Return the result of a read; None if not done in time. A queued read is then cancelled."""
    if future.cancel() or not future.done() or future.cancelled():
        return None
    return future.result()
