"""Membership and directory together: what the meta server knows, as one pure core.

Called by metaserver/local.py with ``now``; every call first lets silent nodes die, so that no
background task is needed and virtual time works in tests. Nothing here is durable.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvcore.block_event import EventBatch
from kvcore.ids import BlockKey, Incarnation, NodeId
from kvcore.node import NodeInfo, NodeReport
from metaserver.client import (
    BlockListing,
    HeartbeatReply,
    LocateReply,
    NodeState,
    Registration,
    ReportReply,
)
from metaserver.config import MetaConfig
from metaserver.directory import Directory
from metaserver.membership import Membership


class MetaState:
    """Soft state of the cluster: lost with the process, rebuilt from what nodes report.

    Attributes:
        directory: blocks of exactly the nodes that ``membership`` has and that are not dead.
    """

    def __init__(self, config: MetaConfig) -> None:
        self._config = config
        self._membership = Membership(config)
        self.directory = Directory()

    def register(self, info: NodeInfo, now: float) -> Registration:
        """Take a node in; StaleEpochError when a newer incarnation of it is alive."""
        self._expire(now)
        self._membership.register(info, now)
        self.directory.add_node(info)
        return Registration(
            heartbeat_interval_s=self._config.heartbeat_interval_s,
            send_inventory=self.directory.wants_inventory(info.node_id),
        )

    def heartbeat(
        self, node_id: NodeId, incarnation: Incarnation, report: NodeReport, now: float
    ) -> HeartbeatReply:
        """Note a sign of life and the node's load."""
        self._expire(now)
        known = self._membership.heartbeat(node_id, incarnation, report, now)
        wanted = known and self.directory.wants_inventory(node_id)
        return HeartbeatReply(known=known, send_inventory=wanted)

    def deregister(self, node_id: NodeId, incarnation: Incarnation) -> None:
        """Forget a node that leaves; another incarnation's leave is ignored."""
        if self._membership.deregister(node_id, incarnation):
            self.directory.drop_node(node_id)

    def report(self, batch: EventBatch, now: float) -> ReportReply:
        """Take in block events; idempotent by (node_id, incarnation, seq)."""
        self._expire(now)
        accepted = self.directory.apply(batch, now)
        wanted = accepted and self.directory.wants_inventory(batch.node_id)
        return ReportReply(accepted=accepted, send_inventory=wanted)

    def locate(self, keys: Sequence[BlockKey], now: float) -> LocateReply:
        """Find a chain; see Directory.locate."""
        self._expire(now)
        return self.directory.locate(keys, now)

    def list_nodes(self, now: float) -> tuple[NodeState, ...]:
        """Return every node not yet forgotten."""
        self._expire(now)
        return self._membership.nodes(now)

    def list_blocks(self, limit: int, now: float) -> BlockListing:
        """Return up to ``limit`` copies of blocks."""
        self._expire(now)
        return self.directory.list_blocks(limit, now)

    def check_invariants(self, now: float) -> None:
        """Assert that the directory is sound and knows exactly the nodes that live."""
        self.directory.check_invariants()
        living = {n.info.node_id for n in self._membership.nodes(now) if n.state != "dead"}
        assert set(self.directory.node_ids()) == living

    def _expire(self, now: float) -> None:
        for node_id in self._membership.expire(now):
            self.directory.drop_node(node_id)
