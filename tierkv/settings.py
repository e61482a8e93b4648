"""All settings: section, type, default and meaning.

``tierkv/config.py`` fills these models from the TOML file, the environment and flags.
``tierkv/parts/`` converts them to plain frozen values for the rooms. ``tierkv config show`` and
docs/operations.md print the descriptions.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ByteSize, ConfigDict, Field

from tierkv.kvcore import limits
from tierkv.kvcore.call_limits import WhenLost
from tierkv.kvcore.layout import KvCodec
from tierkv.kvcore.request import BlendSelector

GIB = 1 << 30
IN_MEMORY = ":memory:"
"""Value of ``front.database`` for tables in memory, where an empty value means a file."""


class Section(BaseModel):
    """A table of the TOML file; the loader refuses unknown keys with a suggestion."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ClusterSettings(Section):
    """Settings shared by all processes of a cluster."""

    run_dir: Path = Field(
        default=Path("~/.local/state/tierkv"),
        description="where a cluster on this machine keeps logs, addresses and databases",
    )
    token: str = Field(
        default="", description="secret shared by all nodes; required to listen beyond loopback"
    )
    token_file: str = Field(
        default="",
        description="file of tokens, read again when it changes; the first line is shown to others",
    )
    tls_cert: str = Field(default="", description="PEM certificate for TLS between processes")
    tls_key: str = Field(default="", description="PEM key of that certificate")
    tls_ca: str = Field(default="", description="PEM CA of the certificates of all processes")
    tls_name: str = Field(
        default="", description="name in these certificates; empty: the host of each address"
    )
    secret: str = Field(
        default="", description="key of the block hashes, 16 to 64 bytes; empty: made at start"
    )
    meta_address: str = Field(
        default="", description="host:port of the meta server; of several, separated by commas"
    )
    host: str = Field(
        default="", description="this machine's name; nodes of a host share memory (L2)"
    )
    zone: str = Field(
        default="",
        pattern=f"^({limits.NAME_PATTERN})?$",
        description="this machine's zone; KV is read and stored in the own zone where possible",
    )
    cross_zone_rate: ByteSize = Field(
        default=ByteSize(0),
        description="KV bytes per second that a node exchanges with other zones; 0: no limit",
    )
    advertise: str = Field(
        default="", description="name by which others reach this machine; empty: the bound address"
    )
    start_wait_s: float = Field(
        default=0.0, ge=0.0, description="longest wait of a starting role for the meta server"
    )
    start_nodes: int = Field(
        default=0,
        ge=0,
        description="compute nodes that a starting front waits for, at most start_wait_s",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="lowest level that is logged"
    )


