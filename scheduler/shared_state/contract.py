"""The contract of what several fronts share, and the values in it.

Implemented by shared_state/valkey.py. Shared state may be lost at any time: each front goes on with
what it knows itself, and with the nodes' heartbeats.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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
