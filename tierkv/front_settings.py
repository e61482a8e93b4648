"""Settings of a front: its ports, its engine, its users and limits."""

from __future__ import annotations

from typing import Literal

from pydantic import ByteSize, Field

from tierkv.kvcore import limits
from tierkv.kvcore.call_limits import WhenLost
from tierkv.setting_section import Section

IN_MEMORY = ":memory:"
"""Value of ``front.database`` for tables in memory, where an empty value means a file."""


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
        description="seconds between writes of statistics; a killed front loses the statistics "
        "since the last write",
    )
    stats_days: float = Field(
        default=30.0, gt=0.0, description="days that usage history and query log are kept"
    )
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
    max_connections: int = Field(
        default=200, ge=1, le=100_000, description="SQL sessions at a time; more get 53300"
    )
    max_connections_per_user: int = Field(
        default=0,
        ge=0,
        description="SQL sessions of one user at a time; 0: four fifths of max_connections if "
        "there are several users",
    )
    max_http_statements: int = Field(
        default=64, ge=1, le=10_000, description="/v1/sql statements at a time; more get 429"
    )
    statement_timeout_s: float = Field(
        default=86_400.0,
        ge=0.0,
        description="seconds a statement may run unless the session sets statement_timeout; 0: no "
        "limit",
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
        description="SQL users and passwords (SCRAM); empty: any user on loopback, unless api_keys "
        "is set",
    )
    api_keys: dict[str, str] = Field(
        default_factory=dict,
        description="REST keys, in clear or as sha256:HASH, and the tenant of each; empty: open on "
        "loopback, unless users is set",
    )
    limits_when_lost: WhenLost = Field(
        default=WhenLost.AUTO,
        description="calls with limits while shared_state can't be reached: refuse, admit, or "
        "auto, which refuses where a limit is per hour or day",
    )
    allowed_hosts: str = Field(
        default="",
        description="host names that REST accepts in Host and Origin headers, separated by commas; "
        "empty: on loopback the machine's own, elsewhere any; *: any",
    )
    tls_cert: str = Field(default="", description="PEM certificate for the PostgreSQL port")
    tls_key: str = Field(default="", description="PEM key for the PostgreSQL port")
    require_tls: bool = Field(default=False, description="refuse SQL clients without TLS")
