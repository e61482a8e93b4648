"""Nodes as the cluster sees them: role, models, load and counters.

Nodes register a NodeInfo with the meta server and send NodeLoad and TierStats with each heartbeat.
The scheduler and the admin views read these values. A PreferredNode is the node that a statement's
plan prefers for a call.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from tierkv.kvcore.block import Tier
from tierkv.kvcore.ids import NO_ZONE, HostId, Incarnation, NodeId, ZoneId
from tierkv.kvcore.layout import BlockLayout


class NodeRole(StrEnum):
    """What a process does."""

    FRONT = "front"
    META = "meta"
    DMP = "dmp"
    PREFILL = "prefill"
    DECODE = "decode"
    COMPUTE = "compute"
    ENGINE = "engine"
    """A foreign engine that stores KV in the pool; receives no requests in this role."""

    @property
    def prefills(self) -> bool:
        """Whether the scheduler may send prompts to a node of this role."""
        return self in (NodeRole.PREFILL, NodeRole.COMPUTE)

    @property
    def decodes(self) -> bool:
        """Whether a node of this role continues an answer after the first token."""
        return self in (NodeRole.DECODE, NodeRole.COMPUTE)


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A model as served by a compute node.

    Attributes:
        name: name in requests.
        folder: path of the model files on the serving host; the front reads the tokenizer there.
        revision: hex digest of weights and configuration.
        layout: KV layout of its blocks.
        context_tokens: maximum of prompt plus completion tokens.
        eos_token_ids: ids that end an answer.
        architecture: for example ``LlamaForCausalLM``.
        parameters: number of weights.
        blend_refusal: reason for never blending chunks; empty if the model passed the gate.
        score_refusal: reason for not scoring single tokens; empty if supported.
        embed_refusal: reason for not giving embeddings; empty if supported.
        grammar_refusal: reason for not holding answers to a grammar; empty if supported.
        sampling_fields: fields of SamplingParams that the engine takes, of those in
            ``tierkv.kvcore.request.OPTIONAL_FIELDS``. A node of an older release names none.
    """

    name: str
    folder: str
    revision: str
    layout: BlockLayout
    context_tokens: int
    eos_token_ids: tuple[int, ...]
    architecture: str
    parameters: int
    blend_refusal: str = ""
    score_refusal: str = ""
    embed_refusal: str = ""
    grammar_refusal: str = ""
    sampling_fields: tuple[str, ...] = ()

    @property
    def identity(self) -> str:
        """Identify weights and KV layout; models of equal identity may share blocks."""
        return f"{self.revision}:{self.layout.fingerprint().hex()}"


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """A node's registration.

    Attributes:
        node_id: unique name.
        incarnation: grows with each start; messages of older incarnations are refused.
        role: the node's role.
        host: the node's machine; decides between L2 and L3.
        zone: the machine's zone; copies in the reader's zone come before others.
        control_address: ``host:port`` of the gRPC service; empty if in process.
        data_address: ``host:port`` of a DMP node's data plane, else empty.
        segment_path: a DMP node's segment file, mappable on the same host; else empty.
        capacity_bytes: memory for blocks (L1 pages or segment).
        models: models that a compute node serves.
    """

    node_id: NodeId
    incarnation: Incarnation
    role: NodeRole
    host: HostId
    zone: ZoneId = NO_ZONE
    control_address: str = ""
    data_address: str = ""
    segment_path: str = ""
    capacity_bytes: int = 0
    models: tuple[ModelInfo, ...] = ()


@dataclass(frozen=True, slots=True)
class NodeLoad:
    """How busy a node is; rates are measured online and 0.0 until known.

    Attributes:
        requests_running: requests in the batch.
        requests_waiting: requests queued.
        waiting_prefill_tokens: prompt tokens not yet computed, queued and running.
        kv_usage: share of L1 pages or segment bytes in use, 0.0 to 1.0.
        prefill_tokens_per_s: fitted prefill rate.
        decode_tokens_per_s: fitted decode rate of one request.
        l2_bytes_per_s: load rate from the host's segment.
        l3_bytes_per_s: load rate from other hosts' segments.
        l4_bytes_per_s: rate at which blocks that rest on disks are brought into memory.
        l2_latency_s: seconds of a read from the host's segment, however short.
        l3_latency_s: the same from other hosts' segments.
        l4_latency_s: seconds to bring up blocks that rest, however few.
        l2_queued_bytes: bytes of loads under way from the host's segment.
        l3_queued_bytes: the same from other hosts' segments.
        l4_queued_bytes: the same from disks.
        prefill_step_s: fitted seconds of a forward pass, however short.
        prefill_token_s: fitted seconds per computed token.
        prefill_pair_s: fitted seconds per (query, key) pair of attention.
        prefill_sequence_s: fitted seconds per further prompt in a forward pass.
        step_tokens: tokens computed in one forward pass, at most.
        decode_step_s: seconds of a forward pass that only decodes.
        decodes_running: requests that are being decoded.
    """

    requests_running: int = 0
    requests_waiting: int = 0
    waiting_prefill_tokens: int = 0
    kv_usage: float = 0.0
    prefill_tokens_per_s: float = 0.0
    decode_tokens_per_s: float = 0.0
    l2_bytes_per_s: float = 0.0
    l3_bytes_per_s: float = 0.0
    l4_bytes_per_s: float = 0.0
    l2_latency_s: float = 0.0
    l3_latency_s: float = 0.0
    l4_latency_s: float = 0.0
    l2_queued_bytes: int = 0
    l3_queued_bytes: int = 0
    l4_queued_bytes: int = 0
    prefill_step_s: float = 0.0
    prefill_token_s: float = 0.0
    prefill_pair_s: float = 0.0
    prefill_sequence_s: float = 0.0
    step_tokens: int = 0
    decode_step_s: float = 0.0
    decodes_running: int = 0


