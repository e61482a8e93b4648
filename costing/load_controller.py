"""Load or compute: choose the plan with the smallest predicted makespan, from measured costs.

A pure core. The candidates are: compute everything; or load the first k blocks of the chain found
after ``start`` and compute the rest, for every k that can be best, at each level at which the
blocks are stored.

```
tokens    0        start                at                             stop
          |  in L1  | k blocks: loaded  | first pass  | later passes    |
seconds             promote, then layers overlap with   follow it
                    |<---- pipeline, costing/service_time.py ---->|<- sum ->|
```

A plan also delays others: each second of the engine delays the prompts that wait for the engine,
each second of a loader the loads that wait for loaders. The plan with the smallest sum of makespan
and delays is chosen; for a prompt alone that is the smallest makespan.

The makespan over k is the largest of three sums of concave pieces, and the delays are concave.
Therefore only the ends of each piece can be best, and the depths where the largest sum changes:
O(runs) depths, found by bisection.
The calling node measured the cost of a read and of a token (compute/tiers/load_decider.py).
compute/transfers/loads.py carries out the decision. If a chain is stored at two levels side by
side, ``choose_levels`` picks the blocks to load at the fine level.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, combinations, pairwise

from tierkv.costing.service_time import (
    InSteps,
    Line,
    PipelineEnds,
    StepCost,
    causal_pairs,
    pipeline_ends,
)
from tierkv.kvcore.block import Tier
from tierkv.kvcore.layout import KvCodec

_TRIED_ALL = 8
"""Trying this many depths costs less than finding the depths that can be best."""
_MOST_SLOWER = 2.0
"""A plan that spares others may take so many times as long as computing beside the same prompts."""
COMPUTE = "compute"
"""Name of the alternative that loads nothing."""


@dataclass(frozen=True, slots=True)
class Level:
    """A form in which blocks are stored.

    Attributes:
        codec: the codec of the level.
        layer_bytes: stored bytes of one layer of one block.
        decode_bytes_per_s: rate of decoding; infinite if nothing is decoded.
        read_bytes: one read brings as many layers as fit into this size, at least one.
    """

    codec: KvCodec
    layer_bytes: float
    decode_bytes_per_s: float = math.inf
    read_bytes: int = 0

    def reads(self, blocks: int, layers: int) -> float:
        """Return the number of reads for all layers of ``blocks`` blocks; not rounded up."""
        return min(max(1.0, blocks * self.layer_bytes * layers / max(1, self.read_bytes)), layers)


@dataclass(frozen=True, slots=True)
class LoadSeconds:
    """Seconds until the first layer can be read, and to read and decode all layers."""

    promote_s: float
    layers_s: float

    @property
    def total_s(self) -> float:
        """Seconds until the load is complete."""
        return self.promote_s + self.layers_s


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive blocks whose best copies are alike.

    Attributes:
        tier: the tier as readers see it.
        blocks: number of blocks.
        line: cost of one read of the blocks.
        promote: cost of bringing the blocks into a node's memory first; None if in memory already.
        place: runs with equal places are read by the same calls and share one latency.
    """

    tier: Tier
    blocks: int
    line: Line
    promote: Line | None = None
    place: str = ""

    def seconds(self, size_bytes: float, level: Level, *, reads: float = 0.0) -> LoadSeconds:
        """Return the seconds to load ``size_bytes``, with the latency of ``reads`` reads."""
        promote_s = 0.0 if self.promote is None else self.promote.seconds(size_bytes, reads=reads)
        read_s = self.line.seconds(size_bytes, reads=reads)
        return LoadSeconds(promote_s, read_s + size_bytes / level.decode_bytes_per_s)


@dataclass(frozen=True, slots=True)
class Prompt:
    """The missing part of a prompt, and the load of the node.

    Attributes:
        start: leading tokens that have KV.
        stop: tokens of the prompt.
        block_tokens: tokens per block.
        layers: layers of the model.
        step_tokens: maximum number of tokens computed in one step.
        cost: cost of computing.
        compute_from_s: when the node begins to compute this prompt, after earlier work.
        load_from_s: when a loader begins to load for this prompt.
        shares_steps: True if tokens of further prompts fill the prompt's steps, so the prompt is
            charged a share of a step, not a whole step.
        after: further prompts that share the prompt's first step.
        computing_delays: other prompts, which wait while the engine computes this prompt.
        loading_delays: other loads that wait while a loader loads for this prompt.
    """

    start: int
    stop: int
    block_tokens: int
    layers: int
    step_tokens: int
    cost: StepCost
    compute_from_s: float = 0.0
    load_from_s: float = 0.0
    shares_steps: bool = False
    after: int = 0
    computing_delays: float = 0.0
    loading_delays: float = 0.0


