"""Writes blocks to the pool behind the computation, layer by layer while a pass runs.

One thread carries out the engine's posts. If too many blocks are in flight, the engine waits a
little where the wait is expected to pay off, and otherwise leaves blocks unpublished; the engine
never waits for a slow or silent pool. The pages of a job stay referenced until the job is done.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Collection, Sequence

import torch

from tierkv.compute.model.pages import L1Pages
from tierkv.compute.tiers.block_puts import BlockPuts, FramesPut, PublishJob, SaveDone, put_frames
from tierkv.compute.tiers.finder import Absorb, BlockFinder
from tierkv.costing.fit import Rate
from tierkv.kvcore.clock import Clock
from tierkv.kvcore.ids import BlockKey

_log = logging.getLogger(__name__)
_Work = Callable[[], None]
_PATIENCE_MARGIN = 2.0
"""A wait may take this many times the expected patience; then the wait is given up."""


class Publication:
    """Jobs on their way to the pool, as seen by the engine's thread.

    Call ``computed`` after each layer, or once for many; then ``end``, exactly once.

    Attributes:
        jobs: the accepted jobs; each is passed to the done callback after ``end``.
    """

    def __init__(self, publisher: Publisher, jobs: tuple[PublishJob, ...], puts: BlockPuts) -> None:
        self.jobs = jobs
        self._publisher = publisher
        self._puts = puts

    def computed(self, stop: int) -> None:
        """Report layers ``[0, stop)`` of the blocks' pages as complete."""
        self._publisher.post_write(self._puts, stop)

    def end(self, kept: Collection[PublishJob]) -> None:
        """Make the blocks of kept jobs readable and give up all other jobs, without a trace."""
        self._publisher.post_end(self.jobs, self._puts, [job for job in self.jobs if job in kept])


