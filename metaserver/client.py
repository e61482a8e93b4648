"""The meta server's interface for other rooms: one Protocol, in process or over gRPC.

The scheduler asks for the location of chains and for live nodes; nodes register and send heartbeats
and block events. Values are frozen dataclasses. Every failure of the server is
DirectoryUnavailableError, which means "no hits", never an error to a user.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from tierkv.kvcore.block import BlockSpec, Replica
from tierkv.kvcore.block_event import NO_LEASE, EventBatch, HoldOrder, LeaseId
from tierkv.kvcore.ids import BlockKey, HostId, Incarnation, NamespaceKey, NodeId
from tierkv.kvcore.node import NodeInfo, NodeReport
from tierkv.kvcore.request import ReusePolicy

MAX_LISTED_REPLICAS: Final = 4
"""Default number of replicas listed per block in a locate reply."""

LOOK_ONLY: Final = float("-inf")
"""Value of ``reserve_s`` for a locate that only looks: no lease, and no use of the blocks."""


@dataclass(frozen=True, slots=True)
class Registration:
    """Answer to a node's registration."""

    heartbeat_interval_s: float
    send_inventory: bool


@dataclass(frozen=True, slots=True)
class HeartbeatReply:
    """The answer to a sign of life.

    Attributes:
        known: False: register again.
        send_inventory: report all blocks held.
        pool_version: differs after a pool node came, left or died; 0: unknown. Spares a list.
        namespaces_version: differs after a namespace changed; 0: unknown.
    """

    known: bool
    send_inventory: bool
    pool_version: int = 0
    namespaces_version: int = 0


@dataclass(frozen=True, slots=True)
class ReportReply:
    """``accepted`` False: stale incarnation. ``send_inventory``: a gap was seen."""

    accepted: bool
    send_inventory: bool


@dataclass(frozen=True, slots=True)
class NodeCoverage:
    """The part of a chain near a compute node.

    Attributes:
        node_id: the compute node.
        l1_blocks: longest prefix in the node's own L1.
        l2_blocks: longest prefix in the node's L1 or in the DMP memory of its host.
    """

    node_id: NodeId
    l1_blocks: int
    l2_blocks: int


@dataclass(frozen=True, slots=True)
class LocateReply:
    """Location of a chain.

    Attributes:
        replicas: per block of the longest known pool prefix (L2-L4), its replicas, best first for
            the given reader; never empty inside the prefix. Empty if no replicas were asked for.
        coverage: compute nodes with at least one block in L1 or on their host.
        prefix_blocks: blocks of the longest prefix in the pool (L2-L4).
        memory_blocks: blocks of the longest prefix in DMP memory of any node, without disks.
        lease: lease on the blocks found; NO_LEASE when nothing was reserved.
    """

    replicas: Sequence[tuple[Replica, ...]] = ()
    coverage: tuple[NodeCoverage, ...] = ()
    prefix_blocks: int = 0
    memory_blocks: int = 0
    lease: LeaseId = NO_LEASE


@dataclass(frozen=True, slots=True)
class NamespaceGrant:
    """The hash key for a tenant's blocks of one model and layout.

    ``version`` is the namespace's, and already part of the key: blocks carry the version, and nodes
    thereby find blocks of older versions.
    """

    namespace_key: NamespaceKey
    domain: str
    cache_enabled: bool
    policy: ReusePolicy = field(default_factory=ReusePolicy)
    version: str = ""