class FrontSettings(Section):
    """The front: the SQL and the REST port."""

    bind: str = Field(default="127.0.0.1", description="listen address of the SQL and REST ports")
    workers: int = Field(
        default=1,
        ge=1,
        le=64,
        description="processes that serve the two ports; more than one need front.postgres, or "
        "tables in memory (front.database = :memory:)",
    )
    event_loop: Literal["asyncio", "uvloop"] = Field(
        default="asyncio",
        description="asyncio, or uvloop (tierkv[uvloop]), which relays short statements faster",
    )
    pg_port: int = Field(default=5433, ge=0, le=65535, description="PostgreSQL wire port; 0: any")
    http_port: int = Field(default=8000, ge=0, le=65535, description="REST port; 0: any")
    database: str = Field(
        default="",
        description="DuckDB file, or :memory:; empty: in memory (sql) or in run_dir (up)",
    )
    postgres: str = Field(
        default="", description="DSN of a PostgreSQL server that runs the SQL; empty: DuckDB does"
    )
    default_model: str = Field(
        default="", description="model of calls that name no model; empty: the only served model"
    )
    external_access: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="let SQL read and write files (read_csv, COPY TO); auto: only in tierkv sql "
        "and connect()",
    )
    trace_dir: str = Field(
        default="", description="folder of request traces for tierkv.simulate; empty: none"
    )
    max_calls: int = Field(
        default=1000,
        ge=0,
        description="AI calls a statement may make; 0: no limit, which is the default of "
        "tierkv sql and connect()",
    )
    stats_path: str = Field(
        default="",
        description="SQLite file of statistics and query log; empty: in memory (sql, serve) or in "
        "run_dir (up)",
    )
    stats_interval_s: float = Field(
        default=5.0,
        gt=0.0,
        le=3_600.0,
        description="seconds between writes of statistics, the most that a killed front loses",
    )
    stats_days: float = Field(default=30.0, gt=0.0, description="days of usage history, query log")
    ray_address: str = Field(default="", description="Ray for jobs of runner = 'ray'; empty: none")
    ray_door: str = Field(default="", description="DSN by which nodes of that Ray reach the fronts")
    queue_door: str = Field(default="", description="DSN of queued jobs and refreshes; empty: none")
    queue_claim_s: float = Field(default=30.0, ge=1.0, description="silence of a lost job worker")
    answer_cache: str = Field(
        default="",
        description="SQLite file, or postgresql://... for several fronts, where answers stay for "
        "tierkv.answer_cache; empty: beside stats_path, or in memory without one",
    )
    answer_cache_size: ByteSize = Field(
        default=ByteSize(GIB), description="size of the answers that stay; the latest used stay"
    )
    answer_cache_days: float = Field(default=30.0, gt=0.0, description="days that answers stay")
    sessions: str = Field(default="", description="where conversations are kept, as answer_cache")
    session_days: float = Field(default=30.0, ge=0.0, le=3_660.0, description="0: for ever")
    query_log: Literal["ai", "all", "off"] = Field(
        default="ai",
        description="statements in tierkv.query_log: ai (those with AI calls), all, or off",
    )
    max_requests: int = Field(
        default=limits.MAX_QUEUED_REQUESTS,
        ge=1,
        le=limits.MAX_QUEUED_REQUESTS,
        description="AI calls and chat requests running or waiting at a time; more are refused",
    )
    max_waiting: int = Field(
        default=10_000,
        ge=0,
        le=limits.MAX_QUEUED_REQUESTS,
        description="requests of max_requests that may wait for room at a node; more are refused",
    )
    max_in_flight_per_node: int = Field(
        default=64, ge=1, description="requests sent to a compute node at a time; others wait"
    )
    ttft_slo_s: float = Field(
        default=0.0,
        ge=0.0,
        description="target for the time to the first token; a request that would miss it "
        "because of the queue is refused at once; 0: none",
    )
    lease_s: float = Field(
        default=10.0,
        gt=0.0,
        le=limits.MAX_LEASE_S,
        description="seconds that KV found for a call stays if its front is lost; extended while "
        "the call waits",
    )
    max_connections: int = Field(default=200, ge=1, le=100_000, description="most SQL sessions")
    max_connections_per_user: int = Field(
        default=0,
        ge=0,
        description="most sessions of a user; 0: 4/5 of max_connections if there are several users",
    )
    max_http_statements: int = Field(
        default=64, ge=1, le=10_000, description="/v1/sql statements at a time; more get 429"
    )
    statement_timeout_s: float = Field(
        default=86_400.0,
        ge=0.0,
        description="seconds a statement may run if the session sets no limit; 0: no limit",
    )
    shared_state: str = Field(
        default="",
        description="Valkey or Redis server through which several fronts know each other's work, "
        "such as redis://host:6379/0; empty: from the nodes' heartbeats, a second later",
    )
    drain_s: float = Field(
        default=5.0,
        ge=0.0,
        le=3_600.0,
        description="seconds that running statements and requests may take to end after SIGTERM, "
        "while new ones are refused",
    )
    idle_session_timeout_s: float = Field(
        default=0.0, ge=0.0, description="seconds a SQL session may be idle; 0: no limit"
    )
    idle_in_transaction_timeout_s: float = Field(
        default=0.0,
        ge=0.0,
        description="seconds a SQL session may be idle in a transaction; 0: no limit",
    )
    memory_limit: ByteSize = Field(
        default=ByteSize(0), description="memory of the SQL engine; 0: 80 % of the machine's"
    )
    threads: int = Field(default=0, ge=0, description="threads of the SQL engine; 0: one per core")
    max_http_connections: int = Field(
        default=1_000, ge=1, le=100_000, description="REST connections at a time; more are closed"
    )
    admins: str = Field(default="", description="SQL users who may change namespaces, by commas")
    users: dict[str, str] = Field(
        default_factory=dict,
        description="SQL users and passwords; empty: any user on loopback, unless api_keys is set",
    )
    api_keys: dict[str, str] = Field(
        default_factory=dict,
        description="REST keys, in clear or as sha256:HASH, and the tenant of each; empty: open on "
        "loopback, unless users is set",
    )
    limits_when_lost: WhenLost = Field(
        default=WhenLost.AUTO,
        description="calls with limits without shared_state; auto refuses rates per hour or day",
    )
    allowed_hosts: str = Field(
        default="",
        description="host names that REST accepts in Host and Origin headers, separated by commas; "
        "empty: on loopback the machine's own, elsewhere any; *: any",
    )
    tls_cert: str = Field(default="", description="PEM certificate for the PostgreSQL port")
    tls_key: str = Field(default="", description="PEM key for the PostgreSQL port")
    require_tls: bool = Field(default=False, description="refuse SQL clients without TLS")