@dataclass(frozen=True, slots=True)
class LoadDecision:
    """The chosen plan and its predicted times.

    Attributes:
        depth: blocks to load; 0 means no load.
        codec: the level of the load; None if nothing is loaded.
        predicted_s: seconds until the prompt is computed.
        compute_s: seconds until the prompt is computed without any load.
        load_s: seconds until the load is complete.
        alternatives: predictions by name (``compute``, or codec, ``:`` and depth), best first.
    """

    depth: int
    codec: KvCodec | None
    predicted_s: float
    compute_s: float
    load_s: float = 0.0
    alternatives: tuple[tuple[str, float], ...] = ()

    @property
    def choice(self) -> str:
        """The name of the plan in ``alternatives``."""
        return f"{self.codec}:{self.depth}" if self.depth else COMPUTE

    def kind(self, found: int) -> str:
        """Return ``load`` if all ``found`` blocks are loaded, else ``part`` or ``compute``."""
        if not self.depth:
            return COMPUTE
        return "load" if self.depth == found else "part"


@dataclass(frozen=True, slots=True)
class _Sums:
    """Seconds of promotion, of moving and decoding all layers, and of the latency of each read."""

    promote_s: float = 0.0
    bytes_s: float = 0.0
    latency_s: float = 0.0


class Chain:
    """Cost of loading the first blocks of a chain, for any depth in O(log runs)."""

    def __init__(self, runs: Sequence[Run], level: Level, layers: int) -> None:
        self.runs = runs
        self.level = level
        self._layers = layers
        self._ends = [0]
        self._before = [_Sums()]
        self._latency: list[_Sums] = []
        places = set[str]()
        for run in runs:
            known = run.place in places
            places.add(run.place)
            promote_s = run.promote.latency_s if run.promote and not known else 0.0
            latency_s = 0.0 if known else run.line.latency_s
            self._latency.append(_Sums(promote_s, latency_s=latency_s))
            self._before.append(self._through(len(self._latency) - 1, run.blocks))
            self._ends.append(self._ends[-1] + run.blocks)

    @property
    def blocks(self) -> int:
        """Length of the chain."""
        return self._ends[-1]

    @property
    def bounds(self) -> list[tuple[int, int]]:
        """First and last depth of each piece; a piece lies in one run and has one way of reading.

        Few blocks are read in one go, many blocks layer by layer. In between, the number of reads
        grows with the depth.
        """
        fitting = self.level.read_bytes / self.level.layer_bytes
        turns = (int(fitting / self._layers), int(fitting))
        ends = sorted({*self._ends, *(turn for turn in turns if turn < self._ends[-1])})
        return [(low + 1, high) for low, high in pairwise(ends)]

    def seconds(self, depth: int) -> LoadSeconds:
        """Predict the load of the first ``depth`` blocks, at least one."""
        index = bisect_left(self._ends, depth) - 1
        sums = self._through(index, depth - self._ends[index])
        reads = self.level.reads(depth, self._layers)
        return LoadSeconds(sums.promote_s, sums.bytes_s + sums.latency_s * reads)

    def _through(self, index: int, blocks: int) -> _Sums:
        before, latency = self._before[index], self._latency[index]
        size_bytes = blocks * self.level.layer_bytes * self._layers
        load = self.runs[index].seconds(size_bytes, self.level)
        return _Sums(
            before.promote_s + latency.promote_s + load.promote_s,
            before.bytes_s + load.layers_s,
            before.latency_s + latency.latency_s,
        )


