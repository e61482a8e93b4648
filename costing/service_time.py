"""What serving a prompt takes: one formula for moving bytes, computing tokens, and both at once.

A compute node decides with it what to load (costing/load_controller.py), the scheduler where to
send (scheduler/choosing/service.py). All but ``pipelined_evenly`` is plain arithmetic: where it
says float, a NumPy array does as well, one number per alternative.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Line:
    """What one read costs: a latency and a rate."""

    latency_s: float = 0.0
    bytes_per_s: float = math.inf

    def seconds(self, size_bytes: float) -> float:
        """Return how long a read of that size takes."""
        return self.latency_s + size_bytes / self.bytes_per_s


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


def pipelined_evenly(
    load_s: float, compute_s: float, layers: int, *, load_from_s: float, compute_from_s: float
) -> float:
    """Return when equal layers are loaded and computed, each computed once it is there; O(1).

    Args:
        load_s: seconds to load all layers.
        compute_s: seconds to compute all layers.
        layers: how many.
        load_from_s: when loading begins.
        compute_from_s: when computing may begin.
    """
    return max(
        pipeline_sums(
            load_s, compute_s, layers, load_from_s=load_from_s, compute_from_s=compute_from_s
        )
    )


def pipeline_sums(
    load_s: float, compute_s: float, layers: int, *, load_from_s: float, compute_from_s: float
) -> tuple[float, float, float]:
    """Return the three sums of which the largest is when a pipeline of equal layers ends.

    The node is busy until then; or the first layer arrives late; or the last one does.
    """
    return (
        compute_from_s + compute_s,
        load_from_s + load_s / layers + compute_s,
        load_from_s + load_s + compute_s / layers,
    )