class MetaSettings(Section):
    """The meta server."""

    bind: str = Field(default="127.0.0.1", description="address to listen on")
    port: int = Field(default=0, ge=0, le=65535, description="gRPC port; 0: any")
    stream_port: int = Field(
        default=0,
        ge=-1,
        le=65535,
        description="port for locates in frames, which are faster than over gRPC; 0: any, -1: none",
    )
    database: str = Field(
        default="",
        description="SQLite file of namespaces, or postgresql://... for several meta servers; "
        "empty: in run_dir (up) or in memory",
    )


class NamespaceSettings(Section):
    """Policy of tenants without a namespace; namespaces are set with ``tierkv namespace``."""

    blend: bool = Field(
        default=False,
        description="reuse documents at any position; answers of calls with documents may change",
    )
    recompute_ratio: float = Field(
        default=0.15,
        gt=0.0,
        le=1.0,
        description="least share of reused document tokens that is recomputed; 1: exact",
    )
    selector: BlendSelector = Field(
        default=BlendSelector.HKVD,
        description="how tokens to recompute are chosen: hkvd, query or boundary",
    )
    gradual: bool = Field(
        default=True,
        description="with hkvd: recompute more tokens in early layers, fewer in late ones",
    )
    kv_codec: KvCodec | Literal["default"] = Field(
        default="default", description="encoding of KV below L1; default: compute.kv_codec"
    )


class DmpSettings(Section):
    """A distributed memory pool node."""

    bind: str = Field(default="127.0.0.1", description="address to listen on")
    port: int = Field(default=0, ge=0, le=65535, description="data plane port; 0: any")
    capacity: ByteSize = Field(default=ByteSize(GIB), description="memory for KV, such as 4GiB")
    ready_ahead: ByteSize = Field(
        default=ByteSize(128 << 20),
        description="memory prepared before blocks arrive; with dmp.capacity or more, all is taken "
        "at start",
    )
    segment_dir: str = Field(default="/dev/shm", description="folder of the segment file")
    rdma: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="open an RDMA endpoint if there is a device; auto: unless TLS is on",
    )
    rdma_devices: str = Field(
        default="", description="devices of the RDMA endpoint, separated by commas; empty: all"
    )
    tls_cert: str = Field(default="", description="PEM certificate for the data plane")
    tls_key: str = Field(default="", description="PEM key for the data plane")
    tls_client_ca: str = Field(
        default="",
        description="PEM CA; if set, only clients with a certificate of this CA are accepted",
    )
    remove_on_stop: bool = Field(
        default=False, description="delete the segment at a clean stop instead of keeping its KV"
    )
    disk_path: str = Field(
        default="", description="folder of the disk pool (L4) below memory; empty: none"
    )
    disk_capacity: ByteSize = Field(
        default=ByteSize(16 * GIB), description="disk space of the disk pool, taken at start"
    )
    archive_url: str = Field(
        default="", description="object storage below the disk pool, such as s3://bucket/prefix"
    )
    archive_options: dict[str, str] = Field(
        default_factory=dict,
        description="options of the object storage: endpoint, region, access_key_id, ...",
    )
    demote_above: float = Field(
        default=0.85,
        ge=0.0,
        le=1.0,
        description="share of memory in use above which blocks are copied to disk",
    )
    eviction_policy: Literal["default", "leaf_lru"] = Field(
        default="default", description="which blocks are evicted first: default or leaf_lru"
    )
    lease_share: float = Field(
        default=0.5,
        ge=0.0,
        lt=1.0,
        description="share of memory that leases may keep from eviction; no leases beyond it",
    )
    scrub_rate: ByteSize = Field(
        default=ByteSize(64 << 20),
        description="bytes of stored blocks checked per second in the background; 0: off",
    )
    drain_s: float = Field(
        default=1.0, ge=0.0, description="seconds a stop waits for open writes and reads to end"
    )
    attach_wait_s: float = Field(
        default=5.0,
        ge=0.0,
        description="seconds a start waits for the process that still owns the segment",
    )


class PoolSettings(Section):
    """Access of this machine's clients to the memory pool."""

    transport: Literal["auto", "shm", "rdma", "tcp"] = Field(
        default="auto",
        description="transport to pool nodes; auto: shared memory, else RDMA, else TCP",
    )
    rdma_devices: str = Field(
        default="", description="RDMA devices that clients use, separated by commas; empty: all"
    )
    tls_ca: str = Field(
        default="", description="PEM CA that signed the pool nodes' certificates; empty: no TLS"
    )
    tls_cert: str = Field(default="", description="PEM certificate that clients show to pool nodes")
    tls_key: str = Field(default="", description="PEM key of that certificate")
    tls_name: str = Field(
        default="", description="name in pool nodes' certificates; empty: the host of their address"
    )