class Publisher:
    """The write-behind thread.

    Attributes:
        dropped_blocks: blocks turned away because too many were in flight.
        written_bytes: bytes written into slots.
        write_time_s: seconds spent writing.
    """

    def __init__(
        self,
        pages: L1Pages,
        finder: BlockFinder,
        *,
        queue_blocks: int,
        alone_blocks: int = 0,
        absorb: Absorb,
        clock: Clock,
    ) -> None:
        """Make it; ``start`` starts the thread.

        Args:
            pages: where blocks are read.
            finder: says to which pool node a block goes.
            queue_blocks: most blocks in flight.
            alone_blocks: most blocks in flight if they come at a time without any in flight; by
                default ``queue_blocks``. A small L1 holds few blocks for the pool, and a prompt
                of more blocks than that would otherwise never be saved.
            absorb: guards cache work.
            clock: measures the writes.
        """
        self.dropped_blocks = 0
        self.written_bytes = 0
        self.write_time_s = 0.0
        self._pages = pages
        self._finder = finder
        self._queue_blocks = queue_blocks
        self._alone_blocks = max(queue_blocks, alone_blocks)
        self._absorb = absorb
        self._clock = clock
        self._done: SaveDone | None = None
        self._work: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._pending_blocks = 0
        self._ending_blocks = 0
        self._leaving_blocks = 0
        self._pace = Rate()
        self._paced_s = 0.0
        self._came_late = False
        self._idle = threading.Condition()
        self._copies = _side_stream(pages.kv.device) if pages.kv.is_cuda else None
        self._thread = threading.Thread(target=self._run, name="tierkv-publish", daemon=True)

    def start(self, done: SaveDone) -> None:
        """Start the thread, which calls ``done`` once per ended job."""
        self._done = done
        self._thread.start()

    def stop(self) -> None:
        """Publish the queued blocks, then end the thread; open publications must have ended."""
        self._work.put(None)
        self._thread.join()

    def offer(self, job: PublishJob, *, patience_s: float = 0.0) -> bool:
        """Queue blocks with complete pages; return False when too many are in flight."""
        publication = self.begin([job], patience_s=patience_s)
        if publication is None:
            return False
        publication.computed(self._pages.layout.layers)
        publication.end([job])
        return True

    def begin(self, jobs: Sequence[PublishJob], *, patience_s: float = 0.0) -> Publication | None:
        """Take blocks whose pages are being computed; return None when no job can be taken.

        Jobs beyond the bound are dropped, except jobs with ``must``.

        Args:
            jobs: jobs to publish.
            patience_s: wait for room if the wait is expected to take no longer.
        """
        self._await_room(sum(len(job.blocks) for job in jobs), patience_s)
        taken = tuple(job for job in jobs if self._admit(job))
        if not taken:
            return None
        puts = BlockPuts(taken, self._finder, self._pages.layout, absorb=self._absorb)
        self._work.put(lambda: self._timed(puts.reserve))
        return Publication(self, taken, puts)

    def post_write(self, puts: BlockPuts, stop: int) -> None:
        """Have layers written; on CUDA the write waits for the kernels of these layers only."""
        event = None
        if self._copies is not None:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self._pages.kv.device))
        self._work.put(lambda: self._timed(lambda: self._write(puts, stop, event)))

    def post_end(
        self, jobs: Sequence[PublishJob], puts: BlockPuts, kept: Sequence[PublishJob]
    ) -> None:
        """Have blocks sealed or aborted, then the done callback called."""
        with self._idle:
            self._ending_blocks += sum(len(job.blocks) for job in jobs)
        self._work.put(lambda: self._end(jobs, puts, kept))

    @property
    def is_behind(self) -> bool:
        """True when the queue is more than half full: background work should pause."""
        return self._held_blocks > self._queue_blocks // 2

    @property
    def spare_blocks(self) -> int:
        """Number of blocks that can be queued before ``is_behind``."""
        return max(0, max(1, self._queue_blocks // 2) - self._held_blocks)

    @property
    def _held_blocks(self) -> int:
        """Blocks in flight, without those whose end is being told.

        Whoever hears of an end offers the next blocks, perhaps before the count is lowered; nothing
        would offer them again.
        """
        with self._idle:
            return self._pending_blocks - self._leaving_blocks

    def flush(self, timeout_s: float) -> bool:
        """Wait until all blocks offered so far are published or given up; False on timeout."""
        with self._idle:
            return self._idle.wait_for(lambda: self._pending_blocks == 0, timeout_s)

    def _await_room(self, blocks: int, patience_s: float) -> None:
        """Wait until this many more blocks are within the bound, or no block is in flight.

        After a wait in vain no further wait is made until blocks were published.
        """
        most = max(0, self._queue_blocks - blocks)
        surplus = self._held_blocks - most
        if surplus <= 0 or self._came_late or not self._pace.value:
            return
        # Blocks of a pass under way cannot leave the queue while the engine waits here.
        if surplus > self._ending_blocks or surplus / self._pace.value > patience_s:
            return
        with self._idle:
            self._came_late = not self._idle.wait_for(
                lambda: self._pending_blocks <= most, _PATIENCE_MARGIN * patience_s
            )

    def _admit(self, job: PublishJob) -> bool:
        with self._idle:
            held = self._pending_blocks - self._leaving_blocks
            bound = self._queue_blocks if held else self._alone_blocks
            full = held + len(job.blocks) > bound
            if full and not job.must:
                self.dropped_blocks += len(job.blocks)
                return False
            self._pending_blocks += len(job.blocks)
        return True

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                work()
            except Exception:  # noqa: BLE001 - the thread must live; the block stays unpublished.
                _log.exception("publishing blocks failed")

    def _write(self, puts: BlockPuts, stop: int, event: torch.cuda.Event | None) -> None:
        if event is None or self._copies is None:
            puts.write(stop, self._pages.read_ranges)
            return
        self._copies.wait_event(event)
        with torch.cuda.stream(self._copies):
            puts.write(stop, self._pages.read_ranges)

    def _end(self, jobs: Sequence[PublishJob], puts: BlockPuts, kept: Sequence[PublishJob]) -> None:
        assert self._done is not None, "the thread runs once it was started"
        began = self._clock.now()
        lost: set[BlockKey] = set()
        try:
            self.written_bytes += puts.close(kept)
            frames = self._put_frames(kept)
            self.written_bytes += frames.sealed_bytes
            lost = puts.lost() | frames.lost
        finally:
            self.write_time_s += self._clock.now() - began
            blocks = sum(len(job.blocks) for job in jobs)
            with self._idle:
                self._leaving_blocks = blocks
            for job in jobs:
                self._done(job, [b for b in job.blocks if b.spec.key in lost and job in kept])
            with self._idle:
                self._pace.add(blocks, self.write_time_s - self._paced_s)
                self._paced_s = self.write_time_s
                self._pending_blocks -= blocks
                self._ending_blocks -= blocks
                self._leaving_blocks = 0
                self._came_late = False
                self._idle.notify_all()

    def _put_frames(self, kept: Sequence[PublishJob]) -> FramesPut:
        """Write blocks of variable size, which is known only after all layers are computed."""
        jobs = [job for job in kept if not job.codec.has_fixed_size]
        if not jobs:
            return FramesPut(0, set())
        with torch.cuda.stream(self._copies):  # Without a GPU this is None and changes nothing.
            return put_frames(jobs, self._pages, self._finder, absorb=self._absorb)

    def _timed(self, work: _Work) -> None:
        began = self._clock.now()
        work()
        self.write_time_s += self._clock.now() - began


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Make a stream for copies that wait for a layer, not for all work queued since."""
    stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return stream
