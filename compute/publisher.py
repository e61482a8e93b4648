"""Writes new full blocks to the pool behind the computation.

One thread takes jobs from a bounded queue, so the engine never waits for the pool; a full queue
means a block is simply not published. The pages of a job stay referenced until it is done.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from compute.batcher import FullBlock
from compute.finder import Absorb, BlockFinder
from compute.pages import L1Pages
from dmp.pool_node import PoolNode, PutGrant, PutRequest, RangeWrite
from kvcore.clock import Clock
from kvcore.ids import NodeId

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class PublishJob:
    """Blocks of one sequence that became full in one step.

    Attributes:
        seq_id: whose blocks.
        blocks: in chain order; the job's owner holds a reference on their pages.
        tenant: whom to account to.
        must: queue it even when the queue is full (a handoff waits for it).
    """

    seq_id: int
    blocks: tuple[FullBlock, ...]
    tenant: str
    must: bool = False


class Publisher:
    """The write-behind thread.

    Attributes:
        dropped_blocks: blocks not published because the queue was full.
        written_bytes: bytes written into slots.
        write_time_s: seconds spent writing.
    """

    def __init__(
        self,
        pages: L1Pages,
        finder: BlockFinder,
        *,
        model: str,
        queue_blocks: int,
        absorb: Absorb,
        clock: Clock,
        done: Callable[[PublishJob], None],
    ) -> None:
        self.dropped_blocks = 0
        self.written_bytes = 0
        self.write_time_s = 0.0
        self._pages = pages
        self._finder = finder
        self._model = model
        self._queue_blocks = queue_blocks
        self._absorb = absorb
        self._clock = clock
        self._done = done
        self._jobs: queue.SimpleQueue[PublishJob | None] = queue.SimpleQueue()
        self._pending_blocks = 0
        self._idle = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="tierkv-publish", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Publish what is queued, then end the thread."""
        self._jobs.put(None)
        self._thread.join()

    def offer(self, job: PublishJob) -> bool:
        """Queue a job; False when the queue is full and the job is not a must."""
        with self._idle:
            full = self._pending_blocks + len(job.blocks) > self._queue_blocks
            if full and not job.must:
                self.dropped_blocks += len(job.blocks)
                return False
            self._pending_blocks += len(job.blocks)
        self._jobs.put(job)
        return True

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything offered so far is published or given up; False on timeout."""
        with self._idle:
            return self._idle.wait_for(lambda: self._pending_blocks == 0, timeout_s)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                self._publish(job)
            except Exception:  # noqa: BLE001 - the thread must live; the block stays unpublished.
                _log.exception("publishing blocks failed")
            self._done(job)
            with self._idle:
                self._pending_blocks -= len(job.blocks)
                self._idle.notify_all()

    def _publish(self, job: PublishJob) -> None:
        by_node: dict[NodeId, tuple[PoolNode, list[FullBlock]]] = {}
        for block in job.blocks:
            node = self._finder.place(block.key)
            if node is not None:
                by_node.setdefault(node.node_id, (node, []))[1].append(block)
        for node, blocks in by_node.values():
            self._put(node, blocks, job.tenant)

    def _put(self, node: PoolNode, blocks: Sequence[FullBlock], tenant: str) -> None:
        """Reserve, write and seal; an error frees what was reserved."""
        layout = self._pages.layout
        puts = [
            PutRequest(
                key=block.key,
                parent=block.parent,
                range_bytes=layout.stored_layer_bytes,
                range_count=layout.layers,
                tokens=layout.block_tokens,
                model=self._model,
                tenant=tenant,
            )
            for block in blocks
        ]
        granted: list[PutGrant] = []
        began = self._clock.now()
        with self._absorb() as attempt:
            grants = node.reserve(puts)
            wanted = [(g, b.page) for g, b in zip(grants, blocks, strict=True) if g is not None]
            granted = [grant for grant, _ in wanted]
            self._write(node, wanted)
            node.seal(granted)
        if attempt.ok:
            self.written_bytes += len(granted) * layout.stored_bytes
            self.write_time_s += self._clock.now() - began
        elif granted:
            with self._absorb():
                node.abort(granted)

    def _write(self, node: PoolNode, wanted: Sequence[tuple[PutGrant, int]]) -> None:
        if not wanted:
            return
        pages = [page for _, page in wanted]
        for layer in range(self._pages.layout.layers):
            ranges = self._pages.read_ranges(layer, pages)
            node.write_ranges(
                [RangeWrite(g, layer, data) for (g, _), data in zip(wanted, ranges, strict=True)]
            )
