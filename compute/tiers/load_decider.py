"""Applies the load policy and the figures of this node to one prompt, and probes avoided paths.

Runs in the tiers' worker threads. Translates the engine's words (sources, tokens ahead) to the
controller's (runs, lines, costs). With policy ``auto`` the plan wins that costs this prompt and all
others the least; ``always`` and ``never`` only predict. A probe reads a little from an avoided
path, and thereby notices when the path is fast again; its bytes are thrown away, and both bytes and
predicted time are bounded (compute/tiers/load_figures.py).

A chain stored at two levels (codec ``adaptive``) is first merged to one: LevelPicker finds both
levels and picks one per block. Leading blocks are loaded fine first, because every later token
attends to them. The result is an ordinary chain: each frame names its level, and a load may mix
levels. Source: CacheGen, arXiv 2310.07240, there per chunk of 1,500 tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from tierkv.compute.config import ComputeConfig, LoadPolicy
from tierkv.compute.tiers.finder import Absorb, BlockFinder, Source
from tierkv.compute.tiers.load_figures import LoadFigures
from tierkv.costing.blend_controller import BlendDecision, BlendWork, choose_ratio
from tierkv.costing.load_controller import (
    BlockSizes,
    LoadDecision,
    Prompt,
    Run,
    beside_s,
    choose,
    choose_depth,
    choose_levels,
)
from tierkv.costing.service_time import StepCost, causal_pairs
from tierkv.dmp.pool_node import RangeRead
from tierkv.kvcore.block import Location, Tier, coarse_key
from tierkv.kvcore.clock import Clock
from tierkv.kvcore.ids import BlockKey
from tierkv.kvcore.layout import BlockLayout, KvCodec


def probe(
    sources: Sequence[tuple[Source, ...]], figures: LoadFigures, *, absorb: Absorb, clock: Clock
) -> None:
    """Measure the way to the first of these blocks: one small read and one that is not."""
    first = sources[0][0]
    if first.location is None:
        _promote(first, figures, absorb, clock)
        return
    alike = takewhile(lambda copies: _is_like(copies[0], first), sources)
    places = [at for copies in alike if (at := copies[0].location) is not None]
    count = figures.probe_blocks(sources[: len(places)])
    for some in (places[:1], places[:count]):
        _read(first, some, figures, absorb, clock)


def _is_like(source: Source, first: Source) -> bool:
    return source.node is first.node and source.tier is first.tier and source.location is not None


def _promote(source: Source, figures: LoadFigures, absorb: Absorb, clock: Clock) -> None:
    """Have one block brought into memory, where the next request finds it, too."""
    assert source.key is not None, "a resting copy names its block"
    began = clock.now()
    found: Sequence[Location | None] = ()
    with absorb():
        found = source.node.promote([source.key])
    size = sum(at.length for at in found if at is not None)
    figures.probed(source, size, clock.now() - began)


def _read(
    source: Source, places: list[Location], figures: LoadFigures, absorb: Absorb, clock: Clock
) -> None:
    """Read a layer of a few blocks into unused memory."""
    sizes = [figures.layer_bytes(at) for at in places]
    buffer = memoryview(bytearray(sum(sizes)))
    reads, at = [], 0
    for place, size in zip(places, sizes, strict=True):
        reads.append(RangeRead(place, 0, buffer[at : at + size]))
        at += size
    began = clock.now()
    with absorb():
        source.node.read_ranges(reads)
    figures.probed(source, at, clock.now() - began)


_LEAST_PATIENCE_S = 0.5
"""A busy machine may be late by so much; giving up for less would lose loads that are fine."""

_OF_COMPUTING, _OF_PREDICTED = 0.5, 1.5
"""A load is given up when it takes so many times what computing or loading was to take."""
_UNKNOWN = StepCost(0.0)


@dataclass(frozen=True, slots=True)
class Ahead:
    """What stands before a prompt on its node, and beside it.

    Attributes:
        tokens: tokens that are computed before its own.
        sequences: of so many prompts.
        after: prompts that come after it, but soon enough to share its forward pass.
        load_s: seconds until a loader is free for it.
        loads: loads under way.
        others: other prompts at the node, in any state.
    """

    tokens: int = 0
    sequences: int = 0
    after: int = 0
    load_s: float = 0.0
    loads: int = 0
    others: int = 0


class LoadDecider:
    """Decides what of a prompt is loaded; stateless but for the figures."""

    def __init__(self, config: ComputeConfig, layout: BlockLayout, figures: LoadFigures) -> None:
        self._policy = config.load_policy
        self._timeout_s = config.load_timeout_s
        self._step_tokens = config.max_batch_tokens
        self._threads = config.load_threads
        self._layout = layout
        self._figures = figures

    def decide(
        self,
        sources: Sequence[tuple[Source, ...]],
        codec: KvCodec,
        *,
        start: int,
        stop: int,
        ahead: Ahead = Ahead(),
    ) -> LoadDecision:
        """Choose how many of the blocks behind ``start`` to load for a prompt up to ``stop``."""
        prompt = self._prompt(start, stop, ahead)
        decision = self._chosen(prompt, sources, codec)
        shared_s = beside_s(prompt, decision.depth)
        return replace(decision, predicted_s=decision.predicted_s + shared_s)

    def _chosen(
        self, prompt: Prompt, sources: Sequence[tuple[Source, ...]], codec: KvCodec
    ) -> LoadDecision:
        runs, level = self._figures.runs(sources), self._figures.level(codec, sources)
        if not sources or self._policy is LoadPolicy.NEVER:
            return choose(prompt, [], [])
        if self._policy is LoadPolicy.ALWAYS or prompt.cost is _UNKNOWN:
            return choose_depth(prompt, runs, level, len(sources))
        return choose(prompt, runs, [level])

    def decide_blend(
        self,
        sources: Sequence[tuple[Source, ...]],
        codec: KvCodec,
        work: BlendWork,
        *,
        start: int,
        stop: int,
        ahead: Ahead = Ahead(),
    ) -> BlendDecision:
        """Choose whether to blend, and how much of the reused tokens to compute again.

        Args:
            sources: chunk blocks that must be loaded; empty when all are in L1.
            codec: how they are stored.
            work: what blending would compute.
            start: leading tokens with exact KV.
            stop: tokens of the prompt.
            ahead: what stands before it.
        """
        prompt = self._prompt(start, stop, ahead)
        runs, level = self._figures.runs(sources), self._figures.level(codec, sources)
        slower = self._figures.blend_slower.value
        decision = choose_ratio(prompt, work, runs, level, slower=slower)
        if self._policy is LoadPolicy.NEVER and sources:
            return replace(decision, recompute_ratio=None, predicted_s=decision.compute_s)
        if self._policy is LoadPolicy.AUTO and prompt.cost is not _UNKNOWN:
            if decision.recompute_ratio is None and self._figures.blend_refused():
                return choose_ratio(prompt, work, runs, level, slower=1.0)
            return decision
        return replace(decision, recompute_ratio=work.min_ratio, pass_s=0.0)

    def chunk_credit(self, work: BlendWork, *, start: int, stop: int, ahead: Ahead) -> float:
        """Return the part of its chunks' cost that a prompt would save with all chunks in L1.

        Args:
            work: a blended pass with all chunks.
            start: leading tokens with exact KV.
            stop: tokens of the prompt.
            ahead: work computed before and next to the prompt.

        Returns:
            0.0 if a pass is not worth its time; 1.0 without a measured cost, or if the policy does
            not weigh costs.
        """
        cost = self._figures.steps.cost
        if self._policy is not LoadPolicy.AUTO or cost is None:
            return 1.0
        prompt = self._prompt(start, stop, ahead)
        level = self._figures.level(KvCodec.NONE, [])
        slower = self._figures.blend_slower.value
        decision = choose_ratio(prompt, work, [], level, slower=slower)
        chunks_s = cost.causal_seconds(0, work.reused_tokens, steps=0.0)
        if decision.recompute_ratio is None or chunks_s <= 0.0:
            return 0.0
        return min(1.0, max(0.0, decision.compute_s - decision.predicted_s) / chunks_s)

    def worth_saving(self, tier: Tier, codec: KvCodec, *, tokens: int, context_tokens: int) -> bool:
        """Whether loading one more block from a tier is faster than computing its tokens again.

        Args:
            tier: where it would be saved.
            codec: how.
            tokens: tokens in the block.
            context_tokens: tokens up to its end.
        """
        if self._policy is not LoadPolicy.AUTO or self._figures.steps.cost is None:
            return self._policy is not LoadPolicy.NEVER
        return self.spared_s(tier, codec, tokens=tokens, context_tokens=context_tokens) > 0.0

    def spared_s(self, tier: Tier, codec: KvCodec, *, tokens: int, context_tokens: int) -> float:
        """Return the seconds that loading a block takes less than computing it; 0.0: none."""
        cost = self._figures.steps.cost
        if self._policy is LoadPolicy.NEVER or cost is None:
            return 0.0
        level = self._figures.level(codec, [])
        load = Run(tier, 1, self._figures.line(tier)).seconds(
            level.layer_bytes * self._layout.layers, level
        )
        start = context_tokens - tokens
        return max(0.0, cost.spared_s(load.total_s, start=start, tokens=tokens))

    def lookup_patience_s(self, start: int, stop: int) -> float:
        """Return how long a lookup may take that may spare computing ``[start, stop)``."""
        cost = self._figures.steps.cost or _UNKNOWN
        return self.patience_s(cost.seconds(stop - start, causal_pairs(start, stop - start)))

    def patience_s(self, compute_s: float, predicted_s: float = 0.0) -> float:
        """Return how long a load may take whose tokens could be computed in ``compute_s``.

        Half as long as computing, or half as long again as was predicted, where that is more: so a
        path that got slow costs a bounded share of computing, once, and is remembered.
        """
        if self._policy is not LoadPolicy.AUTO or not compute_s:
            return self._timeout_s
        wait_s = max(_OF_COMPUTING * compute_s, _OF_PREDICTED * predicted_s)
        return min(self._timeout_s, max(_LEAST_PATIENCE_S, wait_s))

    def load_wait_s(self, busy_s: Sequence[float]) -> float:
        """Return when a loader is free if loads under way end in ``busy_s`` seconds each."""
        waiting = len(busy_s) - self._threads
        return max(0.0, sorted(busy_s)[waiting]) if waiting >= 0 else 0.0

    def _prompt(self, start: int, stop: int, ahead: Ahead) -> Prompt:
        cost = self._figures.steps.cost or _UNKNOWN
        steps_ahead = ahead.tokens / self._step_tokens
        return Prompt(
            start=start,
            stop=stop,
            block_tokens=self._layout.block_tokens,
            layers=self._layout.layers,
            step_tokens=self._step_tokens,
            cost=cost,
            # What stands ahead attends to as much as it does, as far as anyone can tell.
            compute_from_s=cost.seconds(
                ahead.tokens,
                ahead.tokens * (start + stop) / 2,
                steps=steps_ahead,
                sequences=max(steps_ahead, ahead.sequences),
            ),
            load_from_s=ahead.load_s,
            shares_steps=ahead.tokens > 0,
            after=ahead.after,
            computing_delays=ahead.others,
            loading_delays=ahead.loads / self._threads,
        )


Copies = tuple[Source, ...]

_SHARE_OF_COMPUTING = 0.5
"""Without a budget, loading may take this share of the time of computing."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A chain, or the rest of a chain.

    Attributes:
        keys: keys of the blocks at the fine level.
        start: tokens before the first block.
        left_s: seconds left until the first token is due; None: no budget.
    """

    keys: Sequence[BlockKey]
    start: int
    left_s: float | None = None


class LevelPicker:
    """Picks levels by this node's measurements."""

    def __init__(self, finder: BlockFinder, figures: LoadFigures, layout: BlockLayout) -> None:
        self._finder = finder
        self._figures = figures
        self._layout = layout

    def pick(self, wanted: Wanted, fine: list[Copies], *, thorough: bool) -> list[Copies]:
        """Return a chain with the best level per block within the time allowed.

        Args:
            wanted: the wanted chain.
            fine: the found blocks of the fine level.
            thorough: as in BlockFinder.find.
        """
        skipped = 0 if wanted.start else 1  # A prompt's first block is stored at one level only.
        names = [coarse_key(key) for key in wanted.keys[skipped:]]
        if len(fine) < skipped:
            return fine  # The first block is missing, and coarse blocks begin behind it.
        coarse = self._finder.find(names, thorough=thorough) if names else []
        coarse = [*fine[:skipped], *coarse]
        both = list(zip(fine, coarse, strict=False))
        count = choose_levels(
            [self._sizes(*copies) for copies in both],
            bytes_per_s=self._bytes_per_s([copies for copies, _ in both]),
            budget_s=self._budget_s(wanted, len(both)),
        ).fine
        longer = fine if len(fine) > len(coarse) else coarse
        return [*fine[:count], *coarse[count : len(both)], *longer[len(both) :]]

    def _sizes(self, fine: Copies, coarse: Copies) -> BlockSizes:
        return BlockSizes(self._size(fine), self._size(coarse))

    def _size(self, copies: Copies) -> int:
        """Return a copy's size; the upper bound for a copy on a disk, whose size is unknown."""
        at = copies[0].location
        return at.length if at is not None else self._layout.stored_bytes

    def _bytes_per_s(self, chain: Sequence[Copies]) -> float:
        sizes = [self._size(copies) for copies in chain]
        level = self._figures.level(KvCodec.ADAPTIVE, chain)
        seconds = 0.0
        for size, copies in zip(sizes, chain, strict=True):
            tier = copies[0].tier
            seconds += Run(tier, 1, self._figures.line(tier)).seconds(size, level).total_s
        return sum(sizes) / seconds if seconds else float("inf")

    def _budget_s(self, wanted: Wanted, blocks: int) -> float:
        if wanted.left_s is not None:
            return max(0.0, wanted.left_s)
        cost = self._figures.steps.cost
        if cost is None:
            return float("inf")  # No measured step yet, and no reason to hurry.
        tokens = blocks * self._layout.block_tokens
        return _SHARE_OF_COMPUTING * cost.seconds(tokens, causal_pairs(wanted.start, tokens))
