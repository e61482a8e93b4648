"""What a pipeline of loading and computing unequal layers takes: pure arithmetic.

The blending controller predicts with it; benchmarks hold what they measured against it. For equal
layers there is a closed form (costing/service_time.py).
"""

from __future__ import annotations

from collections.abc import Sequence


def pipelined(loads: Sequence[float], computes: Sequence[float], *, buffers: int = 0) -> float:
    """Return when the last layer is computed, if layer l is computed as soon as it is there.

    Args:
        loads: seconds to load each layer, one after the other.
        computes: seconds to compute each layer.
        buffers: layers that may be loaded and not yet computed; 0 is no limit.
    """
    loaded, ended = 0.0, [0.0] * len(loads)
    for layer, (load, compute) in enumerate(zip(loads, computes, strict=True)):
        freed = ended[layer - buffers] if buffers and layer >= buffers else 0.0
        loaded = max(loaded, freed) + load
        ended[layer] = max(ended[layer - 1] if layer else 0.0, loaded) + compute
    return ended[-1]


def one_after_the_other(loads: Sequence[float], computes: Sequence[float]) -> float:
    """Return the same when nothing is computed before everything is loaded."""
    return sum(loads) + sum(computes)
