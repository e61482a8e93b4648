"""Lookups and loads under way, the forward pass behind each load, and when to give up waiting.

Used by the engine only, in the engine's thread. The batcher decides which blocks are loaded, the
tiers load the blocks, and the engine computes behind the load layer by layer. A pass stops where
the KV of the next layer has not arrived, and goes on later; meanwhile the pass delays neither the
batch nor a new request nor a cancellation.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field

from tierkv.compute.batching.batch_plan import Chunk, LoadOrder
from tierkv.compute.batching.batcher import Batcher
from tierkv.compute.batching.inbox import Inbox
from tierkv.compute.batching.sequence import Phase, Sequence
from tierkv.compute.model.decoder import Outputs
from tierkv.compute.tiers.finder import Source
from tierkv.compute.tiers.load_decider import Ahead
from tierkv.compute.tiers.load_log import LoadRecord
from tierkv.compute.tiers.loader import LoadJob
from tierkv.compute.tiers.prompt_lookup import PoolPart
from tierkv.compute.tiers.tiers import Tiers
from tierkv.compute.transfers.prefetch import lookup_of, part_wanted
from tierkv.compute.transfers.saves import NOTHING_SAVED, PassSave
from tierkv.costing.blend_controller import BlendDecision
from tierkv.costing.correction import Beside
from tierkv.costing.load_controller import LoadDecision
from tierkv.kvcore.block import Tier
from tierkv.kvcore.clock import Clock
from tierkv.kvcore.layout import KvCodec

LayerSteps = Generator[int, None, Outputs]
"""A forward pass: yields each layer's number before computing the layer, returns the outputs."""


@dataclass(slots=True)
class BehindLoad:
    """A load, the deadline, and the tokens to compute behind the load.

    Attributes:
        order: the blocks to load, and their sequence.
        job: the loader's progress.
        deadline_s: time at which the load counts as failed.
        began_s: time at which the load was ordered.
        expected_s: time at which all blocks are predicted to have arrived.
        tier_bytes: bytes to load from each tier.
        chunk: the tokens computed behind the load; None before the pass begins and after the pass
            was given up.
    """

    order: LoadOrder
    job: LoadJob
    deadline_s: float
    began_s: float = 0.0
    expected_s: float = 0.0
    tier_bytes: Mapping[Tier, int] = field(default_factory=dict)
    chunk: Chunk | None = None
    _saving: PassSave = NOTHING_SAVED
    _steps: LayerSteps | None = None
    _next_layer: int = 0

    @property
    def layers_ready(self) -> int:
        """Number of layers that have arrived."""
        return sum(ready.is_set() for ready in self.job.layer_ready)

    def bytes_left(self, tier: Tier) -> float:
        """Return the bytes from a tier still to arrive."""
        if self.job.ended.is_set() or tier not in self.tier_bytes:
            return 0.0
        return self.tier_bytes[tier] * (1 - self.layers_ready / len(self.job.layer_ready))

    @property
    def whole(self) -> bool:
        """True while every block is good as far as it has arrived."""
        return self.job.good == len(self.job.pages)

    @property
    def can_begin(self) -> bool:
        """True if layer 0 has arrived and no pass has begun."""
        return self.chunk is None and self.job.layer_ready[0].is_set() and self.whole

    @property
    def can_go_on(self) -> bool:
        """True if a pass has begun and the next layer has arrived."""
        return self.chunk is not None and self.job.layer_ready[self._next_layer].is_set()

    def begin(self, chunk: Chunk, steps: LayerSteps, saving: PassSave) -> None:
        """Take over a forward pass that has not started; ``can_begin`` must hold."""
        self.chunk, self._saving = chunk, saving
        self._steps, self._next_layer = steps, next(steps)

    def take_saving(self) -> PassSave:
        """Return the pass's save and forget it; a caller who gives up the pass ends the save."""
        saving, self._saving = self._saving, NOTHING_SAVED
        return saving

    def go_on(self) -> Outputs | None:
        """Compute one layer; return the outputs after the last layer. ``can_go_on`` must hold.

        A short load makes the pass void, because the pass attends to missing blocks.
        """
        assert self._steps is not None
        if not self.whole:
            self.chunk = self._steps = None
            self.take_saving().end()
            return None
        try:
            self._next_layer = next(self._steps)
            self._saving.computed(self._next_layer)
        except StopIteration as end:
            self._saving.computed(len(self.job.layer_ready))
            outputs: Outputs = end.value
            return outputs
        return None


