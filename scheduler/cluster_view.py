"""Who is there: the list of compute nodes, and a connection to each.

Used by scheduler/dispatcher.py. A front asks the meta server; a process that has its nodes inside
hands them in. Failures are raised as they come: the dispatcher decides what they mean.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from compute.client import ComputeClient
from kvcore.errors import TransportError
from kvcore.ids import Incarnation, NodeId
from kvcore.node import NodeInfo, NodeRole
from metaserver.client import MetaClient, NodeState
from scheduler.events import SeenNode

Connect = Callable[[NodeInfo], ComputeClient]
"""Makes a client for a node; does no I/O itself (gRPC channels connect when first used)."""

FORGET_AFTER_LOOKS = 60
"""Connections to nodes that were missing from so many looks are closed."""


class ClusterView:
    """The compute nodes and their clients.

    Attributes:
        nodes: every node of the last look, DMP and front processes included (for the views).
    """

    def __init__(
        self,
        *,
        meta: MetaClient | None = None,
        connect: Connect | None = None,
        fixed: Sequence[ComputeClient] = (),
    ) -> None:
        """Watch a cluster, or a fixed set of nodes.

        Args:
            meta: lists the nodes; not needed with ``fixed``.
            connect: makes clients of listed nodes.
            fixed: the compute nodes of this process; the list of ``meta`` is then not used for
                routing, and these clients are not closed here.
        """
        self.nodes: tuple[NodeState, ...] = ()
        self._meta = meta
        self._connect = connect
        self._fixed = tuple(fixed)
        self._fixed_by_id: dict[NodeId, ComputeClient] = {}
        self._infos: dict[NodeId, NodeInfo] = {}
        self._missing: dict[NodeId, int] = {}
        self._clients: dict[NodeId, tuple[Incarnation, ComputeClient]] = {}
        self._retired: list[ComputeClient] = []

    @property
    def pool_nodes(self) -> int:
        """Live nodes whose memory and disks the compute nodes share; 0 when none are listed."""
        return sum(s.info.role is NodeRole.DMP and s.state == "alive" for s in self.nodes)

    async def refresh(self) -> tuple[SeenNode, ...]:
        """Look at the list of compute nodes.

        Raises:
            DirectoryUnavailableError: the meta server did not answer.
            TransportError: a fixed node did not.
        """
        if self._fixed:
            return await self._describe_fixed()
        if self._meta is None:
            return ()
        self.nodes = await self._meta.list_nodes()
        compute = [s for s in self.nodes if s.info.role.prefills or s.info.role.decodes]
        for state in compute:
            self._infos[state.info.node_id] = state.info
        await self._close_retired()
        self._retire({s.info.node_id for s in compute})
        return tuple(SeenNode(s.info, s.report.load, s.state) for s in compute)

    async def _describe_fixed(self) -> tuple[SeenNode, ...]:
        seen: list[SeenNode] = []
        states: list[NodeState] = []
        for client in self._fixed:
            info, report = await client.describe()
            self._fixed_by_id[info.node_id] = client
            seen.append(SeenNode(info, report.load))
            states.append(NodeState(info, report, heartbeat_age_s=0.0, state="alive"))
        self.nodes = tuple(states)
        return tuple(seen)

    def client(self, node_id: NodeId, incarnation: Incarnation) -> ComputeClient:
        """Return the connection to one life of a node.

        Raises:
            TransportError: that life is over, or the node was never seen.
        """
        if node_id in self._fixed_by_id:
            return self._fixed_by_id[node_id]
        info = self._infos.get(node_id)
        if info is None or info.incarnation != incarnation or self._connect is None:
            raise TransportError(f"node {node_id} ({incarnation}) is not there any more")
        known = self._clients.get(node_id)
        if known is None or known[0] != incarnation:
            known = (incarnation, self._connect(info))
            self._clients[node_id] = known
        return known[1]

    def _retire(self, listed: set[NodeId]) -> None:
        """Put aside connections to earlier lives, and to nodes that stayed away.

        They are closed at the next look: by then their requests have moved on.
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