def choose(
    prompt: Prompt, runs: Sequence[Run], levels: Sequence[Level], *, budget_s: float = 0.0
) -> LoadDecision:
    """Choose the number of found blocks to load, and the level.

    Args:
        prompt: the prompt to compute or load.
        runs: the chain that follows ``prompt.start``, in order; it ends before ``prompt.stop``.
        levels: forms in which the whole chain is stored, best quality first.
        budget_s: the best level with a prediction within this budget is preferred. 0.0 means that
            only the smallest makespan counts.
    """
    compute_s = compute_all_s(prompt)
    found = [_Depths(prompt, Chain(runs, level, prompt.layers)).best() for level in levels if runs]
    known = [(COMPUTE, compute_s), *((plan.choice, plan.predicted_s) for _, plan in found)]
    alternatives = tuple(sorted(known, key=lambda pair: pair[1]))
    all_s = compute_s + prompt.computing_delays * sum(_computing(prompt, prompt.start))
    most_s = _MOST_SLOWER * (compute_s + beside_s(prompt, 0))
    useful = [pair for pair in found if pair[0] < all_s and pair[1].predicted_s < most_s]
    if not useful:
        return LoadDecision(0, None, compute_s, compute_s, alternatives=alternatives)
    timely = [plan for _, plan in useful if plan.predicted_s <= budget_s]
    best = timely[0] if timely else min(useful, key=lambda pair: pair[0])[1]
    return replace(best, compute_s=compute_s, alternatives=alternatives)


def choose_depth(prompt: Prompt, runs: Sequence[Run], level: Level, depth: int) -> LoadDecision:
    """Predict the plan with a given depth, next to the plan that computes everything."""
    compute_s = compute_all_s(prompt)
    decision = _Depths(prompt, Chain(runs, level, prompt.layers)).plan(depth, compute_s)
    known = ((COMPUTE, compute_s), (decision.choice, decision.predicted_s))
    return replace(decision, alternatives=tuple(sorted(known, key=lambda pair: pair[1])))


def compute_all_s(prompt: Prompt) -> float:
    """Predict the end of the prompt's computation without any load."""
    return prompt.compute_from_s + sum(_computing(prompt, prompt.start))


def makespan(prompt: Prompt, chain: Chain, depth: int) -> float:
    """Predict the end of the prompt's computation if the next ``depth`` (>= 1) blocks are loaded.

    The load overlaps the layers of the first step; later steps follow the load.
    """
    return _Depths(prompt, chain).seconds(depth)


def beside_s(prompt: Prompt, depth: int) -> float:
    """Predict how much longer a prompt's step takes because further similar prompts share the step.

    As many of ``prompt.after`` share it as the step has room for.

    Args:
        prompt: the prompt.
        depth: blocks that the prompt loads; the further prompts are assumed to load as many.
    """
    at = _loaded_to(prompt, depth) if depth else prompt.start
    tokens = min(prompt.stop - at, prompt.step_tokens)
    room = prompt.step_tokens - tokens
    sequences = min(prompt.after, room / tokens)
    pairs = causal_pairs(at, tokens) * sequences
    return prompt.cost.seconds(sequences * tokens, pairs, steps=0.0, sequences=sequences)


