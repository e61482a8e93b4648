"""The engine loop: plan, forward, sample, deliver; one thread owns batcher, pages and model.

Client threads send messages through an inbox and get answers through ``deliver``, called once per
step with all events of the step. The batcher chooses tokens to compute and the tiers find KV; the
loop carries out both kinds of decisions.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Sequence

import torch

from tierkv.compute.batching.answers import Delivery
from tierkv.compute.batching.batch_plan import Plan
from tierkv.compute.batching.sequence import AnswerForm
from tierkv.compute.batching.sequence import Sequence as EngineSequence
from tierkv.compute.engine.passes import ForwardPasses
from tierkv.compute.engine.requests import LiveRequests
from tierkv.compute.engine.step_costs import calibrate_steps
from tierkv.compute.engine.wiring import EngineParts
from tierkv.compute.l1.page_pool import FullBlock
from tierkv.compute.tiers.block_puts import PublishJob
from tierkv.compute.transfers.prefetch import Answer
from tierkv.dmp.pool_node import PoolNode
from tierkv.kvcore.block_event import BlockEvent, HoldOrder
from tierkv.kvcore.errors import TierKVError, TransportError
from tierkv.kvcore.ids import BlockKey
from tierkv.kvcore.node import NodeLoad
from tierkv.kvcore.request import GenerateRequest

_log = logging.getLogger(__name__)
_IDLE_CHECK_S = 0.05
"""Interval at which a loop without work checks its deadlines."""


class Engine:
    """Runs requests to their end. All private state belongs to the engine thread.

    Attributes:
        load: load of the node; replaced as a whole after steps.
        broken: a bug ended the loop; the story is in the log.
        inbox: carries messages to the engine thread.
        tiers: the memory below L1.
        batcher: decides what is computed.
        pool: the pages of L1.
        isolation: chunks computed for later requests.
        drafts: tokens guessed ahead, and the number of right guesses.
    """

    def __init__(
        self,
        parts: EngineParts,
        *,
        eos_token_ids: Collection[int],
        deliver: Callable[[list[Delivery]], None],
        on_pages: Callable[[list[BlockEvent]], None],
    ) -> None:
        self.load = NodeLoad()
        self.broken = False
        self.inbox = parts.inbox
        self.tiers = parts.tiers
        self.batcher = parts.batcher
        self.pool = parts.batcher.pool
        self.isolation = parts.isolation
        self.drafts = parts.drafts
        self._config = parts.config
        self._clock = parts.clock
        self._model = parts.model
        self._report = parts.report
        self._loads = parts.loads
        self._saves = parts.saves
        self._handoffs = parts.handoffs
        self._prefetches = parts.prefetches
        self._blends = parts.blends
        self._requests = LiveRequests(parts, eos_token_ids=eos_token_ids)
        self._passes = ForwardPasses(parts, self._requests)
        self._deliver = deliver
        self._on_pages = on_pages
        self._running = True
        self._thread = threading.Thread(target=self._run, name="tierkv-engine", daemon=True)

    def start(self) -> None:
        """Measure what steps cost, for a moment; then start the engine's and the tiers' threads."""
        calibrate_steps(self.tiers.figures, self._model, self.pool, self._config, self._clock)
        self.tiers.publisher.start(self.saved)
        self._thread.start()

    def stop(self) -> None:
        """End every request as cancelled, publish queued blocks, join all threads."""
        self.inbox.post(self._shut_down)
        self._thread.join()
        self.tiers.stop()

    def submit(self, seq_id: int, request: GenerateRequest, form: AnswerForm | None = None) -> None:
        """Queue a checked request; the events of the request come through ``deliver``.

        Args:
            seq_id: number of the request in order of arrival.
            request: the request.
            form: holds the answer to a form; owned by the engine from now on.
        """
        arrival_s = self._clock.now()
        self.inbox.post(
            lambda: self._requests.begin(seq_id, request, arrival_s, form),
            refused=lambda: self._deliver([Delivery(seq_id, TransportError("the engine stopped"))]),
        )

    def prefetch(self, request: GenerateRequest, answer: Answer) -> None:
        """Load known blocks of a checked request; ``answer`` comes once, in the engine thread."""
        self.inbox.post(lambda: self._prefetches.begin(request, answer), refused=lambda: answer(0))

    def hold(self, order: HoldOrder) -> None:
        """Keep pages from eviction for a lease, or end the lease."""
        self.inbox.post(lambda: self.pool.hold(order))

    def cancel(self, seq_id: int) -> None:
        """End a request within a step as CANCELLED; ignored if the request has ended."""
        self.inbox.post(lambda: self._requests.cancel(seq_id))

    def set_pool_nodes(self, nodes: Sequence[PoolNode]) -> None:
        """Replace the pool nodes; blocks refused by the former nodes are saved again."""
        self.tiers.finder.set_nodes(nodes)
        self.inbox.post(self._saves.pool_changed)

    def saved(self, job: PublishJob, lost: Sequence[FullBlock]) -> None:
        """Record the end of a save; called by the publisher's thread."""
        self.inbox.post(lambda: self._saves.published(job, lost))

    def drop_unused(self) -> int:
        """Forget unused pages and report the loss at once; the engine's thread only."""
        dropped = self.pool.drop_unused()
        self.hand_out()
        return dropped

    def blocks_after(self, scope: bytes) -> list[tuple[bytes, BlockKey]]:
        """Return tokens and keys of the pages behind a scope; the engine's thread only."""
        found = self.pool.parts.following(scope)
        named = ((tokens, self.pool.key_of(page)) for tokens, page in found)
        return [(tokens, key) for tokens, key in named if key is not None]

    def erase(self, keys: Sequence[BlockKey]) -> int:
        """Erase pages and report the loss at once; the engine's thread only."""
        pages = self.pool.erase(keys)
        self.hand_out()
        return pages

    def hand_out(self) -> None:
        """Report page events and replace the published load; the engine's thread only."""
        if events := self.pool.drain_events():
            self._on_pages(events)
        self.load = self._report.node_load(
            self.batcher, self.pool, self._loads, self._requests.sequences.values()
        )

    @property
    def steps(self) -> int:
        """Forward passes so far that chose tokens."""
        return self._passes.steps

    @property
    def computed_tokens(self) -> int:
        """Tokens whose KV was computed here, ever."""
        return self._requests.computed_tokens

    def _run(self) -> None:
        """Messages, deadlines, one step, deliveries; until ``stop``."""
        busy = False
        with torch.inference_mode():
            while self._running:
                try:
                    self._take_messages(wait=not busy)
                    self._check_deadlines()
                    busy = self._step()
                except Exception as error:  # noqa: BLE001 - our bug: no caller may wait forever.
                    _log.critical("the engine stopped", exc_info=True)
                    self._running, self.broken = False, True
                    self._requests.fail_all(TierKVError(f"the engine stopped: {error}"))
                self._flush_out()
            self._prefetches.give_up()
        self.inbox.close()
        self.isolation.stop()
        _log.info("the engine stopped: %s", self.drafts.stats)

    def _take_messages(self, *, wait: bool) -> None:
        """Run the messages of other threads; without work to do, wait for a message."""
        idle = self.isolation.idle.is_set() and not self._requests.unfinished
        self.inbox.run_pending(wait=wait, timeout_s=None if idle else _IDLE_CHECK_S)

    def _check_deadlines(self) -> None:
        self._loads.check_deadlines()
        self._blends.check_deadlines()
        self._handoffs.check_deadlines()

    def _step(self) -> bool:
        """Plan a step and carry it out; return False when there was nothing to do."""
        going_on = bool(self._loads.can_go_on)
        self._requests.begin_background()
        lookups = self._admit()
        plan = self._plan([] if going_on else self._loads.can_begin, lookups)
        for seq in lookups:
            self._loads.locate(seq)
        for seq in plan.chunk_lookups:
            self._blends.look_up(seq)
        chunks = self.drafts.add_to(plan.chunks)
        if chunks:
            with self._requests.failing(chunks):
                self._passes.run(chunks, plan.fresh_pages)
        for loading in self._loads.can_go_on:
            assert loading.chunk is not None
            with self._requests.failing([loading.chunk]):
                self._passes.go_on_behind(loading)
        blending = self._blends.ready
        if blending is not None:
            with self._requests.failing([blending.chunk]):
                self._passes.blend(blending, sum(chunk.rows for chunk in chunks))
        self.hand_out()
        found = lookups or plan.chunk_lookups  # Some of these can be computed at once.
        return bool(going_on or blending is not None or chunks or found)

    def _admit(self) -> list[EngineSequence]:
        """Let sequences into the batch; return those whose blocks are worth a lookup."""
        rate = self._report.prefill_rate.value
        return [
            miss.seq
            for miss in self.batcher.admit()
            if self.tiers.wants_locate(miss.tokens, rate)
            and self.tiers.codec_of(miss.seq.request) is not None
        ]

    def _plan(self, ready_loads: Sequence[int], lookups: Sequence[EngineSequence]) -> Plan:
        """Plan the step; each victim is saved first, then sent back to the queue."""
        while True:
            plan = self.batcher.plan(self._clock.now(), ready_loads, lookups=lookups)
            self._passes.copy_parts(plan.copies)
            if plan.victim is None:
                return plan
            self._saves.save_before_loss(plan.victim)
            self.batcher.preempt(plan.victim)

    def _flush_out(self) -> None:
        if deliveries := self._requests.take_deliveries():
            self._deliver(deliveries)

    def _shut_down(self) -> None:
        self._running = False
        for seq_id in self._requests.unfinished:
            self._requests.cancel(seq_id)
