"""Rows of the admin views about the cluster, gathered when a statement reads a view.

Sessions call ``cluster_rows`` with a ClusterSource. Column names and types are defined in
sql/views.py; a row is a dictionary with these names. The routing views (routing_log,
routing_errors, node_costs) show the scheduler's own values (scheduler/routing_stats.py).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, starmap
from typing import Final, Protocol

from tierkv.dbfront.answer_cache.answer_cache import AnswerCache
from tierkv.dbfront.contracts import ClientInfo, TableAccess
from tierkv.dbfront.sessions.conversations import Conversations
from tierkv.dbfront.sessions.session_views import SESSION_VIEWS, session_rows
from tierkv.dbfront.siblings import Siblings
from tierkv.dbfront.views.kvcache import (
    Baseline,
    as_of,
    block_row,
    error_rows,
    node_rows,
    prefix_rows,
    tier_rows,
)
from tierkv.dbfront.views.statistics import answer_cache_row
from tierkv.dbfront.views.worker_views import ROUTING_VIEWS, routing_rows, waiting_row
from tierkv.kvcore.access import RoleRights
from tierkv.kvcore.audit import AuditLine
from tierkv.kvcore.errors import RightMissingError
from tierkv.kvcore.ids import tenant_of
from tierkv.kvcore.node import LoadChoiceStats, ModelInfo
from tierkv.metaserver.client import BlockListing, DirectoryNode, KvLimits, Namespace
from tierkv.scheduler.dispatcher import WaitingRequest
from tierkv.scheduler.limits.gate import LimitLeft
from tierkv.scheduler.pins import Pin, PinKeeper
from tierkv.scheduler.routing_stats import RoutingView
from tierkv.sql.cluster_command import ClusterCommand
from tierkv.sql.schema_rights import PRIVILEGES
from tierkv.sql.views import Row, timestamp

OwnedChange = Callable[[ClusterCommand, frozenset[str]], Awaitable[frozenset[str]]]
"""Drops or keeps what roles own, given their schemas; returns the schemas that existed."""

LIMIT_VIEWS = frozenset({"my_limits", "call_limits"})
MAX_LISTED_BLOCKS = 100_000
"""Maximum number of blocks in tierkv.kvcache_blocks; the stat views count all blocks."""


@dataclass(frozen=True, slots=True)
class SettingRow:
    """A configuration value and its source."""

    name: str
    value: str
    source: str
    description: str = ""


class SchedulerSource(Protocol):
    """The data of the views about this front's scheduler; fulfilled by Dispatcher."""

    def waiting(self) -> tuple[WaitingRequest, ...]: ...

    def routing(self) -> RoutingView: ...


class ClusterSource(Protocol):
    """The data of the admin views about the cluster.

    1. ``nodes``, ``blocks``, ``directory`` and ``namespaces`` raise NoNodeError if the meta server
       does not answer; the other methods don't ask it.
    2. ``settings`` returns the process's configuration, with secrets masked.
    3. ``change_cluster`` carries out a statement of a user; RightMissingError if the user may
       not, SqlError for a namespace that exists already or not, UserError for a bad option.
       ``owned`` does the part in the database, of statements about what roles own.
       ``move_tables`` gives the rights on tables to the tables' new names, or takes them.
    4. ``call_limits`` returns the limits of a client, or all limits to an admin who does not ask
       for his own; ``audit_log`` likewise returns all lines to an admin only.
    5. ``owners`` returns the names under which a client's visible rows stand: the user and the
       user's namespace; None for an admin, to whom all rows are visible. ``rights`` returns the
       rights of all roles to an admin, otherwise the rights of the client's roles. ``table_access``
       tells which schemas a client may use; None while nobody logs in.
    6. ``dispatcher`` has the decisions of this front's scheduler, and its waiting calls;
       ``answers`` is this front's answer cache; ``pins`` are those of the cluster;
       ``conversations`` are those that this front can continue.
    """

    @property
    def dispatcher(self) -> SchedulerSource: ...

    @property
    def answers(self) -> AnswerCache: ...

    @property
    def pins(self) -> PinKeeper: ...

    @property
    def conversations(self) -> Conversations: ...

    async def nodes(self) -> tuple[DirectoryNode, ...]: ...

    async def blocks(self, limit: int) -> BlockListing: ...

    async def models(self) -> tuple[ModelInfo, ...]: ...

    async def namespaces(self) -> tuple[Namespace, ...]: ...

    async def directory(self) -> tuple[tuple[str, int], ...]: ...

    async def settings(self) -> tuple[SettingRow, ...]: ...

    async def call_limits(self, client: ClientInfo, *, own: bool) -> tuple[LimitLeft, ...]: ...

    async def audit_log(self, client: ClientInfo) -> list[AuditLine]: ...

    def owners(self, client: ClientInfo) -> tuple[str, str] | None: ...

    def rights(self, client: ClientInfo) -> Mapping[str, RoleRights]: ...

    def table_access(self, client: ClientInfo) -> TableAccess | None: ...

    async def change_cluster(
        self, user: str, command: ClusterCommand, owned: OwnedChange | None = None
    ) -> None: ...

    async def move_tables(self, user: str, moved: Mapping[str, str | None]) -> None: ...