@dataclass(frozen=True, slots=True)
class DirectoryNode:
    """A node in the directory.

    Attributes:
        state: ``alive``, ``suspect`` or ``dead``.
        rival: address of another process refused under the node's name; otherwise empty.
    """

    info: NodeInfo
    report: NodeReport
    heartbeat_age_s: float
    state: str
    rival: str = ""

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes to people: the node's own notes, and the meta server's note about a rival."""
        if not self.rival:
            return self.report.notes
        rival = f"a process at {self.rival} wants this node id and is refused: change its --node-id"
        return (*self.report.notes, rival)


@dataclass(frozen=True, slots=True)
class BlockRecord:
    """One copy of a block, for the admin view; ages are seconds.

    ``heat`` is uses per hour, fading; ``leases`` counts live leases covering the block. The
    directory knows neither the ranges nor the outlook of a block.
    """

    block: BlockSpec
    node_id: NodeId
    tier: str
    size_bytes: int
    age_s: float
    idle_s: float
    hits: int
    heat: float = 0.0
    leases: int = 0


@dataclass(frozen=True, slots=True)
class BlockListing:
    """Some block records, and the total number of records."""

    blocks: tuple[BlockRecord, ...]
    total: int


@dataclass(frozen=True, slots=True)
class KvLimits:
    """What a namespace may keep in the pool's memory.

    Attributes:
        capacity_bytes: slot bytes over all pool nodes; each node allows its share, by its part of
            the pool's memory. 0: no limit.
        ttl_s: seconds after which an unused block is removed; 0: never.
        evicts: whether a new block takes the place of the namespace's own blocks once the capacity
            is used; otherwise it is not stored.
        eviction: name of the policy that chooses among the namespace's own blocks
            (policies/select.py); empty: each node's own.
        version: part of the blocks' names; blocks of another version are never read again, and are
            removed.
        disk_capacity_bytes: bytes of blocks on the disks of all pool nodes, shared out in the same
            way. 0: no limit.
        read_bytes_per_s: bytes read from all pool nodes, on average, shared out in the same way.
            0: no limit.
        write_bytes_per_s: the same of bytes written.
        requests_per_s: transfers from and to all pool nodes, on average. 0.0: no limit.
        weight: share of a busy pool node's transfers; 0.0: the default, 1.
        media: ``memory`` or ``disk`` if blocks stay in only one of them; empty: both.
        model: name of the only model whose KV belongs to the namespace; empty: all models.
    """

    capacity_bytes: int = 0
    ttl_s: float = 0.0
    evicts: bool = True
    eviction: str = ""
    version: str = ""
    disk_capacity_bytes: int = 0
    read_bytes_per_s: int = 0
    write_bytes_per_s: int = 0
    requests_per_s: float = 0.0
    weight: float = 0.0
    media: str = ""
    model: str = ""


@dataclass(frozen=True, slots=True)
class Namespace:
    """A durable isolation domain shared by ``tenants``; without any, only for tenant ``name``.

    Attributes:
        name: the namespace.
        tenants: who shares it.
        cache_enabled: whether its KV is kept at all.
        policy: how far answers may depart from exact ones.
        limits: what it may keep; None: all it wants, and in a change: as it was.
    """

    name: str
    tenants: tuple[str, ...] = ()
    cache_enabled: bool = True
    policy: ReusePolicy = field(default_factory=ReusePolicy)
    limits: KvLimits | None = None

    @property
    def model(self) -> str:
        """Name of the only model that it applies to; empty: all models."""
        return "" if self.limits is None else self.limits.model

    @property
    def members(self) -> tuple[str, ...]:
        """The tenants that it applies to."""
        return self.tenants or (self.name,)


@dataclass(frozen=True, slots=True)
class ClusterRecord:
    """Something durable besides namespaces: a limit of calls, a REST key, a line of the audit log.

    Attributes:
        kind: what it is; kvcore and dbfront know the kinds, the meta server does not.
        name: unique among the records of the kind.
        body: JSON text; empty removes the record.
    """

    kind: str
    name: str
    body: str


class MetaClient(Protocol):
    """The interface of the meta server.

    1. Every method raises DirectoryUnavailableError when the server can't be reached in time, and
       after ``close``.
    2. ``locate`` takes at most limits.MAX_CHAIN_BLOCKS keys, in chain order, in one round trip;
       more is a LocalProtocolError. It lists up to ``max_replicas`` replicas per block, replicas on
       host ``reader`` first. With ``reserve_s`` it reserves the blocks found: the nodes holding the
       blocks are asked to keep them until the lease is ended or this time is over. With 0.0 it
       counts as a use of the blocks found, and with LOOK_ONLY it changes nothing.
    3. ``report_events`` is idempotent by (node_id, incarnation, seq).
    4. ``register`` raises StaleEpochError while a newer incarnation of the node is alive, or an
       incarnation at another home.
    5. ``extend_lease`` sets a new time from now; ``end_lease`` commits (``used``: counts as a use
       of the blocks) or aborts. Both return False for an unknown or expired lease.
    6. ``holds`` yields a node's hold orders, first all orders active at the time, until the
       iterator is closed. It ends with DirectoryUnavailableError when the server is lost, and at
       once for an unregistered node.
    7. ``directory_counts`` are blocks, copies, leases and refusals by reason, by name; all except
       ``blocks``, ``copies``, ``table_bytes`` and ``leases_live`` only grow.
    8. ``resolve_namespace`` and ``put_namespace`` raise UserError for invalid names.
       ``drop_namespace`` returns whether there was one; its tenants have the defaults again.
    9. ``put_record`` makes, replaces or removes a record, durable on return, and returns whether
       there was one. UserError for a malformed name, too long a body, or too many records. Of the
       audit log the latest limits.MAX_AUDIT_RECORDS by name are kept. ``list_records`` returns the
       records of a kind by name.
    10. ``blocks_after`` returns the known blocks after the given blocks, direct and indirect
        followers, each with the preceding block; a parent comes before the parent's children.
        DirectoryUnavailableError while a node has not told all of its blocks.
    """

    async def register(self, info: NodeInfo) -> Registration: ...

    async def heartbeat(
        self, node_id: NodeId, incarnation: Incarnation, report: NodeReport
    ) -> HeartbeatReply: ...

    async def deregister(self, node_id: NodeId, incarnation: Incarnation) -> None: ...

    async def report_events(self, batch: EventBatch) -> ReportReply: ...

    async def locate(
        self,
        keys: Sequence[BlockKey],
        *,
        reader: HostId | None = None,
        max_replicas: int = MAX_LISTED_REPLICAS,
        reserve_s: float = 0.0,
    ) -> LocateReply: ...

    async def locate_many(
        self, chains: Sequence[Sequence[BlockKey]], *, reserve_s: float = 0.0
    ) -> list[LocateReply]: ...

    async def extend_lease(self, lease: LeaseId, *, ttl_s: float) -> bool: ...

    async def end_lease(self, lease: LeaseId, *, used: bool) -> bool: ...

    def holds(
        self, node_id: NodeId, incarnation: Incarnation
    ) -> AsyncGenerator[HoldOrder, None]: ...

    async def resolve_namespace(
        self, tenant: str, *, model_revision: str, layout_fingerprint: bytes, model: str = ""
    ) -> NamespaceGrant: ...

    async def list_nodes(self) -> tuple[DirectoryNode, ...]: ...

    async def list_blocks(self, limit: int) -> BlockListing: ...

    async def blocks_after(self, keys: Sequence[BlockKey]) -> dict[BlockKey, BlockKey]: ...

    async def directory_counts(self) -> tuple[tuple[str, int], ...]: ...

    async def list_namespaces(self) -> tuple[Namespace, ...]: ...

    async def put_namespace(self, namespace: Namespace) -> Namespace: ...

    async def drop_namespace(self, name: str) -> bool: ...

    async def list_records(self, kind: str) -> tuple[ClusterRecord, ...]: ...

    async def put_record(self, record: ClusterRecord) -> bool: ...

    async def close(self) -> None: ...
