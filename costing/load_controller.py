"""Load or compute: the plan with the smallest predicted makespan, from live figures.

A pure core. Candidates are: compute everything; load the first k blocks of the chain that was found
behind ``start`` and compute the rest, for every k that can be best; at each level at which the
blocks are stored.

```
tokens    0        start                at                             stop
          |  in L1  | k blocks: loaded  | first pass  | later passes    |
seconds             promote, then layers overlap with   follow it
                    |<---- pipeline, costing/pipeline.py ---->|<- sum ->|
```

The makespan over k is the largest of three sums of concave pieces, so it is enough to try the ends
of each piece and where another sum takes over: O(runs) depths, found by bisection. What a read and
a token cost was measured by the node that asks (compute/tiers/load_decider.py); compute/transfers/
loads.py acts. For two levels stored side by side, ``choose_levels`` says which blocks are fine.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, combinations, pairwise

from tierkv.costing.pipeline import PipelineEnds, pipeline_ends
from tierkv.costing.service_time import InSteps, Line, StepCost, causal_pairs
from tierkv.kvcore.layout import KvCodec
from tierkv.kvcore.location import Tier

COMPUTE = "compute"
"""Name of the alternative that loads nothing."""


@dataclass(frozen=True, slots=True)
class Level:
    """One form in which blocks are stored.

    Attributes:
        codec: its name.
        layer_bytes: stored bytes of one layer of one block.
        decode_bytes_per_s: rate at which it is decoded; infinite when nothing is.
        read_bytes: one read brings as many layers as fit into this, one at least.
    """

    codec: KvCodec
    layer_bytes: float
    decode_bytes_per_s: float = math.inf
    read_bytes: int = 0

    def reads(self, blocks: int, layers: int) -> float:
        """Return how many reads bring the layers of so many blocks; not rounded up."""
        return min(max(1.0, blocks * self.layer_bytes * layers / max(1, self.read_bytes)), layers)


@dataclass(frozen=True, slots=True)
class LoadSeconds:
    """Seconds until the first layer can be read, and to read and decode all layers."""

    promote_s: float
    layers_s: float

    @property
    def total_s(self) -> float:
        """Seconds until all is there."""
        return self.promote_s + self.layers_s


@dataclass(frozen=True, slots=True)
class Run:
    """Blocks in a row whose best copies are alike.

    Attributes:
        tier: what readers see.
        blocks: how many.
        line: what one read of them costs.
        promote: what bringing them into a node's memory costs first; None when they are there.
        place: runs of one place are read by the same calls and share one latency.
    """

    tier: Tier
    blocks: int
    line: Line
    promote: Line | None = None
    place: str = ""

    def seconds(self, size_bytes: float, level: Level, *, reads: float = 0.0) -> LoadSeconds:
        """Return how long some of its bytes take, and the latency of so many reads."""
        promote_s = 0.0 if self.promote is None else self.promote.seconds(size_bytes, reads=reads)
        read_s = self.line.seconds(size_bytes, reads=reads)
        return LoadSeconds(promote_s, read_s + size_bytes / level.decode_bytes_per_s)


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is missing of a prompt, and what the node is doing.

    Attributes:
        start: leading tokens that have KV.
        stop: tokens of the prompt.
        block_tokens: tokens per block.
        layers: layers of the model.
        step_tokens: tokens computed in one step, at most.
        cost: what computing costs.
        compute_from_s: when the node begins to compute this prompt (what is ahead of it).
        load_from_s: when a loader begins to load for it.
        shares_steps: others' tokens fill the steps that its own are computed in, so that it costs
            its share of a step and not a whole one.
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


@dataclass(frozen=True, slots=True)
class LoadDecision:
    """What to do, and what it is predicted to take.

    Attributes:
        depth: blocks to load, 0 for none.
        codec: the level to load them at; None when nothing is loaded.
        predicted_s: seconds until the prompt is computed.
        compute_s: the same when nothing is loaded.
        load_s: seconds until all that is loaded is there.
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
        """Name the plan as in ``alternatives``."""
        return f"{self.codec}:{self.depth}" if self.depth else COMPUTE

    def kind(self, found: int) -> str:
        """Say whether all that was found is loaded (``load``), ``part`` of it, or ``compute``."""
        if not self.depth:
            return COMPUTE
        return "load" if self.depth == found else "part"