@dataclass(frozen=True, slots=True)
class TierStats:
    """Cumulative counters of one tier on one node; each name ends with its unit."""

    tier: Tier
    medium: str = ""
    model: str = ""
    capacity_bytes: int = 0
    used_bytes: int = 0
    blocks_total: int = 0
    blocks_used: int = 0
    query_tokens: int = 0
    hit_tokens: int = 0
    stored_tokens: int = 0
    evicted_blocks: int = 0
    promoted_blocks: int = 0
    demoted_blocks: int = 0
    read_bytes: int = 0
    write_bytes: int = 0
    read_time_s: float = 0.0
    write_time_s: float = 0.0
    alloc_failures: int = 0


@dataclass(frozen=True, slots=True)
class PathReport:
    """Transport of KV bytes between the reporting node and another node, with the reason.

    Attributes:
        node: the other end; empty for a listener that accepts any peer.
        transport: ``inproc``, ``shm``, ``rdma`` or ``tcp``.
        reason: text for people: why this transport, the address of the listener, or why it failed.
        usable: False for a listener that this node can't open.
    """

    node: str
    transport: str
    reason: str
    usable: bool = True

    def __str__(self) -> str:
        way = self.transport if self.usable else f"no {self.transport}"
        return f"{self.node} {way}: {self.reason}".lstrip()


@dataclass(frozen=True, slots=True)
class LoadChoiceStats:
    """Cumulative outcome of one kind of decision of the load controller.

    Attributes:
        choice: ``load`` (all blocks found), ``part`` of them, ``compute`` instead, or ``blend``.
        decisions: number of decisions.
        measured: number of decisions with a prediction and a first token.
        predicted_s: sum of predicted seconds to the first token over the measured decisions.
        actual_s: sum of actual seconds over the measured decisions.
        error_s: sum of absolute differences between the two.
    """

    choice: str
    decisions: int = 0
    measured: int = 0
    predicted_s: float = 0.0
    actual_s: float = 0.0
    error_s: float = 0.0


@dataclass(frozen=True, slots=True)
class NamespaceUsage:
    """What a namespace with limits keeps in a pool node's memory.

    Attributes:
        name: the namespace.
        capacity_bytes: what it may keep on this node; 0: no limit.
        used_bytes: slot bytes in use.
        blocks: slots in use.
        refused_blocks: blocks that were not stored, because the capacity was used.
        evicted_for_quota: own blocks that made room for own blocks.
        evicted_for_memory: blocks evicted because the node's memory was used.
        evicted_for_ttl: blocks removed because nobody used them.
        evicted_for_version: blocks of older versions of the namespace that were removed, on disk
            too.
        disk_used_bytes: bytes of its blocks on disk, if its disk capacity or version is set.
        disk_blocks: their number.
        evicted_from_disk: own blocks on disk that made room for own blocks.
        read_bytes: bytes read from the node's memory.
        write_bytes: bytes written there.
        throttled: transfers and blocks that the node refused because a rate was used.
        hits: uses of its blocks in memory; uses of one block within a second count once.
    """

    name: str
    capacity_bytes: int = 0
    used_bytes: int = 0
    blocks: int = 0
    refused_blocks: int = 0
    evicted_for_quota: int = 0
    evicted_for_memory: int = 0
    evicted_for_ttl: int = 0
    evicted_for_version: int = 0
    disk_used_bytes: int = 0
    disk_blocks: int = 0
    evicted_from_disk: int = 0
    read_bytes: int = 0
    write_bytes: int = 0
    throttled: int = 0
    hits: int = 0


@dataclass(frozen=True, slots=True)
class NodeReport:
    """Content of a heartbeat.

    Attributes:
        load: the node's load.
        tiers: counters of the tiers that the node owns or reads.
        cache_errors: count of cache errors by kind (``CacheError.code``), each one a recompute.
        transfer_bytes_in: bytes received over the data plane.
        transfer_bytes_out: bytes sent over the data plane.
        transfer_errors: failed transfers.
        paths: of a compute node, one for each pool node in use; of a pool node, its listeners.
        load_choices: decisions of a compute node's load controller, by kind.
        notes: notes to people, for example why an engine shares nothing.
        cross_zone_bytes_in: of ``transfer_bytes_in``, bytes from pool nodes of other zones.
        cross_zone_bytes_out: of ``transfer_bytes_out``, bytes to them.
        cross_zone_refusals: transfers with other zones that the limit prevented.
        namespaces: of a pool node, what the namespaces with limits keep.
    """

    load: NodeLoad = NodeLoad()
    tiers: tuple[TierStats, ...] = ()
    cache_errors: tuple[tuple[str, int], ...] = ()
    transfer_bytes_in: int = 0
    transfer_bytes_out: int = 0
    transfer_errors: int = 0
    paths: tuple[PathReport, ...] = ()
    load_choices: tuple[LoadChoiceStats, ...] = ()
    notes: tuple[str, ...] = ()
    cross_zone_bytes_in: int = 0
    cross_zone_bytes_out: int = 0
    cross_zone_refusals: int = 0
    namespaces: tuple[NamespaceUsage, ...] = ()


@dataclass(frozen=True, slots=True)
class PreferredNode:
    """A node, and the cached part of the prompt there.

    Attributes:
        node_id: the node.
        tokens: leading tokens of the prompt counted as cached on the node by the plan, because a
            call of the same statement computes the tokens there or the plan knows where the KV is.
    """

    node_id: NodeId
    tokens: int = 0
