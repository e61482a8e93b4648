"""The list of compute nodes, and a connection to each node.

Used by scheduler/dispatcher.py. A front asks the meta server; a process with embedded nodes passes
their clients in. Failures are raised unchanged: the dispatcher decides what a failure means.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Protocol

from tierkv.compute.client import ComputeClient
from tierkv.kvcore.errors import (
    CacheError,
    DirectoryUnavailableError,
    NodeRefusedError,
    TierKVError,
    TransportError,
)
from tierkv.kvcore.ids import Incarnation, NodeId
from tierkv.kvcore.node import NodeInfo, NodeReport, NodeRole
from tierkv.metaserver.client import DirectoryNode, MetaClient
from tierkv.scheduler.events import SeenNode

Connect = Callable[[NodeInfo], ComputeClient]
"""Makes a client for a node; does no I/O itself (gRPC channels connect when first used)."""

StartNodes = Callable[[], Awaitable[Sequence[ComputeClient]]]
"""Starts the compute nodes of this process and waits until they run; raises the cause of a failure.
"""

FORGET_AFTER_LOOKS = 60
"""A connection is closed after its node was missing from this number of refreshes."""

LIST_TIMEOUT_S = 2.0
"""For the meta server's list, while remembered nodes can be asked instead."""

PROBE_TIMEOUT_S = 2.0
"""For a remembered node to describe itself."""


class NodeMemory(Protocol):
    """Keeps the list of nodes from one run of a front to the next."""

    def load(self) -> tuple[tuple[DirectoryNode, ...], str]: ...

    def note(self, nodes: Sequence[DirectoryNode], default_model: str) -> None: ...


