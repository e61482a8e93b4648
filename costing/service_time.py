"""Cost of moving bytes, of computing tokens, and of both at once: behind every prediction.

```
moving     seconds = reads * latency_s + bytes / bytes_per_s

computing  seconds = tokens    * per_token_s      matrix products
                   + pairs     * per_pair_s       attention: (query, key) pairs
                   + steps     * per_step_s       launching a forward pass
                   + sequences * per_sequence_s   each further prompt in a pass

           pairs of n tokens behind s earlier tokens = n * s + n * (n + 1) / 2

           |<- step_tokens ->|<- step_tokens ->|<- rest ->|
           |   first pass    |        later passes        |     a load overlaps the first pass only
```

If KV is loaded layer by layer, loads overlap computing:

```
load     |.. L0 ..|.. L1 ..|.. L2 ..|                       each layer takes load_s / layers
compute           |. C0 .|  |. C1 .| |. C2 .|               each layer takes compute_s / layers
         ^ load_from_s      ^ layer 1 starts once layer 1 is loaded and layer 0 is computed
```

With equal layers the end is the largest of three sums. The longest path through both rows either
turns down once, at the first or at the last layer, or does not depend on the load:

```
busy         compute_from_s + compute_s
first late   load_from_s + load_s / layers + compute_s
last late    load_from_s + load_s + compute_s / layers
```

Unequal layers or a limited number of buffers need the recurrence, O(layers).

All units are bytes, tokens and seconds. Each figure is fitted online to reads and forward passes
(costing/fit.py) or comes from another node's heartbeat. The arithmetic is plain: a parameter typed
float also takes a NumPy array with a number per alternative; ``least`` is then ``numpy.minimum``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tierkv.kvcore.node import NodeLoad


@dataclass(frozen=True, slots=True)
class Line:
    """The cost of a read: a latency and a rate."""

    latency_s: float = 0.0
    bytes_per_s: float = math.inf

    def seconds(self, size_bytes: float, *, reads: float = 1.0) -> float:
        """Return the seconds that ``reads`` reads take to bring ``size_bytes`` in total."""
        return reads * self.latency_s + size_bytes / self.bytes_per_s


class InSteps(NamedTuple):
    """Seconds of the first forward pass over a row of tokens, and of all later passes."""

    first_s: float
    later_s: float


@dataclass(frozen=True, slots=True)
class StepCost:
    """Cost of forward passes through all layers, as a sum of four figures times their counts.

    Attributes:
        per_token_s: seconds per computed token.
        per_pair_s: seconds per (query, key) pair of attention.
        per_step_s: seconds per forward pass, including the first prompt's ``per_sequence_s``.
        per_sequence_s: seconds per further prompt in a forward pass, for any number of new tokens.
    """

    per_token_s: float
    per_pair_s: float = 0.0
    per_step_s: float = 0.0
    per_sequence_s: float = 0.0

    def seconds(
        self, tokens: float, pairs: float, *, steps: float = 1.0, sequences: float | None = None
    ) -> float:
        """Return the seconds of computing; ``sequences`` is a total, by default one per step."""
        seconds = self.per_token_s * tokens + self.per_pair_s * pairs + self.per_step_s * steps
        if sequences is not None:
            seconds += self.per_sequence_s * (sequences - steps)
        return seconds

    def causal_seconds(self, start: float, tokens: float, *, steps: float = 1.0) -> float:
        """Return the same for consecutive ``tokens`` from ``start``, with fewer operations."""
        per_token_s = self.per_token_s + self.per_pair_s * (start + 0.5 * (tokens + 1))
        return tokens * per_token_s + self.per_step_s * steps

    def in_steps(
        self, start: float, tokens: float, step_tokens: float, *, least: Callable[..., Any] = min
    ) -> InSteps:
        """Split the seconds of computing into forward passes of at most ``step_tokens`` tokens.

        The number of later passes is not rounded up, because jumps would need more candidates.
        """
        first = least(tokens, step_tokens)
        later = tokens - first
        later_s = self.causal_seconds(start + first, later, steps=later / step_tokens)
        return InSteps(self.causal_seconds(start, first), later_s)

    def own_passes_s(
        self, start: float, tokens: float, step_tokens: float, *, most: Callable[..., Any] = max
    ) -> Any:
        """Return the seconds of consecutive tokens in unshared passes, at least one pass."""
        return self.causal_seconds(start, tokens, steps=most(1.0, tokens / step_tokens))

    def shared_pass_s(
        self, tokens: float, step_tokens: float, *, least: Callable[..., Any] = min
    ) -> float:
        """Return the seconds that a prompt saves if other prompts fill up its first pass.

        The prompt then pays for its share of the pass by tokens, and for being one more sequence in
        the rest of the pass.
        """
        others_share = 1.0 - least(1.0, tokens / step_tokens)
        saved: float = others_share * (self.per_step_s - self.per_sequence_s)
        return saved

    def spared_s(self, load_s: float, *, start: float, tokens: float) -> float:
        """Return the seconds that loading saves over computing; negative if computing is faster.

        The tokens would be computed in passes that run anyway.
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
    """Count the (query, key) pairs of consecutive ``tokens`` queries from position ``start``."""
    return tokens * start + tokens * (tokens + 1) / 2


