"""The admin views of schema ``tierkv``: their DDL, their columns, and who reads them.

Each view unpacks a JSON text that the front puts into a session variable just before a statement
that reads the view; so a view is always as fresh as its statement and costs nothing otherwise.
"""

from __future__ import annotations

from importlib import resources
from typing import Final

from sql.lexer import Token, name_value

SCHEMA: Final = "tierkv"
SESSION_VARIABLE: Final = "tierkv_session"
"""Session variable with the session's number, by which a table function knows its caller."""

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
    },
    "directory": {"name": "VARCHAR", "value": "BIGINT"},
    "stat_activity": {
        "pid": "BIGINT",
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
    },
    "nodes": {
        "node_id": "VARCHAR",
        "incarnation": "BIGINT",
        "role": "VARCHAR",
        "host": "VARCHAR",
        "address": "VARCHAR",
        "data_address": "VARCHAR",
        "state": "VARCHAR",
        "heartbeat_age_s": "DOUBLE",
        "capacity_bytes": "BIGINT",
        "models": "VARCHAR",
        "paths": "VARCHAR",
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
    },
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
    "heartbeat_age_s": "DOUBLE",
    "kv_cache_usage": "DOUBLE",
    "requests_running": "BIGINT",
    "requests_waiting": "BIGINT",
    "transfer_bytes_in": "BIGINT",
    "transfer_bytes_out": "BIGINT",
    "transfer_errors": "BIGINT",
    "cache_errors": "BIGINT",
    **VIEW_COLUMNS["stat_kvcache"],
}


def view_ddl() -> str:
    """Return the statements that make the schema and its views."""
    return resources.files("sql").joinpath("ddl/admin_views.sql").read_text(encoding="utf-8")


def simulate_ddl() -> str:
    """Return the statement that makes the table function ``tierkv.simulate``."""
    return resources.files("sql").joinpath("ddl/simulate.sql").read_text(encoding="utf-8")


def view_variable(view: str) -> str:
    """Name the session variable that a view unpacks."""
    return f"{SCHEMA}_{view}"


def admin_views_in(tokens: list[Token]) -> frozenset[str]:
    """Find which admin views a statement names, written ``tierkv.name``."""
    found = set()
    for index, token in enumerate(tokens[:-2]):
        if tokens[index + 1].text == "." and name_value(token) == SCHEMA:
            name = name_value(tokens[index + 2])
            if name in VIEW_COLUMNS:
                found.add(name)
    return frozenset(found)
