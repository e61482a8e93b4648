"""The blending stage of a request: look up chunks, load chunks, and run the blending pass.

Used by the engine only, in the engine's thread, between a sequence's exact prefix and its decoding.
The batcher decides about pages and compute/blend/run.py is one pass; this module connects both with
the tiers. After any failure the prompt is computed exactly.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from tierkv.compute.batching.batch_plan import Chunk, LoadOrder
from tierkv.compute.batching.batcher import Batcher
from tierkv.compute.batching.inbox import Inbox
from tierkv.compute.batching.sequence import Phase
from tierkv.compute.batching.sequence import Sequence as EngineSequence
from tierkv.compute.blend.isolation import Isolation
from tierkv.compute.blend.passes import BlendOutcome
from tierkv.compute.blend.plan import CHECK_LAYER
from tierkv.compute.blend.run import BlendRun, ChunkLoad
from tierkv.compute.model.decoder import Decoder
from tierkv.compute.tiers.chunk_lookup import FoundChunks, PromptChunk, prompt_chunks
from tierkv.compute.tiers.finder import Source
from tierkv.compute.tiers.loader import LoadJob
from tierkv.compute.tiers.tiers import Tiers
from tierkv.compute.transfers.loads import Loads
from tierkv.costing.blend_controller import BlendDecision, BlendWork
from tierkv.costing.fit import Rate
from tierkv.kvcore.block import shared_owner
from tierkv.kvcore.clock import Clock
from tierkv.kvcore.ids import BlockKey
from tierkv.kvcore.layout import KvCodec
from tierkv.kvcore.request import Blend, BlendSelector

_log = logging.getLogger(__name__)


class Blends:
    """Sequences in the blending stage: chunks are being looked up, loaded or blended."""

    def __init__(
        self,
        batcher: Batcher,
        tiers: Tiers,
        loads: Loads,
        inbox: Inbox,
        decoder: Decoder,
        isolation: Isolation,
        *,
        refusal: str,
        clock: Clock,
        timeout_s: float,
        prefill_rate: Rate,
    ) -> None:
        """Make an empty stage.

        Args:
            batcher: is told the results of lookups and passes.
            tiers: looks up and loads in worker threads.
            loads: knows the work ahead of a sequence, and logs decisions.
            inbox: carries results from the worker threads to the engine's thread.
            decoder: runs the passes.
            isolation: computes missing chunks for later requests.
            refusal: reason why this model's chunks are never blended; empty if blending is allowed.
            clock: source of time for deadlines.
            timeout_s: longest wait for a lookup.
            prefill_rate: measured tokens per second; 0.0 until known.
        """
        self._batcher = batcher
        self._tiers = tiers
        self._loads = loads
        self._inbox = inbox
        self._decoder = decoder
        self._isolation = isolation
        self._refusal = refusal
        self._clock = clock
        self._timeout_s = timeout_s
        self._prefill_rate = prefill_rate
        self._lookups: dict[int, tuple[EngineSequence, tuple[PromptChunk, ...], float]] = {}
        self._runs: dict[int, BlendRun] = {}

    def consider(self, seq: EngineSequence) -> None:
        """Set ``seq.blend`` as the request allows, if this node can blend at all."""
        request = seq.request
        wanted = request.blend is not None and bool(request.blend.chunks) and request.use_cache
        if not wanted or request.handoff or request.resumed_tokens:
            return
        if not self._refusal:
            # Without a chance of a pass the prompt is computed in the next step, like any other.
            seq.blend = request.blend if self._may_pay(seq) else None
            return
        if not self._tiers.cache_errors["blend_refused"]:
            _log.warning("chunks are not blended, prompts are computed exactly: %s", self._refusal)
        self._tiers.cache_errors["blend_refused"] += 1

    def _may_pay(self, seq: EngineSequence) -> bool:
        """Return True if a pass is worth its time where only the text before the chunks is cached.

        Sometimes True against the costs, because only passes show what passes cost.
        """
        blend = seq.request.blend
        assert blend is not None
        start = blend.chunks[0][0]
        work = _blend_work(blend, blend.chunks, start, seq.length)
        ahead = self._loads.ahead_of(seq)
        credit = self._tiers.decider.chunk_credit(work, start=start, stop=seq.length, ahead=ahead)
        if not credit:
            seq.is_blend_trial = self._tiers.figures.chunks_refused()
        return credit > 0.0 or seq.is_blend_trial

    @property
    def ready(self) -> BlendRun | None:
        """The pass to continue: the highest-ranked pass whose next layer is loaded."""
        able = [run for run in self._runs.values() if run.can_go_on]
        return min(able, key=lambda run: run.chunk.seq.rank, default=None)

    def look_up(self, seq: EngineSequence) -> None:
        """Find the chunks of a sequence in L1 or in the pool."""
        chunks = prompt_chunks(seq.request, block_tokens=seq.block_tokens)
        missing = [chunk for chunk in chunks if not self._pages_in_l1(chunk)]
        credit = self._credit(seq, chunks) if missing else 0.0
        if missing and not credit:
            self._batcher.compute_exactly(seq)  # Not worth a pass, wherever the chunks are.
            return
        tokens = sum(chunk.stop - chunk.start for chunk in missing)
        wanted = missing and self._tiers.codec_of(seq.request) is not None
        if not wanted or not self._tiers.wants_locate(tokens, self._prefill_rate.value):
            self._looked_up(seq, chunks, {}, credit)
            return
        self._lookups[seq.seq_id] = (seq, chunks, self._clock.now() + self._timeout_s)
        self._tiers.locate_chunks(
            missing,
            lambda found: self._inbox.post(lambda: self._looked_up(seq, chunks, found, credit)),
        )

    def _pages_in_l1(self, chunk: PromptChunk) -> list[int]:
        """Return a chunk's pages; empty unless all are in L1."""
        pages = self._batcher.pool.lookup(chunk.keys)
        return pages if len(pages) == len(chunk.keys) else []

    def _looked_up(
        self,
        seq: EngineSequence,
        chunks: Sequence[PromptChunk],
        found: FoundChunks,
        credit: float,
    ) -> None:
        """Blend with the found chunks or compute exactly; give missing chunks their credit."""
        self._lookups.pop(seq.seq_id, None)
        if seq.phase is not Phase.CHUNKS:
            return
        held = {c.name: pages for c in chunks if (pages := self._pages_in_l1(c))}
        missing = [c for c in chunks if c.name not in held and c.name not in found]
        for chunk in missing:
            self._isolation.want(seq.request, chunk, credit)
        behind = [chunk for chunk in chunks if chunk.stop > seq.computed]
        at_hand = [chunk for chunk in behind if chunk.name in held]
        known = [chunk for chunk in behind if chunk.name in held or chunk.name in found]
        for uses in (known, at_hand) if len(at_hand) < len(known) else (known,):
            if uses and self._begin(seq, uses, held, found):
                return
        self._batcher.compute_exactly(seq)

    def _credit(self, seq: EngineSequence, chunks: Sequence[PromptChunk]) -> float:
        """Return the part of its chunks' cost that a prompt would save with all chunks in L1."""
        work = _work_of(seq, chunks)
        credit = self._tiers.decider.chunk_credit(
            work, start=seq.computed, stop=seq.length, ahead=self._loads.ahead_of(seq)
        )
        if not credit and (seq.is_blend_trial or self._tiers.figures.chunks_refused()):
            return 1.0  # Chunks that are never there teach nothing about passes.
        return credit

    def _begin(
        self,
        seq: EngineSequence,
        uses: list[PromptChunk],
        held: dict[BlockKey, list[int]],
        found: FoundChunks,
    ) -> bool:
        """Begin a pass that uses the given chunks.

        Return False if the pass is not worthwhile or pages are short.
        """
        loads = list({use.name: use for use in uses if use.name not in held}.values())
        sources = [copies for chunk in loads for copies in found[chunk.name]]
        decision = self._decide(seq, uses, sources)
        if decision is None:
            return False
        pages = {use.name: held[use.name] for use in uses if use.name in held}
        for some in pages.values():
            self._batcher.pool.acquire(some)
        fresh = self._batcher.begin_blend(seq, len(sources))
        if fresh is None:
            for some in pages.values():
                self._batcher.pool.release(some)
            return False
        pool = self._batcher.pool
        for some in pages.values():
            pool.use(some, pool.facts(some))
        self._decoder.pages.clear(seq.pages[seq.computed // seq.block_tokens :])
        for chunk in loads:
            pages[chunk.name], fresh = fresh[: len(chunk.keys)], fresh[len(chunk.keys) :]
        now = self._clock.now()
        seq.started_s = now if seq.started_s < 0 else seq.started_s
        assert seq.blend is not None and decision.recompute_ratio is not None
        blend = replace(seq.blend, recompute_ratio=decision.recompute_ratio)
        work = Chunk(seq, seq.computed, seq.length - seq.computed, samples=True)
        scale = self._tiers.figures.steps.scale
        run = BlendRun(work, blend, uses, pages, expected_s=decision.pass_s, scale=scale)
        self._runs[seq.seq_id] = run
        if loads:
            run.deadline_s = now + self._tiers.decider.patience_s(decision.compute_s)
            run.load = self._load(run, loads, sources)
        return True

    def _decide(
        self, seq: EngineSequence, uses: list[PromptChunk], sources: list[tuple[Source, ...]]
    ) -> BlendDecision | None:
        """Choose the recompute ratio; return None if computing all tokens is as fast."""
        ahead = self._loads.ahead_of(seq)
        decision = self._tiers.decider.decide_blend(
            sources,
            self._tiers.codec_of(seq.request) or KvCodec.NONE,
            _work_of(seq, uses),
            start=seq.computed,
            stop=seq.length,
            ahead=ahead,
        )
        chosen = decision.recompute_ratio is not None
        kind = "blend" if chosen else "compute"
        self._loads.decided(seq, decision, found=len(sources), kind=kind, ahead=ahead)
        if not chosen:
            self._tiers.avoided(sources)
        return decision if chosen else None

    def _load(
        self,
        run: BlendRun,
        chunks: Sequence[PromptChunk],
        sources: Sequence[tuple[Source, ...]],
    ) -> ChunkLoad:
        first_block: dict[BlockKey, int] = {}
        pages: list[int] = []
        for chunk in chunks:
            first_block[chunk.name] = len(pages)
            pages.extend(run.pages[chunk.name])
        order = LoadOrder(run.chunk.seq, 0, tuple(pages))
        self._batcher.pool.acquire(pages)  # The loader's own reference.
        job = self._tiers.load(
            run.chunk.seq.request,
            pages,
            sources,
            arrived=lambda: self._inbox.post(_wake_up),
            ended=lambda job: self._inbox.post(lambda: self._load_ended(run, order, job)),
        )
        return ChunkLoad(order, job, first_block)

    def _load_ended(self, run: BlendRun, order: LoadOrder, job: LoadJob) -> None:
        if run.load is not None and run.load.job is job:
            run.deadline_s = math.inf  # No more blocks will arrive.
        self._batcher.load_ended(order)

    def go_on(self, run: BlendRun) -> BlendOutcome | None:
        """Compute one layer of a pass; return the outcome after the last layer."""
        began_s = self._clock.now()
        try:
            outcome = run.go_on(self._decoder)
        except RuntimeError:  # Torch's. A pass computes a whole prompt: memory may be short.
            self._tiers.cache_errors["blend_failed"] += 1
            _log.exception("a blending pass failed, its prompt is computed exactly")
            self._compute_exactly(run)
            return None
        run.computed_s += self._clock.now() - began_s
        if outcome is None and not run.uses:
            self._compute_exactly(run)
        return outcome

    def finish(self, run: BlendRun, outcome: BlendOutcome) -> None:
        """Turn a blended sequence into a decoding sequence; loaded chunks stay in L1."""
        seq = run.chunk.seq
        seq.blended = run.spared(outcome)
        self._tiers.figures.blended(
            run.expected_s,
            run.computed_s,
            scale=run.scale,
            to_the_end=self._decoder.pages.kv.device.type == "cpu",
        )
        loaded = run.load.first_block if run.load is not None else {}
        for use in {use.name: use for use in run.uses if use.name in loaded}.values():
            owner = shared_owner(seq.request.model, seq.request.tenant)
            run.pages[use.name] = [
                self._batcher.pool.commit(page, use.block(i, seq.block_tokens, owner))
                for i, page in enumerate(run.pages[use.name])
            ]
        self.forget(seq.seq_id)
        self._batcher.blended(seq)

    def _compute_exactly(self, run: BlendRun) -> None:
        self.forget(run.chunk.seq.seq_id)
        self._batcher.compute_exactly(run.chunk.seq)

    def forget(self, seq_id: int) -> None:
        """Drop the lookup, pass and pages of a sequence.

        A loader's own references are dropped when its thread is done.
        """
        self._lookups.pop(seq_id, None)
        run = self._runs.pop(seq_id, None)
        if run is not None and run.load is not None:
            run.load.job.given_up = True  # The rest would only slow other loads.
        for pages in run.pages.values() if run is not None else ():
            self._batcher.pool.release(pages)

    def check_deadlines(self) -> None:
        """Give up expired loads and lookups; continue without the missing chunks."""
        now = self._clock.now()
        for run in [x for x in self._runs.values() if x.load is not None and x.deadline_s < now]:
            self._tiers.cache_errors["load_timeout"] += 1
            run.give_up_load()
            if not run.uses:
                self._compute_exactly(run)
        for seq, chunks, deadline_s in list(self._lookups.values()):
            if deadline_s < now:
                self._tiers.cache_errors["locate_timeout"] += 1
                self._looked_up(seq, chunks, {}, self._credit(seq, chunks))


def _work_of(seq: EngineSequence, uses: Iterable[PromptChunk]) -> BlendWork:
    """Return the work of a sequence's pass that reuses the given chunks."""
    assert seq.blend is not None
    ranges = [(use.start, use.stop) for use in uses]
    return _blend_work(seq.blend, ranges, seq.computed, seq.length)


def _blend_work(
    blend: Blend, ranges: Iterable[tuple[int, int]], start: int, stop: int
) -> BlendWork:
    """Return the work of a pass over ``[start, stop)`` that reuses the given ranges."""
    return BlendWork(
        reused_tokens=sum(
            max(0, min(chunk_stop, stop - 1) - max(chunk_start, start))
            for chunk_start, chunk_stop in ranges
        ),
        min_ratio=blend.recompute_ratio,
        scan_layers=CHECK_LAYER if blend.selector is BlendSelector.HKVD else 0,
        fresh_passes=1 if blend.selector is BlendSelector.QUERY else 0,
    )


def _wake_up() -> None:
    """Do nothing: a message in the inbox is enough to make the loop check its passes."""