@dataclass(frozen=True, slots=True)
class _Sums:
    """Promoting; moving and decoding all layers; and the latency of each read."""

    promote_s: float = 0.0
    bytes_s: float = 0.0
    latency_s: float = 0.0


class Chain:
    """What loading the first blocks of a chain costs, for any depth in O(log runs)."""

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
    def bounds(self) -> list[tuple[int, int]]:
        """First and last depth of each piece: in one run, and read in one of three manners.

        Few blocks are read in one go, many layer by layer, and between the number of reads grows
        with the depth.
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
    """Choose how many of the found blocks to load, and at which level.

    Args:
        prompt: what is to be computed or loaded.
        runs: the chain that follows ``prompt.start``, in order; it ends before ``prompt.stop``.
        levels: forms in which all of it is stored, best quality first.
        budget_s: a level of better quality is preferred while it is predicted to take no longer;
            0.0 asks for the smallest makespan only.
    """
    compute_s = compute_all_s(prompt)
    plans = [_best_depth(prompt, Chain(runs, level, prompt.layers)) for level in levels if runs]
    known = [(COMPUTE, compute_s), *((plan.choice, plan.predicted_s) for plan in plans)]
    alternatives = tuple(sorted(known, key=lambda pair: pair[1]))
    useful = [plan for plan in plans if plan.predicted_s < compute_s]
    if not useful:
        return LoadDecision(0, None, compute_s, compute_s, alternatives=alternatives)
    timely = [plan for plan in useful if plan.predicted_s <= budget_s]
    best = timely[0] if timely else min(useful, key=lambda plan: plan.predicted_s)
    return replace(best, compute_s=compute_s, alternatives=alternatives)


def choose_depth(prompt: Prompt, runs: Sequence[Run], level: Level, depth: int) -> LoadDecision:
    """Predict a plan that was chosen already, beside computing everything."""
    compute_s = compute_all_s(prompt)
    decision = replace(_plan(prompt, Chain(runs, level, prompt.layers), depth), compute_s=compute_s)
    known = ((COMPUTE, compute_s), (decision.choice, decision.predicted_s))
    return replace(decision, alternatives=tuple(sorted(known, key=lambda pair: pair[1])))


def compute_all_s(prompt: Prompt) -> float:
    """Predict when the prompt is computed if nothing is loaded."""
    return prompt.compute_from_s + sum(_computing(prompt, prompt.start))


def makespan(prompt: Prompt, chain: Chain, depth: int) -> float:
    """Predict when the prompt is computed if its next ``depth`` blocks, at least one, are loaded.

    Layers of the first step are computed behind the load; later steps follow it.
    """
    computing = _computing(prompt, _loaded_to(prompt, depth))
    seconds: float = _first_ends(prompt, chain, depth, computing).latest()
    return seconds + computing.later_s


def beside_s(prompt: Prompt, depth: int, others: int) -> float:
    """Predict how much longer a prompt's step takes because others like it are in it.

    Args:
        prompt: what is computed, and what stands before it.
        depth: blocks that it loads; the others are taken to load as many.
        others: prompts that share its step as far as that has room.
    """
    at = _loaded_to(prompt, depth) if depth else prompt.start
    tokens = min(prompt.stop - at, prompt.step_tokens)
    room = prompt.step_tokens - tokens
    sequences = min(others, room / tokens)
    pairs = causal_pairs(at, tokens) * sequences
    return prompt.cost.seconds(sequences * tokens, pairs, steps=0.0, sequences=sequences)


def _best_depth(prompt: Prompt, chain: Chain) -> LoadDecision:
    _, depth = min((makespan(prompt, chain, depth), depth) for depth in _depths(prompt, chain))
    return _plan(prompt, chain, depth)


def _plan(prompt: Prompt, chain: Chain, depth: int) -> LoadDecision:
    load_s = prompt.load_from_s + chain.seconds(depth).total_s
    return LoadDecision(depth, chain.level.codec, makespan(prompt, chain, depth), math.inf, load_s)


def _depths(prompt: Prompt, chain: Chain) -> Iterator[int]:
    """Give every depth that can be best, O(runs) of them.

    Within a run, and while the number of tokens of the first step is either its limit or all that
    is left, the makespan is the largest of three sums, each concave in the
    depth: only the ends of such a piece and depths at which another sum takes over can be best.
    """
    left = prompt.stop - prompt.start - prompt.step_tokens
    whole_steps = max(0, left // prompt.block_tokens)
    for low, high in chain.bounds:
        cut = min(max(low - 1, whole_steps), high)
        # The very last block may be partial, which makes its depth a piece of its own.
        for first, last in ((low, cut), (cut + 1, high - 1), (high, high)):
            if first <= last:
                yield from (first, last)
                for one, other in combinations(range(3), 2):
                    leads = partial(_leads, prompt, chain, one, other)
                    yield from _around_turn(first, last, leads)


def _around_turn(first: int, last: int, holds: Callable[[int], bool]) -> Iterator[int]:
    """Give the two depths between which a condition that turns at most once does so."""
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


def _leads(prompt: Prompt, chain: Chain, one: int, other: int, depth: int) -> bool:
    """Say which of two sums of the pipeline is the larger; it turns at most once in a piece."""
    ends = _first_ends(prompt, chain, depth, _computing(prompt, _loaded_to(prompt, depth)))
    return ends[one] > ends[other]


def _first_ends(prompt: Prompt, chain: Chain, depth: int, computing: InSteps) -> PipelineEnds:
    load = chain.seconds(depth)
    return pipeline_ends(
        load.layers_s,
        computing.first_s,
        prompt.layers,
        load_from_s=prompt.load_from_s + load.promote_s,
        compute_from_s=prompt.compute_from_s,
    )


def _loaded_to(prompt: Prompt, depth: int) -> int:
    """The last block found may be partial, but the last token is always computed."""
    return min(prompt.start + depth * prompt.block_tokens, prompt.stop - 1)


def _computing(prompt: Prompt, at: int) -> InSteps:
    """Return what computing takes from a token on."""
    tokens = prompt.stop - at
    first_s, later_s = prompt.cost.in_steps(at, tokens, prompt.step_tokens)
    if prompt.shares_steps:
        first_s -= prompt.cost.shared_pass_s(tokens, prompt.step_tokens)
    return InSteps(first_s, later_s)


@dataclass(frozen=True, slots=True)
class BlockSizes:
    """Stored bytes of one block; equal where it is stored at one level only."""

    fine: int
    coarse: int


@dataclass(frozen=True, slots=True)
class LevelChoice:
    """How to load a chain.

    Attributes:
        fine: leading blocks to load at the fine level; the others are coarse.
        predicted_s: seconds to load all of them.
    """

    fine: int
    predicted_s: float


def choose_levels(
    blocks: Sequence[BlockSizes], *, bytes_per_s: float, budget_s: float
) -> LevelChoice:
    """Choose the least loss that is loaded within the budget; if nothing is, the fastest.

    Args:
        blocks: the chain that was found, in order.
        bytes_per_s: measured rate of loading and decoding, positive.
        budget_s: seconds that loading may take.

    Returns:
        as many leading blocks fine as the budget allows when all others are coarse. O(blocks).
    """
    count = len(blocks)
    fine_s = [0.0, *accumulate(size.fine / bytes_per_s for size in blocks)]
    coarse_s = [0.0, *accumulate(size.coarse / bytes_per_s for size in blocks)]
    for fine in range(count, -1, -1):
        seconds = fine_s[fine] + coarse_s[count] - coarse_s[fine]
        if seconds <= budget_s:
            return LevelChoice(fine, seconds)
    return LevelChoice(0, coarse_s[count])
