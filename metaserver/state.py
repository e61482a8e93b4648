"""Membership and directory together: the meta server's soft state as one pure core.

Called by metaserver/local.py with ``now``. Every call first expires silent nodes, so no background
task is needed and virtual time works in tests. Nothing here is durable.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

from tierkv.kvcore.hold import LeaseId
from tierkv.kvcore.ids import HostId, Incarnation, NodeId
from tierkv.kvcore.node import NodeInfo, NodeReport
from tierkv.kvwire.event_records import EventRecords
from tierkv.metaserver.client import (
    MAX_LISTED_REPLICAS,
    BlockListing,
    DirectoryNode,
    HeartbeatReply,
    LocateReply,
    Registration,
    ReportReply,
)
from tierkv.metaserver.config import MetaConfig
from tierkv.metaserver.directory.directory import Directory
from tierkv.metaserver.directory.leases import Asked, LeaseChange, Leases
from tierkv.metaserver.membership import Membership

Orders = tuple[Asked, ...]


@dataclass(frozen=True, slots=True)
class Located:
    """A locate reply, and hold orders for the nodes that keep the reserved blocks."""

    reply: LocateReply
    orders: Orders = ()


class MetaState:
    """Soft state of the cluster: lost with the process, rebuilt from reports of nodes.

    Attributes:
        directory: blocks of exactly the live (not dead) nodes of ``membership``.
        leases: live leases; all holders are nodes of ``directory``.
    """

    def __init__(self, config: MetaConfig, *, first_lease: int = 1) -> None:
        """Start empty; ``first_lease`` must be above all leases of earlier processes."""
        self._config = config
        self._membership = Membership(config)
        self.directory = Directory()
        self.leases = Leases(first_lease=first_lease)

    def register(self, info: NodeInfo, now: float, *, home: str = "") -> Registration:
        """Register a node; raise StaleEpochError if a rival of the same name is alive."""
        self._expire(now)
        self._membership.register(info, now, home=home)
        if self.directory.incarnation_of(info.node_id) != info.incarnation:
            self.leases.drop_node(info.node_id)
        self.directory.add_node(info)
        return Registration(
            heartbeat_interval_s=self._config.heartbeat_interval_s,
            send_inventory=self.directory.wants_inventory(info.node_id),
        )

    def heartbeat(
        self, node_id: NodeId, incarnation: Incarnation, report: NodeReport, now: float
    ) -> HeartbeatReply:
        """Record a sign of life and the node's load."""
        self._expire(now)
        known = self._membership.heartbeat(node_id, incarnation, report, now)
        wanted = known and self.directory.wants_inventory(node_id)
        return HeartbeatReply(known=known, send_inventory=wanted)

    def deregister(self, node_id: NodeId, incarnation: Incarnation) -> None:
        """Remove a leaving node; a leave of another incarnation is ignored."""
        if self._membership.deregister(node_id, incarnation):
            self._drop(node_id)

    def report(self, batch: EventRecords, now: float) -> ReportReply:
        """Apply block events; idempotent by (node_id, incarnation, seq)."""
        self._expire(now)
        accepted = self.directory.apply(batch, now)
        wanted = accepted and self.directory.wants_inventory(batch.node_id)
        return ReportReply(accepted=accepted, send_inventory=wanted)

    def locate(
        self,
        chain: bytes,
        now: float,
        *,
        reader: HostId | None = None,
        max_replicas: int = MAX_LISTED_REPLICAS,
        reserve_s: float = 0.0,
    ) -> Located:
        """Find a chain, and with ``reserve_s`` reserve the blocks found; see MetaClient.locate."""
        self._expire(now)
        found = self.directory.find(
            chain, now, reader=reader, max_replicas=max_replicas, use=not reserve_s
        )
        if not reserve_s or not found.chain:
            return Located(found.reply)
        held = self.directory.holders(found)
        change = self.leases.grant(found.chain, held, reserve_s, now)
        return Located(replace(found.reply, lease=change.lease), change.orders)

    def extend_lease(self, lease: LeaseId, ttl_s: float, now: float) -> LeaseChange:
        """Give a lease a new time from now."""
        self._expire(now)
        return self.leases.extend(lease, ttl_s, now)

    def end_lease(self, lease: LeaseId, now: float, *, used: bool) -> LeaseChange:
        """Commit or abort a lease; a commit counts as a use of the blocks found."""
        self._expire(now)
        change = self.leases.end(lease, used=used)
        if used:
            self.directory.use(change.chain, now)
        return change

    def orders_of(self, node_id: NodeId, incarnation: Incarnation, now: float) -> Orders | None:
        """Return all active orders of a node; None for an unknown incarnation."""
        self._expire(now)
        if self.directory.incarnation_of(node_id) != incarnation:
            return None
        return self.leases.orders_of(node_id, now)

    def list_nodes(self, now: float) -> tuple[DirectoryNode, ...]:
        """Return every node not yet forgotten."""
        self._expire(now)
        return self._membership.nodes(now)

    def list_blocks(self, limit: int, now: float) -> BlockListing:
        """Return up to ``limit`` copies of blocks."""
        self._expire(now)
        return self.directory.list_blocks(limit, now, leased=self.leases.chains())

    def counts(self, now: float) -> tuple[tuple[str, int], ...]:
        """Return current sizes and counts of refusals, sorted by name."""
        self._expire(now)
        ledger = self.directory.ledger
        found = {
            "blocks": len(ledger.blocks),
            "copies": len(ledger.copies),
            "table_bytes": ledger.blocks.nbytes + ledger.copies.nbytes,
            "stale_batches": self.directory.stale_batches,
            "leases_live": len(self.leases),
        }
        found |= {f"events_refused_{reason}": n for reason, n in ledger.refused.items()}
        found |= {f"leases_{what}": n for what, n in asdict(self.leases.counts).items()}
        return tuple(sorted(found.items()))

    def check_invariants(self, now: float) -> None:
        """Assert that the directory is consistent and knows exactly the live nodes."""
        self.directory.check_invariants()
        self.leases.check_invariants()
        living = {n.info.node_id for n in self._membership.nodes(now) if n.state != "dead"}
        assert set(self.directory.node_ids()) == living

    def _expire(self, now: float) -> None:
        self.leases.expire(now)
        for node_id in self._membership.expire(now):
            self._drop(node_id)

    def _drop(self, node_id: NodeId) -> None:
        self.directory.drop_node(node_id)
        self.leases.drop_node(node_id)
