"""Tells other fronts about this front's work at the nodes, and the scheduler about others' work.

Run by scheduler/dispatcher.py. Without an answer the scheduler falls back to the nodes' heartbeats,
which tell the same up to a second later.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Final

from tierkv.kvcore.ids import NodeId
from tierkv.scheduler.shared_state.contract import FrontWork, SharedState, SharedStateLostError

log = logging.getLogger("tierkv.scheduler")

BUSY_S: Final = 0.05
"""Time between two exchanges while this front has work, and the longest delay of its first work."""

IDLE_S: Final = 1.0
"""Time between two exchanges without work, and after a failure."""


class WorkExchange:
    """Exchanges the work of one front with the others, until stopped.

    Attributes:
        trouble: why the last exchange failed; empty if it did not.
    """

    def __init__(
        self,
        shared: SharedState,
        front: str,
        own: Callable[[], Mapping[NodeId, FrontWork]],
        tell: Callable[[Mapping[NodeId, FrontWork]], None],
    ) -> None:
        """Prepare; ``start`` begins.

        Args:
            shared: where fronts meet; left by ``stop``.
            front: name of this process, unique in the cluster.
            own: returns this front's work by node.
            tell: takes the other fronts' work after each exchange.
        """
        self.trouble = ""
        self._shared = shared
        self._front = front
        self._own = own
        self._tell = tell
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to exchange in the background."""
        self._task = asyncio.create_task(self._run(), name="shared-state")

    async def stop(self) -> None:
        """Tell the others that this front has no work any more, and close."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None
        await self._shared.leave(self._front)

    async def _run(self) -> None:
        told: Mapping[NodeId, FrontWork] = {}
        rested_s = IDLE_S
        while True:
            own = self._own()
            if rested_s >= IDLE_S or ((own or told) and not self.trouble):
                await self._once(own)
                told, rested_s = own, 0.0
            await asyncio.sleep(BUSY_S)
            rested_s += BUSY_S

    async def _once(self, own: Mapping[NodeId, FrontWork]) -> None:
        try:
            others = await self._shared.exchange_work(self._front, own)
        except SharedStateLostError as error:
            if not self.trouble:
                log.warning("the shared state of the fronts can't be reached: %s", error.message)
            self.trouble = error.message
            return
        if self.trouble:
            log.info("the shared state of the fronts is back")
            self.trouble = ""
        self._tell(others)
