"""The contract of what several fronts share, and the values in it.

Implemented by shared_state/valkey.py. Shared state may be lost at any time: each front goes on with
what it knows itself, and with the nodes' heartbeats.

``WorkExchange`` tells other fronts about this front's work at the nodes, and the scheduler about
others' work; scheduler/dispatcher.py runs it. The heartbeats tell the same up to a second later.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

from tierkv.kvcore.errors import TierKVError
from tierkv.kvcore.ids import NodeId

KEPT_S: Final = 3.0
"""How long a front's counts hold: a front that dies is forgotten after this time."""


class SharedStateLostError(TierKVError):
    """The shared state can't be reached; never reaches a user."""

    code = "shared_state_lost"


@dataclass(frozen=True, slots=True)
class FrontWork:
    """Work that fronts have at one node.

    Attributes:
        requests: requests sent and not ended.
        waiting_tokens: prompt tokens of those without a first token.
        fronts: how many fronts have such requests.
    """

    requests: int
    waiting_tokens: int
    fronts: int = 1


NO_WORK: Final = FrontWork(0, 0, fronts=0)


class SharedState(Protocol):
    """What the fronts of one cluster share."""

    async def exchange_work(
        self, front: str, own: Mapping[NodeId, FrontWork]
    ) -> Mapping[NodeId, FrontWork]:
        """Tell what a front has at the nodes; return what all other fronts together have.

        What was told before is replaced, and holds for ``KEPT_S``.

        Args:
            front: name of the front's process, unique in the cluster.
            own: the front's work by node; nodes without work are left out.

        Raises:
            SharedStateLostError: no answer; nothing is known about other fronts.
        """
        ...

    async def leave(self, front: str) -> None:
        """Forget a front's work now, if possible, and close connections; raise nothing."""
        ...


def summed(works: Iterable[Mapping[NodeId, FrontWork]]) -> dict[NodeId, FrontWork]:
    """Add up the work of several fronts, by node."""
    total: dict[NodeId, FrontWork] = {}
    for work in works:
        for node, more in work.items():
            so_far = total.get(node, NO_WORK)
            total[node] = FrontWork(
                so_far.requests + more.requests,
                so_far.waiting_tokens + more.waiting_tokens,
                so_far.fronts + more.fronts,
            )
    return total


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
