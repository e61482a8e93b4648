"""Rows of the views ``tierkv.jobs`` and ``tierkv.job_failures``.

Pure. dbfront/statement/server.py and dbfront/postgres/attendant.py read the tables of jobs with
these queries, each in the database of its door.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from tierkv.dbfront.jobs.job import JobPart, PartState
from tierkv.dbfront.jobs.job_book import part_of_row
from tierkv.dbfront.jobs.job_progress import JobProgress
from tierkv.kvcore import limits
from tierkv.sql.jobs.job_tables import PART_COLUMNS, SCHEMA
from tierkv.sql.views import Row, timestamp

JOB_VIEWS: Final = frozenset({"jobs", "job_failures"})

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
    + f" FROM {SCHEMA}.failures ORDER BY failed_s DESC LIMIT {limits.MAX_JOB_FAILURES_SHOWN}"
)
VIEW_QUERIES: Final = {"jobs": _SELECT_JOBS, "job_failures": _SELECT_FAILURES}
"""Query of each view's data, in either database; without tables there are no jobs."""

_WORST_FIRST: Final = (
    PartState.RUNNING, PartState.FAILED, PartState.STOPPED, PartState.CANCELLED, PartState.WAITING,
)  # fmt: skip
_NOTHING_RUNS: Final = "interrupted"


def lock_name(owner: str, job: str, part: int) -> str:
    """Return the name held by the runner of a part; part 0 is a job with runners elsewhere."""
    return f"{owner}/{job}/{part}"


def view_rows_of(
    view: str, rows: Iterable[Sequence[str | None]], is_held: Callable[[str], bool]
) -> list[Row]:
    """Return the rows of a view.

    Args:
        view: one of JOB_VIEWS.
        rows: result of the view's query, as text.
        is_held: tells whether a session holds the name of a part.
    """
    if view == "job_failures":
        return [_failure(row) for row in rows]
    jobs: dict[tuple[str | None, ...], list[JobPart]] = {}
    for row in rows:
        count = len(_JOB_COLUMNS)
        jobs.setdefault(tuple(row[:count]), []).append(part_of_row(row[count:]))
    return [_job(facts, tuple(parts), is_held) for facts, parts in jobs.items()]


def _failure(row: Sequence[str | None]) -> Row:
    found: Row = dict(zip(_FAILURE_COLUMNS, row, strict=True))
    return found | {"failed_at": timestamp(float(found.pop("failed_s") or 0))}


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