class _Depths:
    """Predictions for the depths of one chain; each depth is evaluated once."""

    def __init__(self, prompt: Prompt, chain: Chain) -> None:
        self._prompt = prompt
        self._chain = chain
        self._known: dict[int, tuple[PipelineEnds, float]] = {}

    def seconds(self, depth: int) -> float:
        """Return the makespan."""
        ends, later_s = self._ends(depth)
        first_s: float = ends.latest()
        return first_s + later_s

    def best(self) -> tuple[float, LoadDecision]:
        """Return the plan with the smallest sum of makespan and delays, and this sum.

        The shallower one of equals.
        """
        cost_s, depth = min((self._cost_s(depth), depth) for depth in self._candidates())
        return cost_s, self._plan(depth, self.seconds(depth), math.inf)

    def _cost_s(self, depth: int) -> float:
        seconds = self.seconds(depth)
        prompt = self._prompt
        if prompt.computing_delays:
            computing_s = sum(_computing(prompt, _loaded_to(prompt, depth)))
            seconds += prompt.computing_delays * computing_s
        if prompt.loading_delays:
            seconds += prompt.loading_delays * self._chain.seconds(depth).total_s
        return seconds

    def plan(self, depth: int, compute_s: float) -> LoadDecision:
        """Return the plan that loads ``depth`` blocks."""
        return self._plan(depth, self.seconds(depth), compute_s)

    def _plan(self, depth: int, seconds: float, compute_s: float) -> LoadDecision:
        load_s = self._prompt.load_from_s + self._chain.seconds(depth).total_s
        return LoadDecision(depth, self._chain.level.codec, seconds, compute_s, load_s)

    def _candidates(self) -> Iterable[int]:
        """Yield every depth that can be best: all depths of a short chain, else O(runs) depths.

        Consider a piece within a run in which the first step always has either its maximum number
        of tokens or all remaining tokens. In a piece the makespan is the largest of three sums, and
        each sum is concave in the depth. Only the ends of a piece can be best, and the depths where
        the largest sum changes.
        """
        if self._chain.blocks <= _TRIED_ALL:
            return range(1, self._chain.blocks + 1)
        return self._turns()

    def _turns(self) -> Iterator[int]:
        prompt = self._prompt
        left = prompt.stop - prompt.start - prompt.step_tokens
        whole_steps = max(0, left // prompt.block_tokens)
        for low, high in self._chain.bounds:
            cut = min(max(low - 1, whole_steps), high)
            # The very last block may be partial, which makes its depth a piece of its own.
            for first, last in ((low, cut), (cut + 1, high - 1), (high, high)):
                if first <= last:
                    yield from (first, last)
                    for one, other in combinations(range(3), 2):
                        yield from _around_turn(first, last, partial(self._leads, one, other))

    def _leads(self, one: int, other: int, depth: int) -> bool:
        """Return whether sum ``one`` exceeds sum ``other``; flips at most once in a piece."""
        ends, _ = self._ends(depth)
        return ends[one] > ends[other]

    def _ends(self, depth: int) -> tuple[PipelineEnds, float]:
        """Return the ends of the first step, and the seconds of the later steps."""
        if (known := self._known.get(depth)) is not None:
            return known
        prompt = self._prompt
        load = self._chain.seconds(depth)
        computing = _computing(prompt, _loaded_to(prompt, depth))
        ends = pipeline_ends(
            load.layers_s,
            computing.first_s,
            prompt.layers,
            load_from_s=prompt.load_from_s + load.promote_s,
            compute_from_s=prompt.compute_from_s,
        )
        found = self._known[depth] = (ends, computing.later_s)
        return found


def _around_turn(first: int, last: int, holds: Callable[[int], bool]) -> Iterator[int]:
    """Yield the two neighbouring depths between which a condition flips; at most one flip."""
    before = holds(first)
    if holds(last) == before:
        return
    low, high = first, last
    while high - low > 1:
        middle = (low + high) // 2
        if holds(middle) == before:
            low = middle
        else:
            high = middle
    yield from (low, high)


def _loaded_to(prompt: Prompt, depth: int) -> int:
    """Return the end of the load; the last block may be partial, the last token is computed."""
    return min(prompt.start + depth * prompt.block_tokens, prompt.stop - 1)


def _computing(prompt: Prompt, at: int) -> InSteps:
    """Return the seconds of computing the prompt from token ``at`` on."""
    tokens = prompt.stop - at
    first_s, later_s = prompt.cost.in_steps(at, tokens, prompt.step_tokens)
    if prompt.shares_steps:
        first_s -= prompt.cost.shared_pass_s(tokens, prompt.step_tokens)
    return InSteps(first_s, later_s)


@dataclass(frozen=True, slots=True)
class BlockSizes:
    """Stored bytes of one block; equal if the block is stored at a single level."""

    fine: int
    coarse: int


@dataclass(frozen=True, slots=True)
class LevelChoice:
    """The levels at which to load a chain.

    Attributes:
        fine: leading blocks to load at the fine level; the rest of the chain is coarse.
        predicted_s: seconds to load the whole chain.
    """

    fine: int
    predicted_s: float


def choose_levels(
    blocks: Sequence[BlockSizes], *, bytes_per_s: float, budget_s: float
) -> LevelChoice:
    """Choose the smallest loss that loads within the budget; the fastest load if none does.

    Args:
        blocks: the chain that was found, in order.
        bytes_per_s: measured rate of loading and decoding, positive.
        budget_s: seconds that loading may take.

    Returns:
        the largest number of leading fine blocks that the budget allows with a coarse rest.
        O(blocks).
    """
    count = len(blocks)
    fine_s = [0.0, *accumulate(size.fine / bytes_per_s for size in blocks)]
    coarse_s = [0.0, *accumulate(size.coarse / bytes_per_s for size in blocks)]
    for fine in range(count, -1, -1):
        seconds = fine_s[fine] + coarse_s[count] - coarse_s[fine]
        if seconds <= budget_s:
            return LevelChoice(fine, seconds)
    return LevelChoice(0, coarse_s[count])
