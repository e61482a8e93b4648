"""Columns of the views of jobs, AI tables, KV indexes and queues, with DuckDB's types.

sql/view_columns.py adds the views of the cluster; dbfront/jobs/job_views.py makes the rows of
JOB_VIEW_COLUMNS. docs/views.md says what the columns mean.
"""

from __future__ import annotations

from typing import Final

JOB_VIEW_COLUMNS: Final[dict[str, dict[str, str]]] = {
    "kv_indexes": {
        **dict.fromkeys(("name", "owner", "source", "expression", "kind"), "VARCHAR"),
        **dict.fromkeys(("model_name", "state"), "VARCHAR"),
        "documents": "BIGINT",
        "failed": "BIGINT",
        "tokens": "BIGINT",
        "refreshed_at": "TIMESTAMP",
        "refresh_time": "DOUBLE",
        "indexed": "BIGINT",
        "removed": "BIGINT",
        "refresh_s": "DOUBLE",
        "stale_rows": "BIGINT",
        "pin_s": "DOUBLE",
        "tier": "VARCHAR",
        "ttl_s": "DOUBLE",
        **dict.fromkeys(("l1_bytes", "memory_bytes", "disk_bytes"), "BIGINT"),
        **dict.fromkeys(("calls", "hit_tokens"), "BIGINT"),
        "saved_s": "DOUBLE",
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
}
"""Views over the tables of schema ``tierkv_jobs``."""

SAMPLED: Final = "sampled"
"""In a row of ``kv_indexes`` that is not finished: what dbfront/views/index_places.py samples."""

QUEUE_VIEW_COLUMNS: Final[dict[str, dict[str, str]]] = {
    "queues": {
        **dict.fromkeys(("queue", "group_name"), "VARCHAR"),
        **dict.fromkeys(("length", "waiting", "pending", "consumers", "dead"), "BIGINT"),
        "oldest_idle_s": "DOUBLE",
    },
    "queue_pending": {
        **dict.fromkeys(("queue", "group_name", "entry", "state"), "VARCHAR"),
        **dict.fromkeys(("job", "owner", "consumer"), "VARCHAR"),
        "idle_s": "DOUBLE",
        "deliveries": "BIGINT",
        "reason": "VARCHAR",
        "died_at": "TIMESTAMP",
    },
}
