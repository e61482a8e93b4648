"""Which blocks of a step go to the pool, and when: layer by layer behind a pass, or after the pass.

Used by the engine only, in the engine's thread. The publisher moves the bytes; saves keep pages
alive for the publisher and tell handoffs about progress. A full block refused by the pool, or by a
publisher with too much to do, is *owed*: the save is tried again until the pool has the block or
L1 has evicted the block. An owed block takes no memory of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from tierkv.compute.batching.batch_plan import Chunk, ChunkOutcome
from tierkv.compute.batching.batcher import Batcher
from tierkv.compute.batching.reuse_facts import block_of, end_of
from tierkv.compute.batching.sequence import Sequence as EngineSequence
from tierkv.compute.l1.page_pool import FullBlock
from tierkv.compute.tiers.block_puts import PublishJob
from tierkv.compute.tiers.publisher import Publication
from tierkv.compute.tiers.tiers import Tiers
from tierkv.compute.transfers.handoff import Handoffs
from tierkv.kvcore.block import NO_OUTLOOK
from tierkv.kvcore.clock import Clock
from tierkv.kvcore.ids import BlockKey
from tierkv.kvcore.layout import KvCodec
from tierkv.kvcore.request import FinishReason

NO_SEQUENCE: Final = 0
"""Sequences count from 1; a block that is saved again belongs to no sequence."""


class OwedBlocks:
    """Blocks by key, the oldest first; each block has a job without a sequence."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._jobs: dict[BlockKey, PublishJob] = {}

    def __len__(self) -> int:
        return len(self._jobs)

    def note(self, job: PublishJob, blocks: Sequence[FullBlock]) -> None:
        """Remember blocks of a job missing from the pool; beyond the limit the oldest are dropped.

        Partial blocks are left out: by the time of a retry, the request that could continue a
        partial block has computed the tokens.
        """
        for block in blocks:
            if not block.partial:
                self._jobs.pop(block.spec.key, None)
                self._jobs[block.spec.key] = replace(
                    job, seq_id=NO_SEQUENCE, blocks=(block,), must=False, handoff=False
                )
        for key in list(self._jobs)[: max(0, len(self._jobs) - self._limit)]:
            del self._jobs[key]

    def take(self, count: int, page_of: Callable[[BlockKey], int | None]) -> list[PublishJob]:
        """Take out up to ``count`` blocks still in L1, and drop older blocks lost from L1.

        Args:
            count: most blocks to take.
            page_of: returns the page of a block in L1; None if L1 lacks the block.

        Returns:
            jobs of one codec each.
        """
        jobs: dict[KvCodec, PublishJob] = {}
        for key in list(self._jobs):
            if count <= 0:
                break
            job, page = self._jobs.pop(key), page_of(key)
            if page is None:
                continue
            count -= 1
            block = replace(job.blocks[0], page=page)
            known = jobs.get(job.codec)
            jobs[job.codec] = replace(job, blocks=(*(known.blocks if known else ()), block))
        return list(jobs.values())


_MOST_OWED: Final = 4096
"""Limit of remembered blocks."""
_RETRY_PAUSE_S: Final = 10.0
"""Pause after a failure before the next retry, unless the pool's nodes change."""


class PassSave:
    """The save of one forward pass: ``end`` publishes the kept blocks and gives up the rest."""

    def __init__(self, publication: Publication | None) -> None:
        self._publication = publication
        self._kept: list[PublishJob] = []

    @property
    def follows(self) -> bool:
        """True if the pass must report its progress."""
        return self._publication is not None

    def computed(self, stop: int) -> None:
        """Report layers ``[0, stop)`` of the pass as computed."""
        if self._publication is not None and stop:
            self._publication.computed(stop)

    def keep(self, seq: EngineSequence, outcome: ChunkOutcome) -> bool:
        """Keep a sequence's blocks after its chunk succeeded.

        Returns:
            False if the pass saves no full block of the sequence.
        """
        jobs = self._publication.jobs if self._publication is not None else ()
        mine = [job for job in jobs if job.seq_id == seq.seq_id]
        for job in mine:
            if not job.blocks[0].partial or outcome.finish is FinishReason.HANDOFF:
                self._kept.append(job)
                seq.published_tokens += sum(block.spec.tokens for block in job.blocks)
        return any(not job.blocks[0].partial for job in mine)

    def end(self) -> None:
        """Publish the kept blocks and give up the rest; a second call does nothing."""
        publication, self._publication = self._publication, None
        if publication is not None:
            publication.end(self._kept)