def tell_cost(cost: StepCost | None) -> NodeLoad:
    """Write the cost of computing into a heartbeat; ``told_cost`` reads the cost back."""
    cost = cost or StepCost(0.0)
    return NodeLoad(
        prefill_token_s=cost.per_token_s,
        prefill_pair_s=cost.per_pair_s,
        prefill_step_s=cost.per_step_s,
        prefill_sequence_s=cost.per_sequence_s,
    )


def told_cost(load: NodeLoad) -> StepCost | None:
    """Return the fitted cost in a heartbeat, or a cost from its plain rate; None if unmeasured."""
    fitted = StepCost(
        load.prefill_token_s, load.prefill_pair_s, load.prefill_step_s, load.prefill_sequence_s
    )
    if fitted != StepCost(0.0):
        return fitted
    rate = load.prefill_tokens_per_s
    return StepCost(1.0 / rate) if rate > 0.0 else None


class PipelineEnds(NamedTuple):
    """Three sums; the largest is the end of a pipeline of equal layers.

    Attributes:
        busy_s: end if the node's computing is the bottleneck.
        first_late_s: end if computing waits for the first layer only.
        last_late_s: end if computing waits for the last layer, which is then computed.
    """

    busy_s: float
    first_late_s: float
    last_late_s: float

    def latest(self, most: Callable[..., Any] = max) -> Any:
        """Return the end of the last layer; for columns, ``most`` is ``numpy.maximum``."""
        return most(most(self.busy_s, self.first_late_s), self.last_late_s)


def pipeline_ends(
    load_s: float, compute_s: float, layers: int, *, load_from_s: float, compute_from_s: float
) -> PipelineEnds:
    """Load and compute equal layers, each computed after its load; O(1), also for columns.

    Args:
        load_s: seconds to load all layers.
        compute_s: seconds to compute all layers.
        layers: number of layers.
        load_from_s: start of loading.
        compute_from_s: earliest start of computing.
    """
    return PipelineEnds(
        compute_from_s + compute_s,
        load_from_s + load_s / layers + compute_s,
        load_from_s + load_s + compute_s / layers,
    )


def pipelined(loads: Sequence[float], computes: Sequence[float], *, buffers: int = 0) -> float:
    """Return the end of the last layer if each layer is computed as soon as the layer is loaded.

    Args:
        loads: seconds to load each layer, one after the other.
        computes: seconds to compute each layer.
        buffers: layers that may be loaded but not yet computed; 0 means no limit.
    """
    loaded, ended = 0.0, [0.0] * len(loads)
    for layer, (load, compute) in enumerate(zip(loads, computes, strict=True)):
        freed = ended[layer - buffers] if buffers and layer >= buffers else 0.0
        loaded = max(loaded, freed) + load
        ended[layer] = max(ended[layer - 1] if layer else 0.0, loaded) + compute
    return ended[-1]
