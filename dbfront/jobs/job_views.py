"""Rows of the views ``tierkv.jobs`` and ``tierkv.job_failures``.

Pure. dbfront/statement/server.py and dbfront/postgres/attendant.py read the tables of jobs with
these queries, each in the database of its door.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from tierkv.dbfront.jobs.job import JobPart, JobProgress, PartState
from tierkv.dbfront.jobs.job_book import part_of_row
from tierkv.kvcore import limits
from tierkv.sql.job_view_columns import JOB_VIEW_COLUMNS, SAMPLED
from tierkv.sql.jobs.job_tables import PART_COLUMNS, SCHEMA
from tierkv.sql.views import Row, timestamp

JOB_VIEWS: Final = frozenset(JOB_VIEW_COLUMNS)

_JOB_COLUMNS: Final = ("owner", "job", "statement", "options", "total", "created_s")
_FAILURE_COLUMNS: Final = ("owner", "job", "key", "sqlstate", "message", "failed_s")
_SELECT_JOBS: Final = (
    "SELECT "
    + ", ".join(f"CAST(j.{name} AS text)" for name in _JOB_COLUMNS)
    + ", "
    + ", ".join(f"CAST(p.{name} AS text)" for name in PART_COLUMNS)
    + f" FROM {SCHEMA}.jobs j JOIN {SCHEMA}.parts p ON p.owner = j.owner AND p.job = j.job "
    "ORDER BY j.created_s, j.owner, j.job, p.part"
)
_SELECT_FAILURES: Final = (
    "SELECT "
    + ", ".join(f"CAST({name} AS text)" for name in _FAILURE_COLUMNS)
    + f" FROM (SELECT * FROM {SCHEMA}.failures UNION ALL SELECT owner, name, 0, key, "
    f"substr(error, 1, 5), substr(error, 8), NULL FROM {SCHEMA}.ai_rows WHERE error <> '' "
    "UNION ALL SELECT owner, name, 0, digest, substr(error, 1, 5), substr(error, 8), NULL "
    f"FROM {SCHEMA}.kv_index_texts WHERE error <> '') f "
    f"ORDER BY failed_s DESC LIMIT {limits.MAX_JOB_FAILURES_SHOWN}"
)
_AI_TABLE_COLUMNS: Final = (
    "owner", "name", "state", "options", "refreshed_s", "asked", "took_s", "error", "statement",
)  # fmt: skip
_SELECT_AI_TABLES: Final = (
    "SELECT "
    + ", ".join(f"CAST(t.{name} AS text)" for name in _AI_TABLE_COLUMNS)
    + ", CAST(count(r.key) AS text), CAST(count(NULLIF(r.error, '')) AS text) "
    f"FROM {SCHEMA}.ai_tables t LEFT JOIN {SCHEMA}.ai_rows r ON r.owner = t.owner "
    "AND r.name = t.name GROUP BY "
    + ", ".join(f"t.{name}" for name in _AI_TABLE_COLUMNS)
    + " ORDER BY t.owner, t.name"
)
_KV_INDEX_COLUMNS: Final = (
    "owner", "name", "source", "expression", "options", "state", "refreshed_s", "took_s",
    "indexed", "removed", "error",
)  # fmt: skip
_SELECT_KV_INDEXES: Final = (
    "SELECT "
    + ", ".join(f"CAST(i.{name} AS text)" for name in _KV_INDEX_COLUMNS)
    + ", CAST(count(t.digest) AS text), CAST(count(NULLIF(t.error, '')) AS text), "
    "CAST(sum(t.tokens) AS text), "
    f"(SELECT CAST(max(CASE p.told WHEN 0 THEN p.left_texts END) AS text) FROM {SCHEMA}."
    "kv_index_progress p WHERE p.owner = i.owner AND p.name = i.name) FROM "
    f"{SCHEMA}.kv_indexes i LEFT JOIN {SCHEMA}.kv_index_texts t "
    "ON t.owner = i.owner AND t.name = i.name GROUP BY "
    + ", ".join(f"i.{name}" for name in _KV_INDEX_COLUMNS)
    + " ORDER BY i.owner, i.name"
)
VIEW_QUERIES: Final = {
    "jobs": _SELECT_JOBS,
    "job_failures": _SELECT_FAILURES,
    "ai_tables": _SELECT_AI_TABLES,
    "kv_indexes": _SELECT_KV_INDEXES,
}
"""Query of each view's data, in either database; without tables there are no jobs."""

