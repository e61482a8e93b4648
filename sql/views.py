"""The admin views of schema ``tierkv``: columns, DDL, and the statements that read the views.

Each view unpacks a JSON text. The front gathers the rows (dbfront/views/admin.py,
dbfront/views/statistics.py) and puts the text into a session variable just before a statement
reading the view. A view is therefore always as fresh as the statement and costs nothing otherwise.
Counters are cumulative; ``*_time`` is milliseconds, sizes are bytes, ratios are 0.0 to 1.0. Every
view ends with ``as_of``: the time of the row's numbers.
"""

from __future__ import annotations

from datetime import UTC, datetime
from importlib import resources
from typing import Any, Final

from tierkv.sql.text.lexer import Token, name_value

SCHEMA: Final = "tierkv"
SESSION_VARIABLE: Final = "tierkv_session"
"""Session variable with the session's number: the end of a statement ends exactly the simulations
with this number."""

Row = dict[str, Any]
"""A row of a view, by column name; a missing column is NULL."""

_VIEW: Final = """
CREATE OR REPLACE VIEW tierkv.{view} AS
SELECT unnest(from_json(line, '{columns}')) FROM (
    SELECT unnest(from_json(coalesce(getvariable('tierkv_{view}'), '[]'), '["JSON"]')) AS line
);
"""
"""Rows are split first: with many rows this is several times as fast as unpacking all at once."""


def timestamp(unix_s: float) -> str:
    """Return a UTC timestamp in the format of the views."""
    return datetime.fromtimestamp(unix_s, UTC).replace(tzinfo=None).isoformat(sep=" ")


def view_ddl() -> str:
    """Return the statements to create the schema, the views, and ``tierkv.stat_reset``."""
    made = "".join(_VIEW.format(view=view, columns=_structure(view)) for view in VIEW_COLUMNS)
    return f"CREATE SCHEMA IF NOT EXISTS {SCHEMA};\n{made}{_ddl('stat_reset')}"


def _structure(view: str) -> str:
    """Return the columns of a view in the form expected by from_json."""
    columns = (f'"{name}":"{kind}"' for name, kind in VIEW_COLUMNS[view].items())
    return "{" + ",".join(columns) + "}"


def _ddl(name: str) -> str:
    return resources.files("tierkv.sql").joinpath(f"ddl/{name}.sql").read_text(encoding="utf-8")


def simulate_ddl() -> str:
    """Return the statement to create the table function ``tierkv.simulate``."""
    return _ddl("simulate")


def view_variable(view: str) -> str:
    """Return the name of the session variable for a view."""
    return f"{SCHEMA}_{view}"


def admin_views_in(tokens: list[Token]) -> frozenset[str]:
    """Return the admin views named in a statement, written ``tierkv.name``."""
    found = set()
    for index, token in enumerate(tokens[:-2]):
        if tokens[index + 1].text == "." and name_value(token) == SCHEMA:
            name = name_value(tokens[index + 2])
            if name in VIEW_COLUMNS:
                found.add(name)
    return frozenset(found)