class ClusterView:
    """The compute nodes and their clients.

    Attributes:
        nodes: all nodes of the last refresh, including DMP and front processes (for the views).
        default_model: the last model that was the only model; empty before the first. A second
            model does not change the meaning of calls without a model name.
        from_memory: the nodes are remembered ones: no meta server has answered since the start.
    """

    def __init__(
        self,
        *,
        meta: MetaClient | None = None,
        connect: Connect | None = None,
        fixed: Sequence[ComputeClient] = (),
        start_nodes: StartNodes | None = None,
        memory: NodeMemory | None = None,
    ) -> None:
        """Watch a cluster, or a fixed set of nodes.

        Args:
            meta: lists the nodes; not needed with ``fixed``.
            connect: makes clients of listed nodes.
            fixed: the compute nodes of this process. The list of ``meta`` is then not used for
                routing, and these clients are not closed here.
            start_nodes: returns the ``fixed`` clients at the first ``wake``; the list is empty
                before.
            memory: nodes of the last run, asked until the meta server answers for the first time.
        """
        self._memory = memory
        self._remembered, self.default_model = memory.load() if memory else ((), "")
        self.from_memory = False
        self.nodes: tuple[DirectoryNode, ...] = ()
        self._meta = meta
        self._connect = connect
        self._fixed = tuple(fixed)
        self._start_nodes = start_nodes
        self._fixed_by_id: dict[NodeId, ComputeClient] = {}
        self._infos: dict[NodeId, NodeInfo] = {}
        self._missing: dict[NodeId, int] = {}
        self._clients: dict[NodeId, tuple[Incarnation, ComputeClient]] = {}
        self._retired: list[ComputeClient] = []

    @property
    def pool_nodes(self) -> int:
        """Number of live pool nodes shared by the compute nodes; 0 if none is listed."""
        return sum(s.info.role is NodeRole.DMP and s.state == "alive" for s in self.nodes)

    @property
    def asleep(self) -> bool:
        """Return whether the nodes of this process still have to be started."""
        return self._start_nodes is not None and not self._fixed

    async def wake(self) -> None:
        """Start the nodes of this process, if they start on demand and have not started.

        Raises:
            TierKVError: the nodes can't start.
        """
        if self._start_nodes is not None and not self._fixed:
            self._fixed = tuple(await self._start_nodes())

    async def refresh(self) -> tuple[SeenNode, ...]:
        """Refresh the list of compute nodes.

        Raises:
            DirectoryUnavailableError: the meta server did not answer.
            TransportError: a fixed node did not answer.
        """
        if self._fixed:
            return await self._describe_fixed()
        if self._meta is None or self._start_nodes is not None:
            return ()
        self.nodes = await self._list(self._meta)
        compute = _computing(self.nodes)
        self._note_default(compute)
        if self._memory is not None and compute and not self.from_memory:
            self._memory.note(self.nodes, self.default_model)
        for state in compute:
            self._infos[state.info.node_id] = state.info
        await self._close_retired()
        self._retire({s.info.node_id for s in compute})
        return tuple(SeenNode(s.info, s.report.load, s.state) for s in compute)

    async def _list(self, meta: MetaClient) -> tuple[DirectoryNode, ...]:
        """Ask the meta server; until its first answer, fall back to the remembered nodes."""
        if not self._remembered:
            return await meta.list_nodes()
        try:
            async with asyncio.timeout(LIST_TIMEOUT_S):
                nodes = await meta.list_nodes()
        except (TimeoutError, DirectoryUnavailableError):
            self.from_memory = True
            return await self._probe_remembered()
        self.from_memory, self._remembered = False, ()
        return nodes

    async def _probe_remembered(self) -> tuple[DirectoryNode, ...]:
        """Ask remembered compute nodes for their state; no answer counts as dead."""
        probed = await asyncio.gather(*map(self._probe, _computing(self._remembered)))
        others = [s for s in self._remembered if s not in _computing(self._remembered)]
        self._remembered = (*probed, *(replace(s, state="dead") for s in others))
        return self._remembered

    async def _probe(self, known: DirectoryNode) -> DirectoryNode:
        node_id = known.info.node_id
        self._infos.setdefault(node_id, known.info)
        client = self.client(node_id, self._infos[node_id].incarnation)
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                info, report = await client.describe()
        except (TimeoutError, CacheError, NodeRefusedError):
            return replace(known, state="dead")
        if info.node_id != node_id:  # Another node has the address now.
            return replace(known, state="dead")
        return DirectoryNode(info, report, heartbeat_age_s=0.0, state="alive")

    def _note_default(self, compute: Sequence[DirectoryNode]) -> None:
        names = {model.name for state in compute for model in state.info.models}
        if len(names) == 1:
            (self.default_model,) = names

    async def _describe_fixed(self) -> tuple[SeenNode, ...]:
        seen: list[SeenNode] = []
        states: list[DirectoryNode] = []
        for client in self._fixed:
            info, report = await client.describe()
            self._fixed_by_id[info.node_id] = client
            seen.append(SeenNode(info, report.load))
            states.append(DirectoryNode(info, report, heartbeat_age_s=0.0, state="alive"))
        self.nodes = tuple(states)
        return tuple(seen)

    async def fresh_reports(self, timeout_s: float) -> dict[NodeId, NodeReport]:
        """Ask all compute nodes at once for their current report.

        A node without an answer in time is left out; the caller then uses its last heartbeat.
        """
        clients = dict(self._fixed_by_id)
        for state in self.nodes:
            info = state.info
            if state.state == "alive" and info.node_id in self._infos:
                with suppress(TransportError):
                    clients[info.node_id] = self.client(info.node_id, info.incarnation)
        asked = (self._fresh_report(client, timeout_s) for client in clients.values())
        reports = await asyncio.gather(*asked)
        named = zip(clients, reports, strict=True)
        return {node_id: report for node_id, report in named if report is not None}

    @staticmethod
    async def _fresh_report(client: ComputeClient, timeout_s: float) -> NodeReport | None:
        with suppress(TierKVError, TimeoutError):
            async with asyncio.timeout(timeout_s):
                _, report = await client.describe()
                return report
        return None

    def compute_clients(self, model: str) -> list[ComputeClient]:
        """Return the connections to all nodes of a model that are not known to be dead.

        Raises:
            TransportError: a node was restarted since the last refresh.
        """
        served = (
            node.info
            for node in _computing(self.nodes)
            if node.state != "dead" and any(model == each.name for each in node.info.models)
        )
        return [self.client(info.node_id, info.incarnation) for info in served]

    @property
    def pool_node_ids(self) -> frozenset[str]:
        """Names of the pool nodes, dead ones too; a node that was removed for good is not one."""
        return frozenset(n.info.node_id for n in self.nodes if n.info.role is NodeRole.DMP)

    @property
    def node_ids(self) -> frozenset[str]:
        """Names of the listed compute and pool nodes."""
        return self.pool_node_ids | {node.info.node_id for node in _computing(self.nodes)}

    @property
    def pool_starts(self) -> frozenset[tuple[NodeId, Incarnation]]:
        """The pool nodes with the number of each node's start."""
        pool = (n.info for n in self.nodes if n.info.role is NodeRole.DMP)
        return frozenset((info.node_id, info.incarnation) for info in pool)

    @property
    def pool_bytes(self) -> int:
        """Memory of all pool nodes."""
        return sum(n.info.capacity_bytes for n in self.nodes if n.info.role is NodeRole.DMP)

    def client(self, node_id: NodeId, incarnation: Incarnation) -> ComputeClient:
        """Return the connection to one incarnation of a node.

        Raises:
            TransportError: the incarnation has ended, or the node was never seen.
        """
        if node_id in self._fixed_by_id:
            return self._fixed_by_id[node_id]
        info = self._infos.get(node_id)
        if info is None or info.incarnation != incarnation or self._connect is None:
            raise TransportError(
                f"node {node_id} ({incarnation}) has left the cluster or was restarted"
            )
        known = self._clients.get(node_id)
        if known is None or known[0] != incarnation:
            known = (incarnation, self._connect(info))
            self._clients[node_id] = known
        return known[1]

    def _retire(self, listed: set[NodeId]) -> None:
        """Retire connections to earlier incarnations and to nodes missing for too long.

        Retired connections are closed at the next refresh: by then their requests have moved on.
        """
        for node_id in list(self._infos):
            self._missing[node_id] = 0 if node_id in listed else self._missing.get(node_id, 0) + 1
            gone = self._missing[node_id] >= FORGET_AFTER_LOOKS
            info = self._infos[node_id]
            known = self._clients.get(node_id)
            if known is not None and (gone or known[0] != info.incarnation):
                del self._clients[node_id]
                self._retired.append(known[1])
            if gone:
                del self._infos[node_id], self._missing[node_id]

    async def _close_retired(self) -> None:
        retired, self._retired = self._retired, []
        for client in retired:
            await client.close()

    async def close(self) -> None:
        """Close every connection made here."""
        self._retired += [client for _, client in self._clients.values()]
        self._clients.clear()
        await self._close_retired()


def _computing(nodes: Sequence[DirectoryNode]) -> list[DirectoryNode]:
    return [s for s in nodes if s.info.role.prefills or s.info.role.decodes]
