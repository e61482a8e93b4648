"""A load under way, and the forward pass that follows it layer by layer.

Used by the engine only. The pass stops where the next layer's KV has not arrived and goes on later,
so that no one else waits for it: not the batch, not a new request, not a cancellation.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass, field

from tierkv.compute.batching.batch_plan import Chunk, LoadOrder
from tierkv.compute.model.decoder import Outputs
from tierkv.compute.tiers.loader import LoadJob
from tierkv.compute.transfers.saves import NOTHING_SAVED, PassSave
from tierkv.kvcore.location import Tier

LayerSteps = Generator[int, None, Outputs]
"""A forward pass: yields each layer's number before computing it, returns what it gives."""


@dataclass(slots=True)
class BehindLoad:
    """A load, when to give up waiting for it, and what is computed behind it.

    Attributes:
        order: what is loaded, and for whom.
        job: how far the loader is.
        deadline_s: when the load counts as failed.
        began_s: when it was ordered.
        expected_s: when all is predicted to be there.
        tier_bytes: what is loaded, by the tier it comes from.
        chunk: the tokens computed behind it; None before that begins and after it was given up.
    """

    order: LoadOrder
    job: LoadJob
    deadline_s: float
    began_s: float = 0.0
    expected_s: float = 0.0
    tier_bytes: Mapping[Tier, int] = field(default_factory=dict)
    chunk: Chunk | None = None
    _saving: PassSave = NOTHING_SAVED
    _steps: LayerSteps | None = None
    _next_layer: int = 0

    @property
    def layers_ready(self) -> int:
        """How many layers have arrived."""
        return sum(ready.is_set() for ready in self.job.layer_ready)

    def bytes_left(self, tier: Tier) -> float:
        """How many bytes from that tier have not arrived."""
        if self.job.ended.is_set() or tier not in self.tier_bytes:
            return 0.0
        return self.tier_bytes[tier] * (1 - self.layers_ready / len(self.job.layer_ready))

    @property
    def whole(self) -> bool:
        """Whether every block of what arrived so far is good."""
        return self.job.good == len(self.job.pages)

    @property
    def can_begin(self) -> bool:
        """Whether layer 0 is there and nothing was begun yet."""
        return self.chunk is None and self.job.layer_ready[0].is_set() and self.whole

    @property
    def can_go_on(self) -> bool:
        """Whether the next layer of what was begun is there."""
        return self.chunk is not None and self.job.layer_ready[self._next_layer].is_set()

    def begin(self, chunk: Chunk, steps: LayerSteps, saving: PassSave) -> None:
        """Take over a forward pass that has not started; ``can_begin`` must hold."""
        self.chunk, self._saving = chunk, saving
        self._steps, self._next_layer = steps, next(steps)

    def take_saving(self) -> PassSave:
        """Hand out what the pass saves, and forget it: who gives the pass up ends it unkept."""
        saving, self._saving = self._saving, NOTHING_SAVED
        return saving

    def go_on(self) -> Outputs | None:
        """Compute one layer; returns the outputs after the last one. ``can_go_on`` must hold.

        A load that turned out short makes the pass void: it attends to blocks that are not there.
        """
        assert self._steps is not None
        if not self.whole:
            self.chunk = self._steps = None
            self.take_saving().end()
            return None
        try:
            self._next_layer = next(self._steps)
            self._saving.computed(self._next_layer)
        except StopIteration as end:
            self._saving.computed(len(self.job.layer_ready))
            outputs: Outputs = end.value
            return outputs
        return None
