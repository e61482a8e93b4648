"""What a pipeline of loading and computing layers takes: pure arithmetic.

The loading controller predicts with it; benchmarks hold what they measured against it.
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


def pipelined_evenly(
    load_s: float, compute_s: float, layers: int, *, load_from_s: float, compute_from_s: float
) -> float:
    """Return the same for equal layers without a limit of buffers; O(1).

    Args:
        load_s: seconds to load all layers.
        compute_s: seconds to compute all layers.
        layers: how many.
        load_from_s: when loading begins.
        compute_from_s: when computing may begin.
    """
    return max(
        compute_from_s + compute_s,
        load_from_s + load_s / layers + compute_s,
        load_from_s + load_s + compute_s / layers,
    )


def one_after_the_other(loads: Sequence[float], computes: Sequence[float]) -> float:
    """Return the same when nothing is computed before everything is loaded."""
    return sum(loads) + sum(computes)
