"""The engine loop: plan, forward, sample, deliver; one thread owns batcher, pages and model.

Other threads talk to it through an inbox and hear from it through ``deliver``, called once per
step with everything that happened. What to compute is the batcher's decision, where KV comes from
the tiers'.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from tierkv.compute.batching.answers import Delivery, draw_for, last_event, read_out, refusal
from tierkv.compute.batching.batch_plan import Chunk, Plan
from tierkv.compute.batching.batcher import Batcher
from tierkv.compute.batching.inbox import Inbox
from tierkv.compute.batching.sampler import Sampler
from tierkv.compute.batching.sequence import AnswerForm, Phase, make_sequence
from tierkv.compute.batching.sequence import Sequence as EngineSequence
from tierkv.compute.blend.isolation import Isolation
from tierkv.compute.blend.run import BlendRun
from tierkv.compute.blend.stage import Blends
from tierkv.compute.config import ComputeConfig
from tierkv.compute.engine.drafts import Drafts, verified
from tierkv.compute.engine.load_report import LoadReport
from tierkv.compute.engine.step_calibration import calibrate_steps
from tierkv.compute.l1.page_pool import PagePool
from tierkv.compute.model.batch import ChunkInput, ForwardBatch, RawTarget, build_batch
from tierkv.compute.model.decoder import Decoder, Outputs
from tierkv.compute.tiers.block_puts import SaveDone
from tierkv.compute.tiers.tiers import Tiers
from tierkv.compute.transfers.handoff import Handoffs
from tierkv.compute.transfers.loads import BehindLoad, Loads
from tierkv.compute.transfers.prefetch import Answer, Prefetches
from tierkv.compute.transfers.saves import NOTHING_SAVED, PassSave, Saves
from tierkv.costing.service_time import causal_pairs
from tierkv.dmp.pool_node import PoolNode
from tierkv.kvcore.block_event import BlockEvent
from tierkv.kvcore.clock import Clock
from tierkv.kvcore.errors import TierKVError, TransportError
from tierkv.kvcore.hold import HoldOrder
from tierkv.kvcore.layout import KvCodec
from tierkv.kvcore.node import NodeLoad
from tierkv.kvcore.request import FinishReason, GenerateEvent, GenerateRequest
from tierkv.policies.select import make_policy

_log = logging.getLogger(__name__)
_IDLE_CHECK_S = 0.05
"""How often a loop that waits for a load looks at its deadlines."""


class Engine:
    """Runs requests to their end. All private state belongs to the engine thread.

    Attributes:
        load: how busy it is; replaced as a whole after steps.
        report: what steps measured, for the load figures.
        steps: forward passes so far.
        computed_tokens: tokens whose KV was computed here, ever.
        broken: a bug ended the loop; its story is in the log.
        inbox: how other threads reach the engine thread.
        drafts: tokens guessed ahead, and how many of them were right.
    """

    def __init__(
        self,
        config: ComputeConfig,
        model: Decoder,
        tiers: Callable[[SaveDone], Tiers],
        *,
        eos_token_ids: Sequence[int],
        clock: Clock,
        deliver: Callable[[list[Delivery]], None],
        on_pages: Callable[[list[BlockEvent]], None],
        blend_refusal: str = "",
    ) -> None:
        self.load = NodeLoad()
        self.steps = 0
        self.computed_tokens = 0
        self.broken = False
        self.tiers = tiers(lambda *end: self.inbox.post(lambda: self._saves.published(*end)))
        self.report = LoadReport(self.tiers.figures, config.max_batch_tokens)
        self.pool = _page_pool(config, model, clock)
        self.batcher = Batcher(
            self.pool,
            max_batch_tokens=config.max_batch_tokens,
            max_running=config.max_running,
            known=self.tiers.known,
        )
        self._config = config
        self._model = model
        self._sampler = Sampler()
        self._eos = frozenset(eos_token_ids)
        self._clock = clock
        self._deliver = deliver
        self._on_pages = on_pages
        self.inbox = Inbox()
        self._sequences: dict[int, EngineSequence] = {}
        self._out: list[Delivery] = []
        self._loads = Loads(self.batcher, self.tiers, self.inbox, clock=clock)
        self._handoffs = Handoffs(
            clock=clock,
            timeout_s=config.load_timeout_s,
            deliver=self._out_later,
            cache_errors=self.tiers.cache_errors,
        )
        self.isolation = Isolation(
            self.batcher,
            block_tokens=config.block_tokens,
            clear=model.pages.clear,
            must_wait=lambda: self.tiers.publisher.is_behind,
        )
        self._blends = Blends(
            self.batcher,
            self.tiers,
            self._loads,
            self.inbox,
            model,
            self.isolation,
            refusal=blend_refusal,
            clock=clock,
            timeout_s=config.load_timeout_s,
            prefill_rate=lambda: self.report.prefill_rate.value,
        )
        self._saves = Saves(self.batcher, self.tiers, self._handoffs, clock, enabled=config.publish)
        self._prefetches = Prefetches(self.batcher, self.tiers, self.inbox, config)
        self.drafts = Drafts(
            config.guesses_on(model.pages.kv.device.type, str(model.pages.layout.dtype)),
            max_batch_tokens=config.max_batch_tokens,
        )
        self._running = True
        self._thread = threading.Thread(target=self._run, name="tierkv-engine", daemon=True)

    def start(self) -> None:
        """Measure what steps cost, for a moment; then start the engine's and the tiers' threads."""
        calibrate_steps(self.tiers.figures, self._model, self.pool, self._config, self._clock)
        self.tiers.start()
        self._thread.start()

    def stop(self) -> None:
        """End every request as cancelled, publish what is queued, join all threads."""
        self.inbox.post(self._shut_down)
        self._thread.join()
        self.tiers.stop()

    def submit(self, seq_id: int, request: GenerateRequest, form: AnswerForm | None = None) -> None:
        """Queue a checked request; its events come through ``deliver``.

        ``form`` holds its answer to something, and is the engine's from now on.
        """
        arrival_s = self._clock.now()
        self.inbox.post(
            lambda: self._submit(seq_id, request, arrival_s, form),
            refused=lambda: self._deliver([Delivery(seq_id, TransportError("the engine stopped"))]),
        )

    def prefetch(self, request: GenerateRequest, answer: Answer) -> None:
        """Load known blocks of a checked request; ``answer`` comes once, in the engine thread."""
        self.inbox.post(lambda: self._prefetches.begin(request, answer), refused=lambda: answer(0))

    def hold(self, order: HoldOrder) -> None:
        """Keep pages from eviction for a lease, or let go of them."""
        self.inbox.post(lambda: self.pool.hold(order))

    def cancel(self, seq_id: int) -> None:
        """End a request within a step; it answers with CANCELLED unless it ended before."""
        self.inbox.post(lambda: self._cancel(seq_id))

    def set_pool_nodes(self, nodes: Sequence[PoolNode]) -> None:
        """Replace the pool nodes; what they could not take before is saved again."""
        self.tiers.finder.set_nodes(nodes)
        self.inbox.post(self._saves.pool_changed)

    def _run(self) -> None:
        busy = False
        with torch.inference_mode():
            while self._running:
                try:
                    idle = self.isolation.idle.is_set() and not self._unfinished
                    timeout_s = None if idle else _IDLE_CHECK_S
                    self.inbox.run_pending(wait=not busy, timeout_s=timeout_s)
                    self._loads.check_deadlines()
                    self._blends.check_deadlines()
                    self._handoffs.check_deadlines()
                    busy = self._step()
                except Exception as error:  # noqa: BLE001 - our bug: nobody may wait forever.
                    _log.critical("the engine stopped", exc_info=True)
                    self._break_down(error)
                self._flush_out()
            self._prefetches.give_up()
        self.inbox.close()
        self.isolation.stop()
        _log.info("the engine stopped: %s", self.drafts.stats)

    @property
    def _unfinished(self) -> set[int]:
        """Sequences whose last event was not delivered."""
        return {*self._sequences, *self._handoffs.seq_ids}

    def _break_down(self, error: Exception) -> None:
        """End everything after a broken invariant; the node refuses requests from now on."""
        self._running = False
        self.broken = True
        for seq_id in self._unfinished:
            self._out.append(Delivery(seq_id, TierKVError(f"the engine stopped: {error}")))

    def _submit(
        self, seq_id: int, request: GenerateRequest, arrival_s: float, form: AnswerForm | None
    ) -> None:
        seq = make_sequence(
            seq_id, request, arrival_s=arrival_s, block_tokens=self._config.block_tokens, form=form
        )
        self._sequences[seq_id] = seq
        complete = form is not None and form.complete
        if complete or (seq.length >= seq.max_length and not request.reads_out):
            seq.phase = Phase.ENDED
            self._finish(seq, (), FinishReason.STOP if complete else FinishReason.LENGTH)
            return
        if request.handoff:
            self._handoffs.begin(seq)
        self._blends.consider(seq)
        self.batcher.add(seq)

    def drop_unused(self) -> int:
        """Forget pages nobody uses, and say so before anybody counts on it; as ``hand_out``."""
        dropped = self.pool.drop_unused()
        self.hand_out()
        return dropped

    def _cancel(self, seq_id: int) -> None:
        handed_over = self._handoffs.forget(seq_id)
        seq = self._sequences.get(seq_id) or handed_over
        if seq is not None:
            self._finish(seq, (), FinishReason.CANCELLED)

    def _shut_down(self) -> None:
        self._running = False
        for seq_id in self._unfinished:
            self._cancel(seq_id)

    def _step(self) -> bool:
        """Do one step; False when there was nothing to compute."""
        going_on = bool(self._loads.can_go_on)
        self._compute_in_background()
        rate = self.report.prefill_rate.value
        lookups = [
            miss.seq for miss in self.batcher.admit() if self.tiers.wants_locate(miss.tokens, rate)
        ]
        plan = self._plan([] if going_on else self._loads.can_begin, lookups)
        for seq in lookups:
            self._loads.locate(seq)
        for seq in plan.chunk_lookups:
            self._blends.look_up(seq)
        chunks = self.drafts.add_to(plan.chunks)
        if chunks:
            with self._failing(chunks):
                if plan.fresh_pages:
                    self._model.pages.clear(plan.fresh_pages)
                if chunks[0].loading:
                    self._begin_behind_load(chunks[0])
                else:
                    self._compute(chunks)
        for loading in self._loads.can_go_on:
            assert loading.chunk is not None
            with self._failing([loading.chunk]):
                self._go_on_behind_load(loading)
        blending = self._blends.ready
        if blending is not None:
            with self._failing([blending.chunk]):
                self._blend(blending, sum(chunk.rows for chunk in chunks))
        self.hand_out()
        found = lookups or plan.chunk_lookups  # Some of them can be computed at once.
        return bool(going_on or blending is not None or chunks or found)

    def _plan(self, ready_loads: Sequence[int], lookups: Sequence[EngineSequence]) -> Plan:
        """Plan the step; sequences that must lose their pages first are saved and sent back."""
        while True:
            plan = self.batcher.plan(self._clock.now(), ready_loads, lookups=lookups)
            for copy in plan.copies:
                self._model.pages.copy_part(copy.source, copy.target, copy.tokens)
            if plan.demoted is None:
                return plan
            self._saves.demote(plan.demoted)
            self.batcher.preempt(plan.demoted)

    def _compute_in_background(self) -> None:
        """Have the batcher compute chunks nobody waits for, one after the other."""
        current = self.isolation.current
        if current is not None and current.phase is Phase.ENDED:
            self.isolation.put_back()  # Others needed its pages.
            self._drop(current)
        current = self.isolation.begin_next()
        if current is not None:
            self._sequences[current.seq_id] = current

    def _blend(self, run: BlendRun, used_tokens: int) -> None:
        """Compute as many layers of a blending pass as the step's token budget has left."""
        left = (self._config.max_batch_tokens - used_tokens) * self._model.arch.layers
        for _ in range(max(1, left // run.chunk.count)):
            outcome = self._blends.go_on(run)
            if outcome is not None:
                tokens = self._sample([run.chunk], outcome.outputs)
                self._blends.finish(run, outcome)
                self.computed_tokens -= outcome.reused_tokens - outcome.recomputed_tokens
                self._advance(run.chunk, verified((), tokens), NOTHING_SAVED)
                return
            if self._blends.ready is not run or self.inbox.waiting:
                return

    @contextmanager
    def _failing(self, chunks: Sequence[Chunk]) -> Iterator[None]:
        """End the chunks' requests if computing them raises; the node lives on."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - whatever a kernel raises is these requests' end.
            _log.exception("a step failed")
            for chunk in chunks:
                if chunk.seq.seq_id in self._sequences:
                    self._fail(chunk.seq, TierKVError(f"internal error while computing: {error}"))

    def _batch(self, chunks: Sequence[Chunk]) -> ForwardBatch:
        inputs = [_chunk_input(chunk) for chunk in chunks]
        return build_batch(
            inputs,
            block_tokens=self._config.block_tokens,
            device=self._model.pages.kv.device,
        )

    def _compute(self, chunks: Sequence[Chunk]) -> None:
        began = self._clock.now()
        batch = self._batch(chunks)
        saving = self._saves.begin(chunks)
        try:
            outputs = self._forward(batch, saving)
            rows = self._sample([chunks[i] for i in batch.logit_chunks], outputs)
            chosen: list[list[int | None]] = [[] for _ in chunks]
            for i, token in zip(batch.logit_chunks, rows, strict=True):
                chosen[i].append(token)
            follow = [self.drafts.checked(*pair) for pair in zip(chunks, chosen, strict=True)]
            self._measure(chunks, sum(map(len, follow)), self._clock.now() - began)
            for chunk, tokens in zip(chunks, follow, strict=True):
                self._advance(chunk, tokens, saving)
        finally:
            saving.end()

    def _forward(self, batch: ForwardBatch, saving: PassSave) -> Outputs:
        if not saving.follows:
            return self._model.compute(batch)
        steps = self._model.layer_steps(batch)
        while True:
            try:
                saving.computed(next(steps))
            except StopIteration as end:
                saving.computed(self._model.arch.layers)
                outputs: Outputs = end.value
                return outputs

    def _sample(self, chunks: Sequence[Chunk], outputs: Outputs) -> list[int | None]:
        """Choose a token per row, and read out what was asked about a prompt."""
        self.steps += 1
        for row, seq in enumerate(chunk.seq for chunk in chunks):
            if seq.request.reads_out:
                hidden, logits = outputs.hidden[row], outputs.logits[row]
                seq.readout = read_out(seq.request, hidden=hidden, logits=logits)
        return self._sampler.sample(outputs.logits, [draw_for(chunk.seq) for chunk in chunks])

    def _begin_behind_load(self, chunk: Chunk) -> None:
        steps = self._model.layer_steps(self._batch([chunk]))
        self._loads.behind[chunk.seq.seq_id].begin(chunk, steps, self._saves.begin([chunk]))

    def _go_on_behind_load(self, loading: BehindLoad) -> None:
        """Compute the layers that have arrived: like any step, at most one pass over the model.

        Messages wait for it as they wait for a step. To stop after each layer for them made the
        first call of a batch the last to answer, one layer beside each step of the others.
        """
        while (chunk := loading.chunk) is not None and loading.can_go_on:
            outputs = loading.go_on()
            if outputs is not None:
                self._end_behind_load(loading, chunk, outputs)
                return

    def _end_behind_load(self, loading: BehindLoad, chunk: Chunk, outputs: Outputs) -> None:
        good, saving = loading.job.good, loading.take_saving()
        try:
            self._loads.settle(loading, good)
            if good == len(loading.order.pages):  # Else the same tokens are planned again.
                tokens = self._sample([chunk] if chunk.samples else [], outputs)
                self._advance(chunk, verified((), tokens), saving)
        finally:
            saving.end()

    def _advance(self, chunk: Chunk, tokens: tuple[int, ...], saving: PassSave) -> None:
        """Apply a computed chunk: publish full blocks, emit what follows, end the sequence."""
        seq = chunk.seq
        if chunk.samples and (error := refusal(seq, finite=bool(tokens))) is not None:
            self._fail(seq, error)
            return
        reads_out = chunk.samples and seq.request.reads_out
        outcome = self.batcher.computed(chunk, () if reads_out else tokens, self._stops(seq))
        if chunk.samples and (error := refusal(seq, finite=True)) is not None:
            self._fail(seq, error)  # What was chosen does not fit its form after all.
            return
        self.computed_tokens += seq.computed - chunk.start
        if not saving.keep(seq, outcome):
            self._saves.save(seq, outcome.full_blocks)
        if seq.is_background and seq.computed == seq.length:
            self._saves.save(seq, self.isolation.computed())
            self._drop(seq)
            return
        if tokens and seq.first_token_s < 0:
            seq.first_token_s = self._clock.now()
        new_tokens = outcome.new_tokens
        if new_tokens and outcome.finish in (None, FinishReason.HANDOFF):
            event = GenerateEvent(new_tokens, node_id=self._config.node_id)
            self._out.append(Delivery(seq.seq_id, event))
            new_tokens = ()  # A handoff's last event waits for the pool, its token does not.
        if reads_out:
            self._finish(seq, (), FinishReason.STOP)
        elif outcome.finish is not None:
            self._finish(seq, new_tokens, outcome.finish)

    def _stops(self, seq: EngineSequence) -> frozenset[int]:
        """Return the tokens that end an answer; one held to a form ends where that allows it."""
        sampling = seq.request.sampling
        stops = frozenset(sampling.stop_token_ids)
        return stops if sampling.ignore_eos and seq.form is None else stops | self._eos

    def _finish(
        self, seq: EngineSequence, new_tokens: tuple[int, ...], reason: FinishReason
    ) -> None:
        """End a sequence with its last event; a handoff's waits for its blocks."""
        event = last_event(
            seq,
            new_tokens,
            reason,
            node_id=self._config.node_id,
            now=self._clock.now(),
            codec=self.tiers.codec_of(seq.request) or KvCodec.NONE,
        )
        self._drop(seq)
        if reason is FinishReason.HANDOFF and self._handoffs.finish(seq.seq_id, event):
            return
        self._handoffs.forget(seq.seq_id)
        self._out.append(Delivery(seq.seq_id, event))

    def _fail(self, seq: EngineSequence, error: TierKVError) -> None:
        self._drop(seq)
        self._handoffs.forget(seq.seq_id)
        self._out.append(Delivery(seq.seq_id, error))

    def _drop(self, seq: EngineSequence) -> None:
        self._sequences.pop(seq.seq_id, None)
        self._loads.forget(seq.seq_id)
        self._blends.forget(seq.seq_id)
        self.drafts.forget(seq.seq_id)
        counts = seq.request.use_cache and not seq.is_background
        if counts and seq.started_s >= 0 and seq.phase is not Phase.ENDED:
            prompt = seq.prompt_length - seq.request.resumed_tokens
            self.tiers.count_prompt(prompt, seq.hit_tokens())
        self.batcher.end(seq)
        self.isolation.ended(seq)

    def _measure(self, chunks: Sequence[Chunk], new_tokens: int, seconds: float) -> None:
        """Learn rates from steps that were clearly prefill or purely decode."""
        tokens = sum(chunk.count for chunk in chunks)
        if tokens == len(chunks):
            self.report.decoded(new_tokens / len(chunks), seconds)
        elif tokens >= 4 * len(chunks):
            pairs = sum(causal_pairs(chunk.start, chunk.count) for chunk in chunks)
            self.report.prefilled(tokens, pairs, seconds, len(chunks))

    def hand_out(self) -> None:
        """Hand out page events and replace the published load figures; the engine's thread only."""
        if events := self.pool.drain_events():
            self._on_pages(events)
        self.load = self.report.node_load(
            self.batcher, self.pool, self._loads, self._sequences.values()
        )

    def _out_later(self, delivery: Delivery) -> None:
        self._out.append(delivery)

    def _flush_out(self) -> None:
        if self._out:
            out, self._out = self._out, []
            self._deliver(out)


def _page_pool(config: ComputeConfig, model: Decoder, clock: Clock) -> PagePool:
    pages = model.pages.num_pages
    policy = make_policy(config.eviction_policy, pages - 1)
    return PagePool(pages, policy, now=clock.now)


def _chunk_input(chunk: Chunk) -> ChunkInput:
    """Describe a chunk for the model; one in isolation leaves its KV a second time."""
    seq = chunk.seq
    token_ids = seq.tokens[chunk.start : chunk.start + chunk.count]
    if chunk.draft:
        token_ids = np.append(token_ids, chunk.draft)
    raw = RawTarget(seq.raw_start, seq.raw_pages) if seq.is_background else None
    wanted = chunk.samples + len(chunk.draft)
    return ChunkInput(token_ids, chunk.start, seq.page_table, wanted, raw)