async def cluster_rows(
    view: str,
    source: ClusterSource,
    *,
    now_s: float,
    baseline: Baseline | None = None,
    client: ClientInfo | None = None,
) -> list[Row]:
    """Return the rows of a view about the cluster; for ``settings``, the configuration.

    Args:
        view: name of the view without the schema.
        source: the cluster.
        now_s: Unix time, to convert ages to timestamps.
        baseline: the nodes' counters at the last reset.
        client: who reads the view.
    """
    baseline = baseline or {}
    if view == "models":
        return [_model(model) for model in await source.models()]
    if view == "namespaces":
        namespaces = await source.namespaces()
        limited = any(namespace.limits is not None for namespace in namespaces)
        nodes = await source.nodes() if limited else ()  # Nodes may have to start to be asked.
        return [_namespace(namespace, nodes) for namespace in namespaces]
    if view in LIMIT_VIEWS:
        found = await source.call_limits(client or ClientInfo(), own=view == "my_limits")
        return [_limit(left) for left in found]
    if view == "rights":
        return list(
            chain.from_iterable(starmap(_role, source.rights(client or ClientInfo()).items()))
        )
    if view == "audit_log":
        return [_audited(line) for line in await source.audit_log(client or ClientInfo())]
    if view == "directory":
        return [{"name": name, "value": value} for name, value in await source.directory()]
    if view == "queue":
        return [waiting_row(request) for request in source.dispatcher.waiting()]
    if view in ROUTING_VIEWS:
        return routing_rows(view, source.dispatcher.routing())
    if view == "settings":
        return [_setting(row) for row in await source.settings()]
    if view == "answer_cache":
        return [answer_cache_row(source.answers)]
    if view in SESSION_VIEWS:
        owners = None if client is None else source.owners(client)
        tenant = None if owners is None else owners[0]
        return await session_rows(view, source.conversations, tenant, now_s)
    if view == "pins":
        return [_pin(pin, in_memory, now_s) for pin, in_memory in source.pins.all()]
    if view == "kvcache_blocks":
        listing = await source.blocks(MAX_LISTED_BLOCKS)
        return [block_row(block, now_s) for block in listing.blocks]
    if view == "kvcache_prefixes":
        listing = await source.blocks(MAX_LISTED_BLOCKS)
        return await asyncio.to_thread(prefix_rows, listing.blocks)
    nodes = await source.nodes()
    if view == "nodes":
        return [_node(node) | {"as_of": as_of(node, now_s)} for node in nodes]
    if view == "load_decisions":
        return [
            _load_choice(node, choice) | {"as_of": as_of(node, now_s)}
            for node in nodes
            for choice in node.report.load_choices
        ]
    if view == "cache_errors":
        return error_rows(nodes, baseline, now_s)
    if view == "stat_kvcache":
        return tier_rows(nodes, baseline, now_s)
    return node_rows(nodes, baseline, now_s)


