"""Blend, how much to compute again, or compute exactly: the smallest predicted makespan decides.

A pure core beside costing/load_controller.py, with the same prompts, runs and costs; asked by
compute/blend/stage.py and compute/tiers/load_decider.py. A blended pass loads the KV of chunks and
computes a share r of their tokens again, besides all tokens that stand between chunks:

```
pass_s(r) = pass over (r * reused + fresh) tokens, attention in proportion
hidden    = the r at which pass_s(r) equals what is left of the load: computing more costs nothing
r         = hidden, at least min_ratio; exact computing, where a pass is not clearly faster
```

Layers differ (some scan all tokens), so they are summed one by one (costing/pipeline.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tierkv.costing.load_controller import COMPUTE, Chain, Level, Prompt, Run, compute_all_s
from tierkv.costing.pipeline import pipelined
from tierkv.costing.service_time import causal_pairs

_WORTH = 0.75
"""A pass must take at most this share of the time of computing all: a pass departs from the exact
answer and keeps the prompt out of shared steps, which is not worth a few percent."""


@dataclass(frozen=True, slots=True)
class BlendWork:
    """What a blended pass over a prompt's missing tokens would compute.

    Attributes:
        reused_tokens: tokens of chunks whose KV is there or loaded.
        min_ratio: share of them that is computed again, at least; in (0, 1].
        scan_layers: leading layers in which all of them are computed, to choose from.
        fresh_passes: times the other tokens are computed in addition, to choose from.
    """

    reused_tokens: int
    min_ratio: float
    scan_layers: int = 0
    fresh_passes: int = 0


@dataclass(frozen=True, slots=True)
class BlendDecision:
    """What to do with chunks.

    Attributes:
        recompute_ratio: share of reused tokens to compute again; None: compute all, exactly.
        predicted_s: seconds until the prompt is computed.
        compute_s: the same when all is computed.
        pass_s: seconds of computing a blended pass, by what steps cost; 0.0 when all is computed.
        alternatives: predictions by name (``compute``, or ``blend:`` and ratio), best first.
    """

    recompute_ratio: float | None
    predicted_s: float
    compute_s: float
    pass_s: float = 0.0
    alternatives: tuple[tuple[str, float], ...] = ()

    @property
    def choice(self) -> str:
        """Name the plan as in ``alternatives``."""
        return COMPUTE if self.recompute_ratio is None else _name(self.recompute_ratio)


def choose_ratio(
    prompt: Prompt, work: BlendWork, runs: Sequence[Run], level: Level, *, slower: float = 1.0
) -> BlendDecision:
    """Choose how much of the reused tokens to compute again.

    Args:
        prompt: ``[start, stop)`` is what has no exact KV: chunks and everything between.
        work: what blending it would compute.
        runs: chunk blocks that must be loaded, one layer after the other; empty when all are here.
        level: how they are stored.
        slower: how many times what steps cost a blended pass was seen to take: it shares no step,
            and moves keys about.
    """
    compute_s = compute_all_s(prompt)
    loads = _loads(prompt, runs, level)
    hidden = _hidden_ratio(prompt, work, sum(loads), slower)
    ratios = (min(1.0, max(work.min_ratio, hidden)), work.min_ratio)
    known = {ratio: _makespan(prompt, work, loads, ratio, slower) for ratio in ratios}
    named = [(COMPUTE, compute_s), *((_name(ratio), seconds) for ratio, seconds in known.items())]
    alternatives = tuple(sorted(named, key=lambda pair: pair[1]))
    for ratio, seconds in known.items():  # The hidden one first: as good for the time, and better.
        if seconds - prompt.compute_from_s <= _WORTH * (compute_s - prompt.compute_from_s):
            pass_s = sum(_computes(prompt, work, ratio))
            return BlendDecision(ratio, seconds, compute_s, pass_s, alternatives)
    return BlendDecision(None, compute_s, compute_s, 0.0, alternatives)


def _name(ratio: float) -> str:
    return f"blend:{ratio:.2f}"


def _loads(prompt: Prompt, runs: Sequence[Run], level: Level) -> list[float]:
    """Return the seconds to load each layer; what comes before counts for the first."""
    if not runs:
        return [0.0] * prompt.layers
    chain = Chain(runs, level, prompt.layers)
    load = chain.seconds(sum(run.blocks for run in runs))
    loads = [load.layers_s / prompt.layers] * prompt.layers
    loads[0] += prompt.load_from_s + load.promote_s
    return loads


def _hidden_ratio(prompt: Prompt, work: BlendWork, load_s: float, slower: float) -> float:
    """Return the ratio at which computing takes as long as loading; may be outside [0, 1]."""
    none_s, all_s = (slower * sum(_computes(prompt, work, ratio)) for ratio in (0.0, 1.0))
    free_s = load_s - prompt.compute_from_s - none_s
    return free_s / (all_s - none_s) if all_s > none_s else 1.0


def _makespan(
    prompt: Prompt, work: BlendWork, loads: Sequence[float], ratio: float, slower: float
) -> float:
    computes = [slower * seconds for seconds in _computes(prompt, work, ratio)]
    return max(pipelined(loads, computes), prompt.compute_from_s + sum(computes))


def _computes(prompt: Prompt, work: BlendWork, ratio: float) -> list[float]:
    """Return the seconds to compute each layer."""
    fresh = prompt.stop - prompt.start - work.reused_tokens
    active = ratio * work.reused_tokens + fresh
    scan_s = _pass_s(prompt, fresh + work.reused_tokens) / prompt.layers
    layer_s = _pass_s(prompt, active) / prompt.layers
    extra_s = work.fresh_passes * _pass_s(prompt, fresh) / prompt.layers
    scans = min(work.scan_layers, prompt.layers)
    return [scan_s + extra_s] * scans + [layer_s + extra_s] * (prompt.layers - scans)


def _pass_s(prompt: Prompt, active: float) -> float:
    """Return what computing some of the missing tokens costs; they may be anywhere among them."""
    tokens = prompt.stop - prompt.start
    pairs = causal_pairs(prompt.start, tokens) * active / tokens
    return prompt.cost.seconds(active, pairs)  # A pass of its own, which shares no step.
