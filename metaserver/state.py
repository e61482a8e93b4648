"""The meta server's soft state as one pure core: the members with their liveness, the directory.

Called by metaserver/local.py with ``now``; never reads a clock. Every call first expires silent
nodes, so no background task is needed and virtual time works in tests. ``Membership`` never touches
blocks: it returns dead nodes, and ``MetaState`` drops their blocks. Nothing here is durable.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import blake2b
from typing import Final

from tierkv.kvcore import limits
from tierkv.kvcore.block_event import LeaseId
from tierkv.kvcore.errors import OverloadedError, StaleEpochError
from tierkv.kvcore.ids import HostId, Incarnation, NodeId
from tierkv.kvcore.node import NodeInfo, NodeReport, NodeRole
from tierkv.kvwire.event_records import EventRecords
from tierkv.metaserver.client import (
    LOOK_ONLY,
    MAX_LISTED_REPLICAS,
    BlockListing,
    DirectoryNode,
    HeartbeatReply,
    LocateReply,
    Registration,
    ReportReply,
)
from tierkv.metaserver.config import MetaConfig
from tierkv.metaserver.directory.directory import Directory, Found
from tierkv.metaserver.directory.leases import Asked, LeaseChange, Leases

Orders = tuple[Asked, ...]
ALIVE, SUSPECT, DEAD = "alive", "suspect", "dead"

_RIVAL_SHOWN_S: Final = 10.0
"""How long a refused rival of a node is shown; a rival asks again every few seconds."""


@dataclass(slots=True)
class _Member:
    info: NodeInfo
    report: NodeReport
    heard_at: float
    home: str = ""
    dead: bool = False
    rival: str = ""
    rival_at: float = 0.0


class Membership:
    """The nodes of the cluster by incarnation and last sign of life.

    Silence alone moves a node alive -> suspect -> dead -> forgotten. Dead is final for a
    registration: the node must register again and then sends an inventory.

    Attributes:
        _members: all nodes not yet forgotten, including dead nodes.
        _next_look_at: no node can die before this moment; saves a scan per call.
        _pool_version: of the live pool nodes; 0 after a change, until it is asked for.
    """

    def __init__(self, config: MetaConfig) -> None:
        self._config = config
        self._members: dict[NodeId, _Member] = {}
        self._next_look_at = float("-inf")
        self._pool_version = 0

    @property
    def pool_version(self) -> int:
        """A number that differs after a pool node came, left or died; never 0."""
        if not self._pool_version:
            pool = sorted(
                (node_id, member.info.incarnation)
                for node_id, member in self._members.items()
                if member.info.role is NodeRole.DMP and not member.dead
            )
            digest = blake2b(repr(pool).encode(), digest_size=8).digest()
            self._pool_version = int.from_bytes(digest, "little") | 1
        return self._pool_version

    def register(self, info: NodeInfo, now: float, *, home: str = "") -> None:
        """Add a node or renew its registration.

        A newer incarnation is a restart of the node, unless the home differs. With another home the
        old incarnation may still be running, and the new one waits until the old one is dead.

        Args:
            info: the node.
            now: current time.
            home: an address that a single process of this name can have at a time; empty if
                unknown.

        Raises:
            StaleEpochError: a newer incarnation of the node is alive, or an incarnation at another
                home.
            OverloadedError: the cluster is full.
        """
        known = self._members.get(info.node_id)
        if known and not known.dead and known.info.incarnation != info.incarnation:
            _refuse_rival(known, info, home, now)
        if known is None and len(self._members) >= limits.MAX_NODES:
            raise OverloadedError(f"the cluster already has {limits.MAX_NODES} nodes")
        same = known is not None and known.info.incarnation == info.incarnation
        report = known.report if known is not None and same else NodeReport()
        self._members[info.node_id] = _Member(info, report, heard_at=now, home=home)
        self._pool_version = 0

    def heartbeat(
        self, node_id: NodeId, incarnation: Incarnation, report: NodeReport, now: float
    ) -> bool:
        """Record a sign of life; return False when the incarnation must register (again)."""
        member = self._members.get(node_id)
        if member is None or member.dead or member.info.incarnation != incarnation:
            return False
        member.heard_at = now
        member.report = report
        return True

    def deregister(self, node_id: NodeId, incarnation: Incarnation) -> bool:
        """Remove a leaving node; return False when another incarnation is registered."""
        member = self._members.get(node_id)
        if member is None or member.info.incarnation != incarnation:
            return False
        del self._members[node_id]
        self._pool_version = 0
        return True

    def expire(self, now: float) -> list[NodeId]:
        """Return nodes that died since the last call; forget nodes after a long silence."""
        if now < self._next_look_at:
            return []
        self._next_look_at = now + self._config.heartbeat_interval_s / 4
        died = []
        for node_id, member in list(self._members.items()):
            silence_s = now - member.heard_at
            if silence_s >= self._config.dead_after_s and not member.dead:
                member.dead = True
                self._pool_version = 0
                died.append(node_id)
            if silence_s >= self._config.forget_after_s:
                del self._members[node_id]
        return died

    def nodes(self, now: float) -> tuple[DirectoryNode, ...]:
        """Return every node with its state, sorted by name."""
        return tuple(
            DirectoryNode(
                info=member.info,
                report=member.report,
                heartbeat_age_s=max(0.0, now - member.heard_at),
                state=self._state_of(member, now),
                rival=member.rival if now - member.rival_at <= _RIVAL_SHOWN_S else "",
            )
            for _, member in sorted(self._members.items())
        )

    def _state_of(self, member: _Member, now: float) -> str:
        if member.dead:
            return DEAD
        return SUSPECT if now - member.heard_at >= self._config.suspect_after_s else ALIVE


def _refuse_rival(known: _Member, info: NodeInfo, home: str, now: float) -> None:
    """Raise StaleEpochError unless a process is the restart of a live node."""
    mine, others = known.info.incarnation, info.incarnation
    elsewhere = home and known.home and home != known.home
    if not elsewhere and mine < others:
        return
    why = (
        f"at {_place_of(known.info)}" if elsewhere else f"as incarnation {mine}; {others} is older"
    )
    known.rival, known.rival_at = _place_of(info), now
    raise StaleEpochError(
        f"node {info.node_id} is already running {why}",
        hint="Give each running node its own node id (--node-id), or stop the other one.",
    )


def _place_of(info: NodeInfo) -> str:
    address = info.control_address or info.data_address
    return f"{address} (host {info.host})"[: limits.MAX_REASON_CHARS] if address else info.host


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
        return HeartbeatReply(known, wanted, self._membership.pool_version)

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
        return self._reserved(found, reserve_s, now)

    def locate_many(
        self, chains: Sequence[bytes], now: float, *, reserve_s: float = 0.0
    ) -> list[Located]:
        """Find several chains; see MetaClient.locate_many."""
        self._expire(now)
        found = self.directory.find_many(chains, now, use=not reserve_s)
        return [self._reserved(each, reserve_s, now) for each in found]

    def _reserved(self, found: Found, reserve_s: float, now: float) -> Located:
        if reserve_s in (0.0, LOOK_ONLY) or not found.chain:
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