def _setting(row: SettingRow) -> Row:
    return {
        "name": row.name,
        "setting": row.value,
        "source": row.source,
        "description": row.description,
    }


async def joined_rows(
    siblings: Siblings, rows: list[Row], *, view: str = "", user: str = ""
) -> list[Row]:
    """Return rows of this worker and of the others, each with the number of its worker.

    Args:
        siblings: the other workers.
        rows: rows of this worker.
        view: one of ``WORKER_VIEWS``; empty for ``stat_activity``.
        user: with ``stat_activity``, the user who reads the view.
    """
    if view:
        told = await siblings.ask_all("rows", view=view)
    else:
        told = await siblings.ask_all("activity", user=user)
    return [*of_worker(siblings, rows), *chain.from_iterable(told)]


def of_worker(siblings: Siblings, rows: Sequence[Row]) -> list[Row]:
    """Add the number of this worker to its rows."""
    return [row | {"worker": siblings.index} for row in rows]


def to_json(rows: Sequence[Row]) -> str:
    """Return the rows as the JSON text read by a view."""
    # Row by row, so a thread in this function lets the event loop run between rows.
    return "[" + ",".join(map(json.dumps, rows)) + "]"


def _node(node: DirectoryNode) -> Row:
    info = node.info
    return {
        "node_id": info.node_id,
        "incarnation": info.incarnation,
        "role": str(info.role),
        "host": info.host,
        "zone": info.zone,
        "address": info.control_address,
        "data_address": info.data_address,
        "state": node.state,
        "heartbeat_age_s": node.heartbeat_age_s,
        "capacity_bytes": info.capacity_bytes,
        "models": ", ".join(model.name for model in info.models),
        "paths": "; ".join(map(str, node.report.paths)),
        "notes": "; ".join(node.notes),
    }


def _load_choice(node: DirectoryNode, stats: LoadChoiceStats) -> Row:
    measured = stats.measured
    return {
        "node_id": node.info.node_id,
        "choice": stats.choice,
        "decisions": stats.decisions,
        "measured": measured,
        "mean_predicted_s": stats.predicted_s / measured if measured else None,
        "mean_actual_s": stats.actual_s / measured if measured else None,
        "mean_abs_error_s": stats.error_s / measured if measured else None,
    }


def _model(model: ModelInfo) -> Row:
    return {
        "model_name": model.name,
        "revision": model.revision,
        "architecture": model.architecture,
        "parameters": model.parameters,
        "context_tokens": model.context_tokens,
        "block_tokens": model.layout.block_tokens,
        "block_bytes": model.layout.payload_bytes,
        "kv_codec": str(model.layout.codec),
        "stored_block_bytes": model.layout.stored_bytes,
        "folder": model.folder,
        "blend_refusal": model.blend_refusal,
    }


_USED = ("used_bytes", "blocks", "refused_blocks", "disk_used_bytes", "disk_blocks")
_EVICTED = (
    "evicted_for_quota", "evicted_for_memory", "evicted_for_ttl", "evicted_for_version",
    "evicted_from_disk", "read_bytes", "write_bytes", "throttled", "hits",
)  # fmt: skip


def _namespace(namespace: Namespace, nodes: Sequence[DirectoryNode]) -> Row:
    """Return a namespace with the sums of what pool nodes report; null without limits."""
    policy, kept = namespace.policy, namespace.limits or KvLimits()
    told = [
        asdict(used)
        for node in nodes
        for used in node.report.namespaces
        if used.name == namespace.name and node.state != "dead"
    ]
    sums = {
        name: sum(each[name] for each in told) if told else None for name in (*_USED, *_EVICTED)
    }
    return {
        "name": namespace.name,
        "tenants": ", ".join(namespace.tenants or (namespace.name,)),
        "cache_enabled": namespace.cache_enabled,
        "kv_codec": None if policy.kv_codec is None else str(policy.kv_codec),
        "blend": policy.blend,
        "recompute_ratio": policy.recompute_ratio,
        "selector": str(policy.selector),
        "gradual": policy.gradual,
        "capacity_bytes": kept.capacity_bytes or None,
        "disk_capacity_bytes": kept.disk_capacity_bytes or None,
        "ttl_s": kept.ttl_s or None,
        "on_full": "evict" if kept.evicts else "refuse",
        "eviction": kept.eviction or None,
        "version": kept.version or None,
        "read_bytes_per_s": kept.read_bytes_per_s or None,
        "write_bytes_per_s": kept.write_bytes_per_s or None,
        "requests_per_s": kept.requests_per_s or None,
        "weight": kept.weight or None,
        "media": kept.media or None,
        "model_name": kept.model or None,
        **sums,
    }


