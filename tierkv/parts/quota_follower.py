"""Keeps a pool node's quotas equal to the namespaces' limits, within a second of a change.

Part of a pool node's process (tierkv/parts/parts.py). Each node allows a namespace its share of the
capacity: as large a part as the node's memory is of all pool nodes' memory. The shares add up to
the capacity, so the whole pool keeps to it without a word between the nodes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

from tierkv.dmp.slots.accounts import Quota
from tierkv.kvcore import limits
from tierkv.kvcore.errors import DirectoryUnavailableError
from tierkv.kvcore.ids import NodeId
from tierkv.kvcore.node import NodeRole
from tierkv.metaserver.agent import NodeAgent
from tierkv.metaserver.client import DirectoryNode, KvLimits, MetaClient, Namespace

_log = logging.getLogger(__name__)
LOOK_S: Final = 0.5


class QuotaFollower:
    """Looks at the versions that heartbeats bring, and asks when one has changed."""

    def __init__(
        self,
        meta: MetaClient,
        agent: NodeAgent,
        node: NodeId,
        apply: Callable[[Sequence[Quota]], None],
    ) -> None:
        """Prepare; ``apply`` is called in a worker thread."""
        self._meta = meta
        self._agent = agent
        self._node = node
        self._apply = apply
        self._seen = (0, 0)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin in the background."""
        self._task = asyncio.create_task(self._follow())

    async def stop(self) -> None:
        """End."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def _follow(self) -> None:
        while True:
            versions = self._agent.namespaces_version, self._agent.pool_version
            if versions != self._seen and versions[0]:
                with suppress(DirectoryUnavailableError):
                    namespaces = await self._meta.list_namespaces()
                    nodes = await self._meta.list_nodes()
                    quotas = quotas_of(namespaces, nodes, self._node)
                    await asyncio.to_thread(self._apply, quotas)
                    self._seen = versions
            await asyncio.sleep(LOOK_S)


def quotas_of(
    namespaces: Sequence[Namespace], nodes: Sequence[DirectoryNode], own: NodeId
) -> list[Quota]:
    """Return the quotas of one pool node, for the namespaces that have limits."""
    sizes = {
        node.info.node_id: node.info.capacity_bytes
        for node in nodes
        if node.info.role is NodeRole.DMP and node.state != "dead"
    }
    share = sizes.get(own, 0) / max(1, sum(sizes.values())) if own in sizes else 1.0
    found = []
    for namespace in namespaces:
        kept = namespace.limits or KvLimits()
        if not kept.capacity_bytes and not kept.ttl_s:
            continue
        capacity = max(1, int(kept.capacity_bytes * share)) if kept.capacity_bytes else 0
        members = frozenset(namespace.members)
        found.append(Quota(namespace.name, members, capacity, kept.ttl_s, kept.evicts))
    if len(found) > limits.MAX_LIMITED_NAMESPACES:
        _log.error(
            "%d namespaces have limits, a pool node keeps %d of them",
            len(found), limits.MAX_LIMITED_NAMESPACES,
        )  # fmt: skip
    return found[: limits.MAX_LIMITED_NAMESPACES]
