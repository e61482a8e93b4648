"""End of a prompt's computation when KV is loaded layer by layer and loads overlap computing.

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

Unequal layers or a limited number of buffers need the recurrence, O(layers). All times are seconds.
The callers are costing/load_controller.py, costing/blend_controller.py, costing/node_service.py and
the simulator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple


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
