"""Decide whether to blend a prompt, and which share of the reused tokens to compute again.

A pure core with the same prompts, runs and costs as costing/load_controller.py.
compute/tiers/load_decider.py calls ``choose_ratio`` for compute/blend/stage.py. A blended pass
loads the KV of chunks. The pass computes a share r of the chunk tokens again, and all tokens
between the chunks:

```
pass_s(r) = pass over (r * reused + fresh) tokens, attention in proportion
hidden    = the r at which the pass ends together with the load: recomputing is free
r         = max(hidden, min_ratio), or min_ratio; exact computing if no pass is clearly faster
```

Layers differ (some scan all tokens), so the times are summed layer by layer
(costing/service_time.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tierkv.costing.load_controller import COMPUTE, Chain, Level, Prompt, Run, compute_all_s
from tierkv.costing.service_time import causal_pairs, pipelined

_WORTH = 0.75
"""A blended pass may take at most this share of the time of computing all tokens. A blended answer
is approximate and the prompt leaves the shared steps; a gain of a few percent is not worth both."""


@dataclass(frozen=True, slots=True)
class BlendWork:
    """Tokens and layers that a blended pass over a prompt's missing tokens would compute.

    Attributes:
        reused_tokens: tokens of chunks with KV that is in L1 or will be loaded.
        min_ratio: smallest share of the reused tokens to compute again; in (0, 1].
        scan_layers: leading layers that compute all reused tokens, to select the tokens.
        fresh_passes: additional passes over the remaining tokens, for the same selection.
    """

    reused_tokens: int
    min_ratio: float
    scan_layers: int = 0
    fresh_passes: int = 0


@dataclass(frozen=True, slots=True)
class BlendDecision:
    """The chosen way to serve a prompt with chunks.

    Attributes:
        recompute_ratio: share of reused tokens to compute again; None means exact computing.
        predicted_s: seconds until the prompt is computed.
        compute_s: seconds until the prompt is computed with exact computing.
        pass_s: seconds of a blended pass by the cost of steps; 0.0 for exact computing.
        alternatives: predictions by name (``compute``, or ``blend:`` and ratio), best first.
    """

    recompute_ratio: float | None
    predicted_s: float
    compute_s: float
    pass_s: float = 0.0
    alternatives: tuple[tuple[str, float], ...] = ()

    @property
    def choice(self) -> str:
        """The name of the decision in ``alternatives``."""
        return COMPUTE if self.recompute_ratio is None else _name(self.recompute_ratio)


def choose_ratio(
    prompt: Prompt, work: BlendWork, runs: Sequence[Run], level: Level, *, slower: float = 1.0
) -> BlendDecision:
    """Choose the share of the reused tokens to compute again.

    Args:
        prompt: ``[start, stop)`` has no exact KV: chunks and all tokens between the chunks.
        work: the tokens and layers that blending the prompt would compute.
        runs: chunk blocks to load, one layer after the other; empty if all chunks are in L1.
        level: the level at which the chunk blocks are stored.
        slower: measured duration of blended passes over the prediction from the cost of steps. A
            blended pass shares no step and moves keys.
    """
    compute_s = compute_all_s(prompt)
    loads = _loads(prompt, runs, level)
    hidden = _hidden_ratio(prompt, work, sum(loads), slower)
    ratios = (min(1.0, max(work.min_ratio, hidden)), work.min_ratio)
    known = {ratio: _makespan(prompt, work, loads, ratio, slower) for ratio in ratios}
    named = [(COMPUTE, compute_s), *((_name(ratio), seconds) for ratio, seconds in known.items())]
    alternatives = tuple(sorted(named, key=lambda pair: pair[1]))
    for ratio, seconds in known.items():  # The hidden ratio first: same time, better answer.
        if seconds - prompt.compute_from_s <= _WORTH * (compute_s - prompt.compute_from_s):
            pass_s = sum(_computes(prompt, work, ratio))
            return BlendDecision(ratio, seconds, compute_s, pass_s, alternatives)
    return BlendDecision(None, compute_s, compute_s, 0.0, alternatives)


def _name(ratio: float) -> str:
    return f"blend:{ratio:.2f}"


def _loads(prompt: Prompt, runs: Sequence[Run], level: Level) -> list[float]:
    """Return the seconds to load each layer; waiting and promotion count for the first layer."""
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
    """Return the seconds of a pass over ``active`` tokens at any of the missing positions."""
    tokens = prompt.stop - prompt.start
    pairs = causal_pairs(prompt.start, tokens) * active / tokens
    return prompt.cost.seconds(active, pairs)  # A separate pass that shares no step.