@dataclass(frozen=True, slots=True, eq=False)
class _Lookup:
    """A question to the pool, and the time at which the engine stops waiting for the answer."""

    seq: Sequence
    deadline_s: float


class Loads:
    """Lookups and loads in progress, by sequence.

    Attributes:
        behind: loads under way by sequence; the engine begins and continues passes behind them.
    """

    def __init__(
        self,
        batcher: Batcher,
        tiers: Tiers,
        inbox: Inbox,
        *,
        clock: Clock,
    ) -> None:
        """Make an empty set.

        Args:
            batcher: learns which blocks were found and loaded.
            tiers: looks up and loads in worker threads.
            inbox: carries messages of the worker threads to the engine's thread.
            clock: source of deadlines.
        """
        self.behind: dict[int, BehindLoad] = {}
        self._batcher = batcher
        self._tiers = tiers
        self._inbox = inbox
        self._clock = clock
        self._locating: dict[int, _Lookup] = {}
        self._decided: dict[int, tuple[Sequence, LoadRecord]] = {}

    @property
    def can_go_on(self) -> list[BehindLoad]:
        """Loads with a pass that has begun and can compute the next layer."""
        return [
            load
            for load in self.behind.values()
            # A chunk in isolation may have ended in this step and lost its pages.
            if load.can_go_on and load.order.seq.phase is Phase.LOADING
        ]

    @property
    def can_begin(self) -> list[int]:
        """Sequences with the first layer in place and no pass begun."""
        return [seq_id for seq_id, load in self.behind.items() if load.can_begin]

    def locate(self, seq: Sequence) -> None:
        """Ask the pool for a sequence's next blocks."""
        start = seq.num_pages * seq.block_tokens
        patience_s = self._tiers.decider.lookup_patience_s(start, seq.length)
        lookup = _Lookup(seq, self._clock.now() + patience_s)
        self._locating[seq.seq_id] = lookup
        part = part_wanted(seq, self._batcher.parts.known_tokens(seq, seq.num_pages))
        self._tiers.locate(
            lookup_of(seq, self._tiers.codec_of(seq.request), part=part),
            lambda found, part: self._inbox.post(lambda: self._located(lookup, found, part)),
        )

    def _located(
        self, lookup: _Lookup, found: list[tuple[Source, ...]], part: PoolPart | None
    ) -> None:
        """Turn an answer of the pool into a load, or let the sequence compute."""
        seq = lookup.seq
        if self._locating.get(seq.seq_id) is not lookup:
            return  # Too late: by now the sequence may look for other blocks.
        del self._locating[seq.seq_id]
        if seq.phase is not Phase.LOCATING:
            return
        decision = self._decide(seq, found)
        sources, part_tokens = found[: decision.depth], 0
        if part is not None and self._wants(part, seq, decision.depth, len(found)):
            sources, part_tokens = [*sources, part.copies], part.tokens
        order = self._batcher.located(seq, len(sources), part_tokens)
        if order is None:
            return
        job = self._tiers.load(
            seq.request,
            order.pages,
            sources,
            arrived=lambda: self._inbox.post(_wake_up),
            ended=lambda job: self._inbox.post(lambda: self._load_ended(order, job)),
        )
        now = self._clock.now()
        patience_s = self._tiers.decider.patience_s(decision.compute_s, decision.predicted_s)
        deadline_s = now + patience_s
        expected_s = now + decision.load_s
        tier_bytes = Counter[Tier]()
        for copies in sources:
            tier_bytes[copies[0].tier] += self._tiers.figures.stored_bytes(copies[0])
        self.behind[seq.seq_id] = BehindLoad(
            order,
            job,
            deadline_s,
            began_s=now,
            expected_s=expected_s,
            tier_bytes=tier_bytes,
        )

    def _wants(self, part: PoolPart, seq: Sequence, depth: int, found: int) -> bool:
        """Return whether to load a further block, of which only a part counts."""
        codec = self._tiers.codec_of(seq.request) or KvCodec.NONE
        start = (seq.num_pages + found) * seq.block_tokens
        return depth == found and self._tiers.worth_loading(
            part, codec, start=start, alone=not depth
        )

    def queued_bytes(self, tier: Tier) -> int:
        """Return the bytes from a tier still to arrive, over all loads under way."""
        return int(sum(loading.bytes_left(tier) for loading in self.behind.values()))

    def _decide(self, seq: Sequence, found: list[tuple[Source, ...]]) -> LoadDecision:
        """Choose how many of the found blocks to load, and log the decision."""
        ahead = self.ahead_of(seq)
        decision = self._tiers.decider.decide(
            found,
            self._tiers.codec_of(seq.request) or KvCodec.NONE,
            start=seq.num_pages * seq.block_tokens,
            stop=seq.length,
            ahead=ahead,
        )
        self._tiers.avoided(found[decision.depth :])
        if found:
            kind = decision.kind(len(found))
            self.decided(seq, decision, found=len(found), kind=kind, ahead=ahead)
        return decision

    def ahead_of(self, seq: Sequence) -> Ahead:
        """Estimate the work ahead of a sequence: tokens, and loads if all loaders are busy."""
        now = self._clock.now()
        busy = [x.expected_s - now for x in self.behind.values() if not x.job.ended.is_set()]
        tokens, sequences, after = self._batcher.ahead_of(seq)
        wait_s = self._tiers.decider.load_wait_s(busy)
        others = max(0, self._batcher.active + self._batcher.waiting - 1)
        return Ahead(tokens, sequences, after, wait_s, len(busy), others)

    def decided(
        self,
        seq: Sequence,
        decision: LoadDecision | BlendDecision,
        *,
        found: int,
        kind: str,
        ahead: Ahead,
    ) -> None:
        """Log a decision; the measured time is added when the sequence has ended."""
        record = self._tiers.log.decided(
            seq.request.request_id,
            kind=kind,
            choice=decision.choice,
            found_blocks=found,
            planned_s=decision.predicted_s,
            alternatives=decision.alternatives,
            now=self._clock.now(),
            beside=Beside(ahead.sequences, ahead.after),
        )
        self._decided[seq.seq_id] = (seq, record)

    def _log_end(self, seq_id: int) -> None:
        """Complete the record of a decision; after a preemption no measured time is added."""
        if (decided := self._decided.pop(seq_id, None)) is not None:
            seq, record = decided
            self._tiers.log.ended(record, -1.0 if seq.hits_final else seq.first_token_s)

    def _load_ended(self, order: LoadOrder, job: LoadJob) -> None:
        loading = self.behind.get(order.seq.seq_id)
        if loading is not None and loading.order is order:
            if loading.chunk is not None and loading.whole:
                loading.deadline_s = math.inf  # All has arrived: the pass only has to end.
            else:
                self.settle(loading, job.good)
        self._batcher.load_ended(order)

    def settle(self, loading: BehindLoad, good: int) -> None:
        """Keep the leading good blocks of a load and forget the load."""
        del self.behind[loading.order.seq.seq_id]
        loading.take_saving().end()
        self._batcher.loaded(loading.order, tuple(loading.job.tiers[:good]))

    def forget(self, seq_id: int) -> None:
        """Drop a sequence that ended; the loader's own references go when the loader is done."""
        self._locating.pop(seq_id, None)
        self._log_end(seq_id)
        if (loading := self.behind.pop(seq_id, None)) is not None:
            loading.job.given_up = True
            loading.take_saving().end()

    def check_deadlines(self) -> None:
        """Give up overdue loads and lookups, and compute instead.

        The pages of a load stay referenced until the late loader is done.
        """
        now = self._clock.now()
        for loading in [x for x in self.behind.values() if x.deadline_s < now]:
            self._tiers.cache_errors["load_timeout"] += 1
            self._tiers.figures.gave_up(
                loading.job.sources, now - loading.began_s, layers_ready=loading.layers_ready
            )
            loading.job.given_up = True  # Reading on would only slow other loads down.
            self.settle(loading, 0)
        for lookup in list(self._locating.values()):
            if lookup.deadline_s < now:
                del self._locating[lookup.seq.seq_id]
                self._tiers.cache_errors["locate_timeout"] += 1
                self._batcher.located(lookup.seq, 0)


def _wake_up() -> None:
    """Do nothing. The message in the inbox makes the loop look at its loads."""