def _role(role: str, rights: RoleRights) -> Iterator[Row]:
    if rights == RoleRights():
        yield {"role_name": role}
    for kind, names in (
        ("function", str(rights.functions)),
        ("model", str(rights.models)),
        ("role", ", ".join(sorted(rights.member_of))),
        ("owner", ", ".join(sorted(rights.owns))),
    ):
        if names:
            yield {"role_name": role, "right_kind": kind, "granted": names}
    for table, privileges in sorted(rights.tables.items()):
        held = ", ".join(each for each in PRIVILEGES if each in privileges)
        yield {"role_name": role, "right_kind": "table", "granted": f"{held} on {table}"}


_OWNED: Final = {
    "stat_activity": "usename",
    "stat_statements": "userid",
    "usage_history": "user_name",
    "query_log": "user_name",
    "queue": "tenant",
    "jobs": "owner",
    "ai_tables": "owner",
    "kv_indexes": "owner",
    "job_failures": "owner",
    "queue_pending": "owner",
    "pins": "tenant",
    "sessions": "tenant",
    "session_turns": "tenant",
    "kvcache_blocks": "cache_scope",
    "kvcache_prefixes": "cache_scope",
}
"""Views with rows of users: the column with the user, or with the user's namespace."""


def visible_rows(view: str, rows: list[Row], owners: tuple[str, str] | None) -> list[Row]:
    """Leave out what a client may not see.

    Args:
        view: the view without the schema.
        rows: all rows.
        owners: names of the visible rows; None: all rows are visible.
    """
    column = _OWNED.get(view)
    if owners is None or column is None:
        return rows
    user, namespace = owners
    if column != "cache_scope":
        return [row for row in rows if row[column] == user]
    # Only blocks are the namespace's: its name may be that of another user.
    return [row for row in rows if tenant_of(row[column] or "") in (user, namespace)]


def refuse_reset(owners: tuple[str, str] | None) -> None:
    """Refuse a reset of everybody's statistics.

    Args:
        owners: names in the visible rows of the client; None: an administrator.

    Raises:
        RightMissingError: the user is no administrator.
    """
    if owners is not None:
        raise RightMissingError(
            "permission denied to reset statistics",
            hint="An administrator runs tierkv.stat_reset(); GRANT tierkv_admin makes one.",
        )


def _audited(line: AuditLine) -> Row:
    row = asdict(line) | {"outcome": str(line.outcome), "happened_at": timestamp(line.at_unix_s)}
    return {name: value for name, value in row.items() if name != "at_unix_s"}


def _limit(left: LimitLeft) -> Row:
    return {
        "subject_kind": str(left.subject.kind),
        "subject": left.subject.name,
        "limit_name": left.limit,
        "allowed": left.allowed,
        "remaining": None if left.left is None else round(left.left, 3),
        "refused": left.refused,
        "waiting": left.waits.calls,
        "next_call_s": left.waits.next_s,
    }


def _pin(pin: Pin, in_memory: int, now_s: float) -> Row:
    return {
        "prompt": pin.name,
        "tenant": pin.tenant,
        "model_name": pin.model,
        "tokens": pin.tokens,
        "size_bytes": pin.size_bytes,
        "in_memory_tokens": pin.tokens * in_memory // len(pin.keys),
        "pinned_until": timestamp(pin.until_s),
        "seconds_left": pin.until_s - now_s,
    }