_WORST_FIRST: Final = (
    PartState.RUNNING, PartState.FAILED, PartState.STOPPED, PartState.CANCELLED, PartState.WAITING,
)  # fmt: skip
_NOTHING_RUNS: Final = "interrupted"


def lock_name(owner: str, job: str, part: int) -> str:
    """Return the name held by the runner of a part; part 0 is a job with runners elsewhere."""
    return f"{owner}/{job}/{part}"


def view_rows_of(
    view: str,
    rows: Iterable[Sequence[str | None]],
    is_held: Callable[[str], bool],
    unseen: Callable[[str, str, float], int | None] = lambda *_: None,
) -> list[Row]:
    """Return the rows of a view.

    Args:
        view: one of JOB_VIEWS.
        rows: result of the view's query, as text.
        is_held: tells whether a session holds the name of a part.
        unseen: rows written to the table of an index, by owner and name, since its last refresh;
            the third value is the index's ``refresh_s``. None: not known.
    """
    if view == "job_failures":
        return [_failure(row) for row in rows]
    if view == "ai_tables":
        return [_ai_table(row) for row in rows]
    if view == "kv_indexes":
        return [_kv_index(row, unseen) for row in rows]
    jobs: dict[tuple[str | None, ...], list[JobPart]] = {}
    for row in rows:
        count = len(_JOB_COLUMNS)
        jobs.setdefault(tuple(row[:count]), []).append(part_of_row(row[count:]))
    return [_job(facts, tuple(parts), is_held) for facts, parts in jobs.items()]


def _failure(row: Sequence[str | None]) -> Row:
    found: Row = dict(zip(_FAILURE_COLUMNS, row, strict=True))
    failed_s = found.pop("failed_s")
    return found | {"failed_at": None if failed_s is None else timestamp(float(failed_s))}


def _ai_table(row: Sequence[str | None]) -> Row:
    facts = dict(zip(_AI_TABLE_COLUMNS, row, strict=False))
    options = json.loads(facts["options"] or "{}")
    refreshed_s = facts["refreshed_s"]
    return {
        "name": facts["name"],
        "owner": facts["owner"],
        "state": facts["state"],
        "rows": int(row[-2] or 0) - int(row[-1] or 0),
        "failed": int(row[-1] or 0),
        "refreshed_at": None if refreshed_s is None else timestamp(float(refreshed_s)),
        "asked": int(facts["asked"] or 0),
        "refresh_time": 1000 * float(facts["took_s"] or 0),
        "refresh_s": options["refresh_s"],
        "suspended": options["suspended"],
        "last_error": facts["error"] or None,
        "statement": facts["statement"],
    }


def _kv_index(row: Sequence[str | None], unseen: Callable[[str, str, float], int | None]) -> Row:
    facts = dict(zip(_KV_INDEX_COLUMNS, row, strict=False))
    options = json.loads(facts["options"] or "{}")
    refreshed_s = facts["refreshed_s"]
    documents, failed, tokens = (int(float(text or 0)) for text in row[-4:-1])
    written = unseen(facts["owner"] or "", facts["name"] or "", options["refresh_s"])
    return {
        "name": facts["name"],
        "owner": facts["owner"],
        "source": facts["source"],
        "expression": facts["expression"],
        "kind": options["kind"],
        "model_name": options["model"] or None,
        "state": facts["state"],
        "documents": documents - failed,
        "failed": failed,
        "tokens": tokens,
        "refreshed_at": None if refreshed_s is None else timestamp(float(refreshed_s)),
        "refresh_time": 1000 * float(facts["took_s"] or 0),
        "indexed": int(facts["indexed"] or 0),
        "removed": int(facts["removed"] or 0),
        "stale_rows": _stale(row[-1], written, facts["state"]),
        "refresh_s": options["refresh_s"],
        "pin_s": options["pin_s"],
        "tier": options.get("tier", "pool"),
        "ttl_s": options.get("ttl_s", 0.0),
        "made_s": options.get("made_s", 0.0),
        "last_error": facts["error"] or None,
        SAMPLED: {
            "owner": facts["owner"] or "",
            "name": facts["name"] or "",
            "made_s": options.get("made_s", 0.0),
            "kind": options["kind"],
            "model": options["model"],
            "system_prompt": options["system_prompt"] or "",
            "tenant": options.get("tenant"),
            "tokens": tokens,
            "refreshed_s": refreshed_s,
        },
    }