class ComputeSettings(Section):
    """A prefill/decode node."""

    bind: str = Field(default="127.0.0.1", description="address to listen on")
    port: int = Field(default=0, ge=0, le=65535, description="gRPC port; 0: any")
    model: str = Field(default="", description="model folder; empty: the small model shipped")
    model_name: str = Field(
        default="", description="name of the model in requests; empty: the folder's name"
    )
    more_models: tuple[str, ...] = Field(
        default=(),
        description="folders of further models that up, sql and connect() serve, each by its own "
        "nodes",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", description="compute and KV type; auto: float32 on CPU, bfloat16 on GPU"
    )
    device: str = Field(default="auto", description="auto, cpu or cuda")
    l1_capacity: ByteSize = Field(
        default=ByteSize(GIB // 2), description="memory for L1 pages, such as 512MiB"
    )
    block_tokens: int = Field(default=64, ge=1, le=1024, description="tokens per KV block")
    max_batch_tokens: int = Field(default=2048, ge=16, description="token budget of one step")
    max_running: int = Field(default=64, ge=1, description="requests in one batch")
    threads: int = Field(default=0, ge=0, description="torch threads; 0: all cores")
    eviction_policy: Literal["default", "leaf_lru"] = Field(
        default="default", description="which blocks leave L1 first: default or leaf_lru"
    )
    load_policy: Literal["auto", "always", "never"] = Field(
        default="auto",
        description="load KV from the pool: auto (when estimated faster), always or never",
    )
    kv_codec: KvCodec = Field(
        default=KvCodec.NONE,
        description="encoding of KV below L1: none (exact), or smaller and lossy (fp8, int8, int4, "
        "entropy-fine, entropy-medium, entropy-coarse, adaptive)",
    )
    kv_calibration: str = Field(
        default="",
        description="file of tables for entropy-coded KV; empty: the one in the model folder",
    )
    ttft_budget_s: float = Field(
        default=0.0,
        ge=0.0,
        description="with kv_codec adaptive: target for the time to the first token; 0: half of "
        "the computing time",
    )
    publish: bool = Field(default=True, description="hand computed KV to the pool")
    speculative_tokens: int = Field(
        default=-1,
        ge=-1,
        le=32,
        description="tokens that a greedy answer may guess ahead; 0: none, -1: 8 with float32 on "
        "CPU, else none",
    )


class EngineSettings(Section):
    """Another engine that answers for a compute node (``tierkv serve compute --engine``)."""

    kind: Literal["", "vllm", "sglang", "openai"] = Field(
        default="",
        description="engine that answers: vllm, sglang, or openai (any server of that API); "
        "empty: TierKV's own",
    )
    url: str = Field(default="", description="the engine's address, such as http://127.0.0.1:8000")
    api_key_file: str = Field(default="", description="file of the engine's API key; empty: no key")
    model: str = Field(
        default="",
        description="folder of the engine's model files on this machine; empty: the path that the "
        "engine reports",
    )
    served_model: str = Field(
        default="", description="the engine's name of the model; empty: the first model it lists"
    )
    model_name: str = Field(
        default="", description="name of the model in requests here; empty: the engine's name"
    )
    dtype: Literal["", "float32", "bfloat16", "float16"] = Field(
        default="",
        description="type of the engine's KV, if it was started with another --dtype than its "
        "model's",
    )
    max_requests: int = Field(
        default=256, ge=1, description="requests sent to the engine at a time; more are refused"
    )
    idle_timeout_s: float = Field(
        default=300.0, gt=0.0, description="longest wait for the next bytes of an answer"
    )
    events_url: str = Field(
        default="",
        description="where the engine publishes KV events (tcp://host:port); empty: port 5557 of "
        "its host, off: nowhere",
    )
    events_replay_url: str = Field(
        default="",
        description="where the engine repeats KV events; empty: port 5558 of its host; off: none",
    )
    events_ranks: int = Field(
        default=1,
        ge=1,
        le=limits.MAX_ENGINE_RANKS,
        description="the engine's data-parallel ranks; each publishes on its own port",
    )


class Settings(Section):
    """All sections."""

    cluster: ClusterSettings = ClusterSettings()
    front: FrontSettings = FrontSettings()
    meta: MetaSettings = MetaSettings()
    namespace: NamespaceSettings = NamespaceSettings()
    dmp: DmpSettings = DmpSettings()
    pool: PoolSettings = PoolSettings()
    compute: ComputeSettings = ComputeSettings()
    engine: EngineSettings = EngineSettings()