_LIMITS: Final = {
    "subject_kind": "VARCHAR",
    "subject": "VARCHAR",
    "limit_name": "VARCHAR",
    "allowed": "VARCHAR",
    "remaining": "DOUBLE",
    "refused": "BIGINT",
}
VIEW_COLUMNS: Final[dict[str, dict[str, str]]] = {
    "stat_kvcache": {
        "tier": "VARCHAR",
        "medium": "VARCHAR",
        "model_name": "VARCHAR",
        "capacity_bytes": "BIGINT",
        "used_bytes": "BIGINT",
        "blocks_total": "BIGINT",
        "blocks_used": "BIGINT",
        "query_tokens": "BIGINT",
        "hit_tokens": "BIGINT",
        "hit_ratio": "DOUBLE",
        "stored_tokens": "BIGINT",
        "evicted_blocks": "BIGINT",
        "promoted_blocks": "BIGINT",
        "demoted_blocks": "BIGINT",
        "read_bytes": "BIGINT",
        "write_bytes": "BIGINT",
        "read_time": "DOUBLE",
        "write_time": "DOUBLE",
        "alloc_failures": "BIGINT",
        "stats_reset": "TIMESTAMP",
    },
    "kvcache_blocks": {
        "block_hash": "VARCHAR",
        "parent_hash": "VARCHAR",
        "model_name": "VARCHAR",
        "cache_scope": "VARCHAR",
        "tier": "VARCHAR",
        "node_id": "VARCHAR",
        "tokens": "BIGINT",
        "bytes": "BIGINT",
        "created_at": "TIMESTAMP",
        "last_access_at": "TIMESTAMP",
        "hits": "BIGINT",
        "session_id": "VARCHAR",
        "heat": "DOUBLE",
        "leases": "BIGINT",
        "ref_count": "BIGINT",
        "pinned": "BOOLEAN",
    },
    "kvcache_prefixes": {
        "prefix_hash": "VARCHAR",
        "model_name": "VARCHAR",
        "cache_scope": "VARCHAR",
        "depth_tokens": "BIGINT",
        "children": "BIGINT",
        "hits": "BIGINT",
        "tokens_saved": "BIGINT",
        "tiers": "VARCHAR[]",
        "sample_text": "VARCHAR",
    },
    "cache_errors": {
        "node_id": "VARCHAR",
        "role": "VARCHAR",
        "kind": "VARCHAR",
        "errors": "BIGINT",
        "stats_reset": "TIMESTAMP",
    },
    "directory": {"name": "VARCHAR", "value": "BIGINT"},
    "stat_activity": {
        "pid": "BIGINT",
        "query_id": "VARCHAR",
        "usename": "VARCHAR",
        "application_name": "VARCHAR",
        "state": "VARCHAR",
        "phase": "VARCHAR",
        "round": "BIGINT",
        "calls_done": "BIGINT",
        "calls_total": "BIGINT",
        "errors": "BIGINT",
        "prompt_tokens": "BIGINT",
        "cached_tokens": "BIGINT",
        "blended_tokens": "BIGINT",
        "recomputed_tokens": "BIGINT",
        "completion_tokens": "BIGINT",
        "query_start": "TIMESTAMP",
        "query": "VARCHAR",
        "worker": "BIGINT",
    },
    "stat_statements": {
        "queryid": "BIGINT",
        "userid": "VARCHAR",
        "query": "VARCHAR",
        "calls": "BIGINT",
        "failures": "BIGINT",
        "total_time": "DOUBLE",
        "engine_time": "DOUBLE",
        "llm_wait_time": "DOUBLE",
        "rounds": "BIGINT",
        "ai_calls": "BIGINT",
        "ai_calls_deduped": "BIGINT",
        "result_cache_hits": "BIGINT",
        "prompt_tokens": "BIGINT",
        "cached_tokens": "BIGINT",
        "completion_tokens": "BIGINT",
        "errors": "BIGINT",
        "stats_reset": "TIMESTAMP",
    },
    "stat_functions": {
        "function_name": "VARCHAR",
        "model_name": "VARCHAR",
        "calls": "BIGINT",
        "rows": "BIGINT",
        "errors": "BIGINT",
        "retries": "BIGINT",
        "null_results": "BIGINT",
        "prompt_tokens": "BIGINT",
        "cached_tokens": "BIGINT",
        "completion_tokens": "BIGINT",
        "total_time": "DOUBLE",
        "mean_ttft": "DOUBLE",
        "p95_ttft": "DOUBLE",
        "stats_reset": "TIMESTAMP",
    },
    "usage_history": {
        "start_time": "TIMESTAMP",
        "end_time": "TIMESTAMP",
        "query_id": "VARCHAR",
        "user_name": "VARCHAR",
        "role_names": "VARCHAR",
        "query_tag": "VARCHAR",
        "function_name": "VARCHAR",
        "model_name": "VARCHAR",
        "prompt_tokens": "BIGINT",
        "cached_tokens": "BIGINT",
        "completion_tokens": "BIGINT",
        "calls": "BIGINT",
        "errors": "BIGINT",
        "is_completed": "BOOLEAN",
        "stats_reset": "TIMESTAMP",
    },
    "query_log": {
        "event_time": "TIMESTAMP",
        "type": "VARCHAR",
        "query_id": "VARCHAR",
        "queryid": "BIGINT",
        "pid": "BIGINT",
        "user_name": "VARCHAR",
        "application_name": "VARCHAR",
        "query_tag": "VARCHAR",
        "query_kind": "VARCHAR",
        "query": "VARCHAR",
        "query_duration": "DOUBLE",
        "rounds": "BIGINT",
        "ai_calls": "BIGINT",
        "prompt_tokens": "BIGINT",
        "cached_tokens": "BIGINT",
        "completion_tokens": "BIGINT",
        "errors": "BIGINT",
        "exception_code": "VARCHAR",
        "stats_reset": "TIMESTAMP",
    },
    "stat_scheduler": {
        "model_name": "VARCHAR",
        "decisions": "BIGINT",
        "affinity_hit": "BIGINT",
        "affinity_miss": "BIGINT",
        "load_override": "BIGINT",
        "matched_tokens": "BIGINT",
        "predicted_tokens": "BIGINT",
        "queued": "BIGINT",
        "queue_time": "DOUBLE",
        "stats_reset": "TIMESTAMP",
    },
    "nodes": {
        "node_id": "VARCHAR",
        "incarnation": "BIGINT",
        "role": "VARCHAR",
        "host": "VARCHAR",
        "zone": "VARCHAR",
        "address": "VARCHAR",
        "data_address": "VARCHAR",
        "state": "VARCHAR",
        "heartbeat_age_s": "DOUBLE",
        "capacity_bytes": "BIGINT",
        "models": "VARCHAR",
        "paths": "VARCHAR",
        "notes": "VARCHAR",
    },
    "models": {
        "model_name": "VARCHAR",
        "revision": "VARCHAR",
        "architecture": "VARCHAR",
        "parameters": "BIGINT",
        "context_tokens": "BIGINT",
        "block_tokens": "BIGINT",
        "block_bytes": "BIGINT",
        "kv_codec": "VARCHAR",
        "stored_block_bytes": "BIGINT",
        "folder": "VARCHAR",
        "blend_refusal": "VARCHAR",
    },
    "namespaces": {
        "name": "VARCHAR",
        "tenants": "VARCHAR",
        "cache_enabled": "BOOLEAN",
        "kv_codec": "VARCHAR",
        "blend": "BOOLEAN",
        "recompute_ratio": "DOUBLE",
        "selector": "VARCHAR",
        "gradual": "BOOLEAN",
        "capacity_bytes": "BIGINT",
        "ttl_s": "DOUBLE",
        "on_full": "VARCHAR",
        "eviction": "VARCHAR",
        "version": "VARCHAR",
        "used_bytes": "BIGINT",
        "blocks": "BIGINT",
        "refused_blocks": "BIGINT",
        "evicted_for_quota": "BIGINT",
        "evicted_for_memory": "BIGINT",
        "evicted_for_ttl": "BIGINT",
        "evicted_for_version": "BIGINT",
        "disk_capacity_bytes": "BIGINT",
        "disk_used_bytes": "BIGINT",
        "disk_blocks": "BIGINT",
        "evicted_from_disk": "BIGINT",
        "media": "VARCHAR",
        "model_name": "VARCHAR",
        "weight": "DOUBLE",
        "read_bytes_per_s": "BIGINT",
        "write_bytes_per_s": "BIGINT",
        "requests_per_s": "DOUBLE",
        "read_bytes": "BIGINT",
        "write_bytes": "BIGINT",
        "throttled": "BIGINT",
    },
    "load_decisions": {
        "node_id": "VARCHAR",
        "choice": "VARCHAR",
        "decisions": "BIGINT",
        "measured": "BIGINT",
        "mean_predicted_s": "DOUBLE",
        "mean_actual_s": "DOUBLE",
        "mean_abs_error_s": "DOUBLE",
    },
    "queue": {
        "request_id": "VARCHAR",
        "tenant": "VARCHAR",
        "model_name": "VARCHAR",
        "priority": "BIGINT",
        "waited_s": "DOUBLE",
        "predicted_ttft_s": "DOUBLE",
        "node_id": "VARCHAR",
        "worker": "BIGINT",
    },
    "routing_log": {
        "request_id": "VARCHAR",
        "attempt": "BIGINT",
        "stage": "VARCHAR",
        "decided_at": "TIMESTAMP",
        "model_name": "VARCHAR",
        "prompt_tokens": "BIGINT",
        "node_id": "VARCHAR",
        "candidates": "VARCHAR",
        "predicted_ttft_s": "DOUBLE",
        "actual_ttft_s": "DOUBLE",
        "error_s": "DOUBLE",
        "worker": "BIGINT",
    },
    "routing_errors": {
        "node_id": "VARCHAR",
        "model_name": "VARCHAR",
        "stage": "VARCHAR",
        "answers": "BIGINT",
        "mean_predicted_s": "DOUBLE",
        "mean_actual_s": "DOUBLE",
        "mean_abs_error_s": "DOUBLE",
        "p50_abs_error_s": "DOUBLE",
        "p90_abs_error_s": "DOUBLE",
        "p99_abs_error_s": "DOUBLE",
        "mean_ratio": "DOUBLE",
        "p50_ratio": "DOUBLE",
        "p90_ratio": "DOUBLE",
        "p99_ratio": "DOUBLE",
        "worker": "BIGINT",
    },
    "node_costs": {
        "node_id": "VARCHAR",
        "models": "VARCHAR",
        "state": "VARCHAR",
        "requests": "BIGINT",
        "waiting_tokens": "BIGINT",
        "prefill_step_s": "DOUBLE",
        "prefill_token_s": "DOUBLE",
        "prefill_pair_s": "DOUBLE",
        "prefill_sequence_s": "DOUBLE",
        "l2_bytes_per_s": "DOUBLE",
        "l3_bytes_per_s": "DOUBLE",
        "l4_bytes_per_s": "DOUBLE",
        "l2_latency_s": "DOUBLE",
        "l3_latency_s": "DOUBLE",
        "l4_latency_s": "DOUBLE",
        "l2_queued_bytes": "BIGINT",
        "l3_queued_bytes": "BIGINT",
        "l4_queued_bytes": "BIGINT",
        "decodes_running": "BIGINT",
        "decode_step_s": "DOUBLE",
        "overhead_s": "DOUBLE",
        "factor": "DOUBLE",
        "worker": "BIGINT",
    },
    "audit_log": {
        "happened_at": "TIMESTAMP",
        "who": "VARCHAR",
        "action": "VARCHAR",
        "subject": "VARCHAR",
        "outcome": "VARCHAR",
        "detail": "VARCHAR",
        "times": "BIGINT",
    },
    "answer_cache": {
        "place": "VARCHAR",
        "answers_in_memory": "BIGINT",
        "memory_bytes": "BIGINT",
        "memory_capacity_bytes": "BIGINT",
        "hits": "BIGINT",
        "shared": "BIGINT",
        "misses": "BIGINT",
        "kept": "BIGINT",
        "evicted": "BIGINT",
        "saved_prompt_tokens": "BIGINT",
        "saved_completion_tokens": "BIGINT",
        "errors": "BIGINT",
        "worker": "BIGINT",
    },
    "pins": {
        "prompt": "VARCHAR",
        "tenant": "VARCHAR",
        "model_name": "VARCHAR",
        "tokens": "BIGINT",
        "size_bytes": "BIGINT",
        "in_memory_tokens": "BIGINT",
        "pinned_until": "TIMESTAMP",
        "seconds_left": "DOUBLE",
    },
    "kv_indexes": {
        "name": "VARCHAR",
        "owner": "VARCHAR",
        "source": "VARCHAR",
        "expression": "VARCHAR",
        "kind": "VARCHAR",
        "model_name": "VARCHAR",
        "state": "VARCHAR",
        "documents": "BIGINT",
        "failed": "BIGINT",
        "tokens": "BIGINT",
        "refreshed_at": "TIMESTAMP",
        "refresh_time": "DOUBLE",
        "indexed": "BIGINT",
        "removed": "BIGINT",
        "refresh_s": "DOUBLE",
        "pin_s": "DOUBLE",
        "last_error": "VARCHAR",
    },
    "jobs": {
        "job": "VARCHAR",
        "owner": "VARCHAR",
        "state": "VARCHAR",
        "done": "BIGINT",
        "total": "BIGINT",
        "written": "BIGINT",
        "failed": "BIGINT",
        "rows_per_second": "DOUBLE",
        "seconds_left": "DOUBLE",
        "hit_ratio": "DOUBLE",
        "calls": "BIGINT",
        "prompt_tokens": "BIGINT",
        "completion_tokens": "BIGINT",
        "max_cost_tokens": "BIGINT",
        "batch": "BIGINT",
        "runner": "VARCHAR",
        "partitions": "BIGINT",
        "last_error": "VARCHAR",
        "created_at": "TIMESTAMP",
        "updated_at": "TIMESTAMP",
        "statement": "VARCHAR",
    },
    "ai_tables": {
        "name": "VARCHAR",
        "owner": "VARCHAR",
        "state": "VARCHAR",
        "rows": "BIGINT",
        "failed": "BIGINT",
        "refreshed_at": "TIMESTAMP",
        "asked": "BIGINT",
        "refresh_time": "DOUBLE",
        "refresh_s": "DOUBLE",
        "suspended": "BOOLEAN",
        "last_error": "VARCHAR",
        "statement": "VARCHAR",
    },
    "job_failures": {
        "job": "VARCHAR",
        "owner": "VARCHAR",
        "key": "VARCHAR",
        "sqlstate": "VARCHAR",
        "message": "VARCHAR",
        "failed_at": "TIMESTAMP",
    },
    "rights": {"role_name": "VARCHAR", "right_kind": "VARCHAR", "granted": "VARCHAR"},
    "my_limits": dict(_LIMITS),
    "call_limits": dict(_LIMITS),
    "settings": {
        "name": "VARCHAR",
        "setting": "VARCHAR",
        "source": "VARCHAR",
        "description": "VARCHAR",
    },
}
VIEW_COLUMNS["stat_kvcache_node"] = {
    "node_id": "VARCHAR",
    "role": "VARCHAR",
    "address": "VARCHAR",
    "zone": "VARCHAR",
    "heartbeat_age_s": "DOUBLE",
    "heartbeat_at": "TIMESTAMP",
    "kv_cache_usage": "DOUBLE",
    "requests_running": "BIGINT",
    "requests_waiting": "BIGINT",
    "transfer_bytes_in": "BIGINT",
    "transfer_bytes_out": "BIGINT",
    "transfer_errors": "BIGINT",
    "cross_zone_bytes_in": "BIGINT",
    "cross_zone_bytes_out": "BIGINT",
    "cross_zone_refusals": "BIGINT",
    "cache_errors": "BIGINT",
    **VIEW_COLUMNS["stat_kvcache"],
}
for _columns in VIEW_COLUMNS.values():
    _columns["as_of"] = "TIMESTAMP"