def _stale(left: str | None, written: int | None, state: str | None) -> int | None:
    """Return the number of documents left to a running refresh; else the rows written since.

    ``written`` includes what a running refresh has read. After a refresh that failed, both numbers
    count the same rows.
    """
    if left is None:
        return None
    if state == "stale" and int(left):
        return max(int(left), written or 0)
    return int(left) or written


INDEX_USES: Final = "SELECT * FROM kv_index_uses"
"""Query of the statistics for ``with_uses``."""


def with_uses(rows: Sequence[Row], uses: Iterable[Row], costs: Iterable[Row]) -> list[Row]:
    """Add to the rows of ``kv_indexes`` what this front counted of their use.

    Args:
        rows: of the view.
        uses: result of INDEX_USES.
        costs: rows of ``node_costs``; the time to compute a token is the least of a model's nodes.
    """
    counted = {(use["owner"], use["name"], use["made_s"]): use for use in uses}
    token_s: dict[str, float] = {}
    for cost in costs:
        for model in cost["models"].split(", "):
            found_s = cost["prefill_token_s"] or math.inf
            token_s[model] = min(token_s.get(model, math.inf), found_s)
    found: list[Row] = []
    for row in rows:
        use = counted.get((row["owner"], row["name"], row.pop("made_s"))) or _NO_USES
        seconds = token_s.get(use["model_name"], math.inf)
        saved_s = use["hit_tokens"] * seconds if seconds < math.inf else None
        counts = {name: use[name] for name in ("calls", "hit_tokens")}
        found.append(row | counts | {"saved_s": saved_s})
    return found


_NO_USES: Final[Row] = {"model_name": "", "calls": 0, "hit_tokens": 0}


def _job(
    facts: tuple[str | None, ...], parts: tuple[JobPart, ...], is_held: Callable[[str], bool]
) -> Row:
    owner, job, statement, options_text, total, created_s = (text or "" for text in facts)
    options = json.loads(options_text)
    progress = JobProgress.of(parts, int(total))
    states = {part.state for part in parts}
    state: str = next((each for each in _WORST_FIRST if each in states), PartState.DONE)
    running = [part for part in parts if part.state is PartState.RUNNING]
    if running and not any(is_held(lock_name(owner, job, part.number)) for part in running):
        state = _NOTHING_RUNS
    return {
        "job": job,
        "owner": owner,
        "state": state,
        "done": progress.done,
        "total": progress.total,
        "written": sum(part.written for part in parts),
        "failed": sum(part.failed for part in parts),
        "rows_per_second": progress.rate,
        "seconds_left": progress.eta_s if state == PartState.RUNNING else None,
        "hit_ratio": progress.hit_ratio,
        "calls": sum(part.calls for part in parts),
        "prompt_tokens": sum(part.prompt_tokens for part in parts),
        "completion_tokens": sum(part.completion_tokens for part in parts),
        "max_cost_tokens": options["max_cost_tokens"],
        "batch": options["batch"],
        "runner": options["runner"],
        "partitions": len(parts),
        "last_error": next((part.error for part in parts if part.error), None),
        "created_at": timestamp(float(created_s)),
        "updated_at": timestamp(max(part.updated_s for part in parts)),
        "statement": statement,
    }