NOTHING_SAVED = PassSave(None)


class Saves:
    """Blocks on their way to the pool; a job holds a reference on the page of each block."""

    def __init__(
        self,
        batcher: Batcher,
        tiers: Tiers,
        handoffs: Handoffs,
        clock: Clock,
        *,
        enabled: bool,
    ) -> None:
        self._batcher = batcher
        self._tiers = tiers
        self._handoffs = handoffs
        self._clock = clock
        self._enabled = enabled
        self._owed = OwedBlocks(_MOST_OWED)
        self._retry_at = 0.0

    def begin(self, chunks: Sequence[Chunk]) -> PassSave:
        """Take the blocks that a pass over these chunks will fill, except blocks filled by
        decoding.
        """
        if not self._enabled or not self._tiers.finder.nodes:
            return NOTHING_SAVED
        jobs = [job for chunk in chunks for job in self._jobs(chunk)]
        if not jobs:
            return NOTHING_SAVED
        ends = {chunk.seq.seq_id: chunk.start + chunk.count for chunk in chunks}
        patience_s = sum(self._patience_s(job, ends[job.seq_id]) for job in jobs)
        publication = self._tiers.publisher.begin(jobs, patience_s=patience_s)
        if publication is None:
            return NOTHING_SAVED
        for job in publication.jobs:
            self._taken(job, ends[job.seq_id])
        return PassSave(publication)

    def _jobs(self, chunk: Chunk) -> list[PublishJob]:
        request = chunk.seq.request
        if chunk.count == 1 and not request.handoff:
            return []
        codec = self._tiers.codec_of(request)
        if codec is None:
            return []
        groups = [self._batcher.filling(chunk), self._tail(chunk)]
        return [_job(chunk.seq, blocks, codec) for blocks in groups if blocks]

    def _tail(self, chunk: Chunk) -> tuple[FullBlock, ...]:
        """Return the partial last block of a prompt to hand over; the next node continues it."""
        seq, tokens = chunk.seq, chunk.start + chunk.count
        partial = tokens % seq.block_tokens
        hands_over = seq.request.handoff and seq.request.use_cache and chunk.samples
        if not hands_over or not partial or tokens + 1 >= seq.max_length:
            return ()
        return (_end_of(seq, tokens),)

    def save(self, seq: EngineSequence, blocks: Sequence[FullBlock]) -> None:
        """Save full blocks whose pages are complete."""
        if not blocks or not self._enabled:
            return
        codec = self._tiers.codec_of(seq.request)
        if codec is None:
            return
        job = _job(seq, blocks, codec)
        patience_s = self._patience_s(job, seq.computed)
        if not self._tiers.finder.nodes:
            self._owed.note(job, blocks)
        elif self._tiers.publisher.offer(job, patience_s=patience_s):
            self._taken(job, seq.computed)
            seq.published_tokens += len(blocks) * seq.block_tokens
        else:
            seq.unsaved.extend(range(seq.committed - len(blocks), seq.committed))
            self._owed.note(job, blocks)

    def _patience_s(self, job: PublishJob, context_tokens: int) -> float:
        """Return how long a job may wait for room: the time to compute the blocks again."""
        return len(job.blocks) * self._tiers.saving_patience_s(context_tokens, job.codec)

    def save_before_loss(self, seq: EngineSequence) -> None:
        """Save blocks that the pool lacks of a sequence about to lose its pages, if worth the time.

        Candidates are the partial last block, and full blocks that found the queue full. At most
        half of the sequence's pages are kept for the save; the rest is needed at once.
        """
        unsaved, seq.unsaved, seq.tail_saved = seq.unsaved, [], False
        if not self._enabled or not self._tiers.finder.nodes or not seq.request.use_cache:
            return
        codec = self._tiers.codec_of(seq.request)
        if codec is None or not self._tiers.worth_saving(seq.block_tokens, seq.computed, codec):
            return
        room = seq.num_pages // 2
        tail = self._own_tail(seq) if room else None
        if tail is not None and self._tiers.worth_saving(tail.spec.tokens, seq.computed, codec):
            seq.tail_saved = self._save_now(seq, (tail,), codec)
            room -= 1
        kept = [
            FullBlock(block_of(seq, block), int(seq.page_table[block])) for block in unsaved[:room]
        ]
        if kept and self._save_now(seq, tuple(kept), codec):
            seq.published_tokens += len(kept) * seq.block_tokens

    def _own_tail(self, seq: EngineSequence) -> FullBlock | None:
        """Return the partial block of a decoding sequence, named as the later lookup names it."""
        partial = seq.computed % seq.block_tokens
        if not partial or seq.computed != seq.length - 1 or seq.computed > seq.findable_tokens:
            return None
        return _end_of(seq, seq.computed)

    def _save_now(self, seq: EngineSequence, blocks: tuple[FullBlock, ...], codec: KvCodec) -> bool:
        job = PublishJob(seq.seq_id, blocks, codec, must=True)
        if not self._tiers.publisher.offer(job):
            return False
        self._taken(job, seq.computed)
        return True

    def _taken(self, job: PublishJob, tokens: int) -> None:
        """Hold a job's pages until its end, which is posted to this thread and so runs later."""
        self._batcher.pool.acquire([block.page for block in job.blocks])
        self._handoffs.queued(job.seq_id, tokens)

    def published(self, job: PublishJob, lost: Sequence[FullBlock]) -> None:
        """Release the pages of an ended job, and remember lost blocks for a retry.

        After a successful save the pool is known to be reachable, and owed blocks are offered
        again. After a failed save retries pause.
        """
        self._batcher.pool.release([block.page for block in job.blocks])
        self._handoffs.published(job.seq_id)
        if lost:
            self._owed.note(job, lost)
            self._retry_at = self._clock.now() + _RETRY_PAUSE_S
        else:
            self._retry()

    def pool_changed(self) -> None:
        """Save at once the blocks refused by the former pool nodes."""
        self._retry_at = 0.0
        self._retry()

    def _retry(self) -> None:
        """Offer owed blocks, as many as leave the publisher room for new blocks."""
        if not len(self._owed) or not self._tiers.finder.nodes:
            return
        spare = self._tiers.publisher.spare_blocks
        if not spare or self._clock.now() < self._retry_at:
            return
        for job in self._owed.take(spare, self._page_of):
            if self._tiers.publisher.offer(job):
                self._taken(job, 0)
            else:
                self._owed.note(job, job.blocks)

    def _page_of(self, key: BlockKey) -> int | None:
        return next(iter(self._batcher.pool.lookup([key])), None)


def _job(seq: EngineSequence, blocks: Sequence[FullBlock], codec: KvCodec) -> PublishJob:
    request = seq.request
    must = request.handoff or seq.is_background  # A chunk is of use only with all its blocks.
    return PublishJob(seq.seq_id, tuple(blocks), codec, must, handoff=request.handoff)


def _end_of(seq: EngineSequence, stop: int) -> FullBlock:
    """Return the partial last block of ``[0, stop)``, without an outlook on the next use."""
    spec = replace(end_of(seq, stop), outlook=NO_OUTLOOK)
    return FullBlock(spec, int(seq.page_table[seq.num_pages - 1]), partial=True)
