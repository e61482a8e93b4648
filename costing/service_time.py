"""What moving bytes and computing tokens take: every prediction is made of these two sums.

```
moving     seconds = reads * latency_s + bytes / bytes_per_s

computing  seconds = tokens    * per_token_s      matrix products
                   + pairs     * per_pair_s       attention: (query, key) pairs
                   + steps     * per_step_s       launching a forward pass
                   + sequences * per_sequence_s   each further prompt in a pass

           pairs of n tokens behind s others = n * s + n * (n + 1) / 2

           |<- step_tokens ->|<- step_tokens ->|<- rest ->|
           |   first pass    |        later passes        |     a load overlaps with the first only
```

Bytes, tokens and seconds throughout. Each figure is fitted online to reads and forward passes
(costing/fit.py) or told by another node's heartbeat. All is plain arithmetic: where it says float,
a NumPy array does as well, one number per alternative; ``least`` is then ``numpy.minimum``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from tierkv.kvcore.node import NodeLoad


@dataclass(frozen=True, slots=True)
class Line:
    """What one read costs: a latency and a rate."""

    latency_s: float = 0.0
    bytes_per_s: float = math.inf

    def seconds(self, size_bytes: float, *, reads: float = 1.0) -> float:
        """Return how long so many reads take that together bring ``size_bytes``."""
        return reads * self.latency_s + size_bytes / self.bytes_per_s


class InSteps(NamedTuple):
    """Seconds of the first forward pass over some tokens, and of all later ones."""

    first_s: float
    later_s: float


@dataclass(frozen=True, slots=True)
class StepCost:
    """What forward passes through all layers cost: a sum of what each of these figures counts.

    Attributes:
        per_token_s: seconds per computed token.
        per_pair_s: seconds per (query, key) pair of attention.
        per_step_s: seconds per forward pass.
        per_sequence_s: seconds per further prompt in a forward pass, however few of its tokens are
            new; the first one's are a part of ``per_step_s``.
    """

    per_token_s: float
    per_pair_s: float = 0.0
    per_step_s: float = 0.0
    per_sequence_s: float = 0.0

    def seconds(
        self, tokens: float, pairs: float, *, steps: float = 1.0, sequences: float | None = None
    ) -> float:
        """Return how long computing takes; ``sequences`` over all steps, one in each by default."""
        seconds = self.per_token_s * tokens + self.per_pair_s * pairs + self.per_step_s * steps
        if sequences is not None:
            seconds += self.per_sequence_s * (sequences - steps)
        return seconds

    def causal_seconds(self, start: float, tokens: float, *, steps: float = 1.0) -> float:
        """Return the same for ``tokens`` in a row, the first at ``start``; fewer operations."""
        per_token_s = self.per_token_s + self.per_pair_s * (start + 0.5 * (tokens + 1))
        return tokens * per_token_s + self.per_step_s * steps

    def in_steps(
        self, start: float, tokens: float, step_tokens: float, *, least: Callable[..., Any] = min
    ) -> InSteps:
        """Split what computing takes by forward passes of ``step_tokens`` at most.

        The number of later passes is not rounded up: jumps would need more candidates.
        """
        first = least(tokens, step_tokens)
        later = tokens - first
        later_s = self.causal_seconds(start + first, later, steps=later / step_tokens)
        return InSteps(self.causal_seconds(start, first), later_s)

    def own_passes_s(
        self, start: float, tokens: float, step_tokens: float, *, most: Callable[..., Any] = max
    ) -> Any:
        """Return what tokens in a row take in passes that nothing shares, one at least."""
        return self.causal_seconds(start, tokens, steps=most(1.0, tokens / step_tokens))

    def shared_pass_s(
        self, tokens: float, step_tokens: float, *, least: Callable[..., Any] = min
    ) -> float:
        """Return what a first pass costs a prompt less if prompts of others fill it up.

        The prompt pays for as much of the pass as it has tokens, and to be one more in it.
        """
        others_share = 1.0 - least(1.0, tokens / step_tokens)
        saved: float = others_share * (self.per_step_s - self.per_sequence_s)
        return saved

    def spared_s(self, load_s: float, *, start: float, tokens: float) -> float:
        """Return the seconds by which loading tokens beats computing them; negative: it does not.

        The tokens would be computed in passes that are run anyhow.
        """
        return self.causal_seconds(start, tokens, steps=0.0) - load_s

    def times(self, factor: float) -> StepCost:
        """Return all figures multiplied by ``factor``."""
        return StepCost(
            self.per_token_s * factor,
            self.per_pair_s * factor,
            self.per_step_s * factor,
            self.per_sequence_s * factor,
        )


def causal_pairs(start: float, tokens: float) -> float:
    """Count the (query, key) pairs of ``tokens`` queries in a row, the first at ``start``."""
    return tokens * start + tokens * (tokens + 1) / 2


def tell_cost(cost: StepCost | None) -> NodeLoad:
    """Write what computing costs into a heartbeat; ``told_cost`` reads it."""
    cost = cost or StepCost(0.0)
    return NodeLoad(
        prefill_token_s=cost.per_token_s,
        prefill_pair_s=cost.per_pair_s,
        prefill_step_s=cost.per_step_s,
        prefill_sequence_s=cost.per_sequence_s,
    )


def told_cost(load: NodeLoad) -> StepCost | None:
    """Return what computing costs by a heartbeat: fitted, or a plain rate; None: not measured."""
    fitted = StepCost(
        load.prefill_token_s, load.prefill_pair_s, load.prefill_step_s, load.prefill_sequence_s
    )
    if fitted != StepCost(0.0):
        return fitted
    rate = load.prefill_tokens_per_s
    return StepCost(1.0 / rate) if rate > 0.0 else None
