"""Shared state in the memory of one process: for a single front, or several in a simulation."""

from __future__ import annotations

from collections.abc import Mapping

from tierkv.kvcore.clock import Clock
from tierkv.kvcore.ids import NodeId
from tierkv.scheduler.shared_state.contract import KEPT_S, FrontWork, summed


class EmbeddedState:
    """Implements SharedState; fronts share it by holding the same object."""

    def __init__(self, clock: Clock) -> None:
        """Create without fronts; ``clock`` ends the counts of lost fronts."""
        self._clock = clock
        self._told: dict[str, tuple[float, Mapping[NodeId, FrontWork]]] = {}

    async def exchange_work(
        self, front: str, own: Mapping[NodeId, FrontWork]
    ) -> Mapping[NodeId, FrontWork]:
        now = self._clock.now()
        self._told[front] = (now, dict(own))
        self._told = {
            name: (told_s, work)
            for name, (told_s, work) in self._told.items()
            if now - told_s < KEPT_S
        }
        return summed(work for name, (_, work) in self._told.items() if name != front)

    async def leave(self, front: str) -> None:
        self._told.pop(front, None)
