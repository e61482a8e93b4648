"""When a prompt is computed whose KV is loaded layer by layer: the load hides behind computing.

```
load     |.. L0 ..|.. L1 ..|.. L2 ..|                       each layer takes load_s / layers
compute           |. C0 .|  |. C1 .| |. C2 .|               each one compute_s / layers
         ^ load_from_s      ^ layer 1 is computed once it is there and layer 0 is computed
```

With equal layers the end is the largest of three sums, for the longest way through both rows turns
down once, at the first layer or at the last one, or does not depend on the load:

```
busy         compute_from_s + compute_s
first late   load_from_s + load_s / layers + compute_s
last late    load_from_s + load_s + compute_s / layers
```

Layers that differ, or few buffers, need the recurrence, O(layers). Seconds throughout. Asked by
costing/load_controller.py, costing/blend_controller.py, costing/node_service.py and the simulator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple


class PipelineEnds(NamedTuple):
    """The three sums of which the largest is when a pipeline of equal layers ends.

    Attributes:
        busy_s: the node is busy until then.
        first_late_s: computing waits for the first layer, and then never again.
        last_late_s: the last layer arrives late, and one layer's computing follows.
    """

    busy_s: float
    first_late_s: float
    last_late_s: float

    def latest(self, most: Callable[..., Any] = max) -> Any:
        """Return when the last layer is computed; for columns, ``most`` is ``numpy.maximum``."""
        return most(most(self.busy_s, self.first_late_s), self.last_late_s)


def pipeline_ends(
    load_s: float, compute_s: float, layers: int, *, load_from_s: float, compute_from_s: float
) -> PipelineEnds:
    """Load and compute equal layers, each computed once it is there; O(1), columns as well.

    Args:
        load_s: seconds to load all layers.
        compute_s: seconds to compute all layers.
        layers: how many.
        load_from_s: when loading begins.
        compute_from_s: when computing may begin.
    """
    return PipelineEnds(
        compute_from_s + compute_s,
        load_from_s + load_s / layers + compute_s,
        load_from_s + load_s + compute_s / layers,
    )


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
