"""Rows of the admin views over the front's statistics, and over the activity of sessions.

Column names and types are defined in sql/views.py; dbfront/accounts/statement_log.py has the
numbers. Statements are shown in normal form, so prompts never appear.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Final

from tierkv.dbfront.accounts.statement_entry import identify
from tierkv.dbfront.accounts.statement_log import StatementLog
from tierkv.dbfront.accounts.statistic_tables import HOUR_S, LAST, seconds_of
from tierkv.dbfront.accounts.statistics import AiStats, StatementProgress
from tierkv.dbfront.answer_cache.answer_cache import AnswerCache
from tierkv.dbfront.contracts import ClientInfo
from tierkv.sql.views import Row, timestamp

LONGEST_SHOWN: Final = 65_536
"""Maximum length in characters of another user's statement to be shown in normal form."""


@dataclass(slots=True)
class Activity:
    """Current activity of a session, for tierkv.stat_activity."""

    state: str = "idle"
    query: str = ""
    query_start_s: float = 0.0
    query_id: str = ""
    progress: StatementProgress | None = None


def activity_row(pid: int, client: ClientInfo, activity: Activity, *, asking: str) -> Row:
    """Return a session's row of tierkv.stat_activity.

    Statements of the user ``asking`` are shown as written. Statements of other users are shown in
    normal form, because their prompts are private.
    """
    progress = activity.progress
    stats = progress.stats if progress else AiStats()
    started = activity.query_start_s
    return {
        "pid": pid,
        "query_id": activity.query_id or None,
        "usename": client.user,
        "application_name": client.application_name,
        "state": activity.state,
        "phase": _phase(activity),
        "round": stats.rounds,
        "calls_done": stats.distinct_calls,
        "calls_total": progress.calls_total if progress else 0,
        "errors": stats.errors,
        "prompt_tokens": stats.prompt_tokens,
        "cached_tokens": stats.hit_tokens.total,
        "blended_tokens": stats.blended_tokens,
        "recomputed_tokens": stats.recomputed_tokens,
        "completion_tokens": stats.completion_tokens,
        "query_start": timestamp(started) if started else None,
        "query": activity.query if client.user == asking else _without_literals(activity.query),
    }


def _phase(activity: Activity) -> str:
    """Return the phase; a round with answers is a replay, even if the round collects more calls."""
    progress = activity.progress
    if progress is None:
        return "planning" if activity.state == "active" else ""
    return "replay" if progress.phase == "collect" and progress.round else progress.phase


def _without_literals(text: str) -> str | None:
    return identify(text)[1] if len(text) <= LONGEST_SHOWN else None


_P95: Final = 0.95


async def statistic_rows(view: str, log: StatementLog) -> list[Row]:
    """Return the rows of one of ``VIEWS``."""
    group, gather = _GATHERED[view]
    rows = await gather(log)
    reset = timestamp((await log.resets())[group])
    for row in rows:
        row["stats_reset"] = reset
    return rows


async def _statements(log: StatementLog) -> list[Row]:
    return await log.select(f"SELECT * FROM statements ORDER BY {LAST}")


async def _functions(log: StatementLog) -> list[Row]:
    steps: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for row in await log.select("SELECT * FROM first_tokens ORDER BY step"):
        key = (row["function_name"], row["model_name"])
        steps.setdefault(key, []).append((row["step"], row["answers"]))
    functions = await log.select("SELECT * FROM functions ORDER BY function_name, model_name")
    for row in functions:
        answered = row["answered"]
        row["mean_ttft"] = row["ttft_time"] / answered if answered else None
        row["p95_ttft"] = quantile_ms(steps.get((row["function_name"], row["model_name"]), ()))
    return functions


async def _usage(log: StatementLog) -> list[Row]:
    return await log.select("SELECT * FROM usage ORDER BY start_s, rowid", _finish_usage)


def _finish_usage(row: Row) -> None:
    row["start_time"] = timestamp(row["start_s"])
    row["end_time"] = timestamp(row["start_s"] + HOUR_S)
    row["is_completed"] = bool(row["is_completed"])


async def _query_log(log: StatementLog) -> list[Row]:
    return await log.select("SELECT * FROM query_log ORDER BY id", _finish_event)


def _finish_event(row: Row) -> None:
    row["event_time"] = timestamp(row["event_s"])


async def _scheduler(log: StatementLog) -> list[Row]:
    return await log.select("SELECT * FROM scheduler ORDER BY model_name")


def quantile_ms(steps: Iterable[tuple[int, int]], share: float = _P95) -> float | None:
    """Return a quantile in milliseconds, with the precision of the steps; None without answers.

    Args:
        steps: (step, answers that began within the step), ascending.
        share: share of the answers that began no later than the quantile.
    """
    counted: Sequence[tuple[int, int]] = list(steps)
    wanted = math.ceil(share * sum(answers for _, answers in counted))
    for step, answers in counted:
        wanted -= answers
        if wanted <= 0:
            return 1000 * seconds_of(step)
    return None


def answer_cache_row(answers: AnswerCache) -> Row:
    """Return the row of ``answer_cache``."""
    recent = answers.recent
    return {
        "place": "memory" if answers.store is None else answers.store.place,
        "answers_in_memory": len(recent),
        "memory_bytes": recent.used_bytes,
        "memory_capacity_bytes": recent.most_bytes,
        "evicted": recent.evicted,
        **asdict(answers.counts),
    }


_GATHERED: Final[dict[str, tuple[str, Callable[[StatementLog], Awaitable[list[Row]]]]]] = {
    "stat_statements": ("statements", _statements),
    "stat_functions": ("functions", _functions),
    "usage_history": ("usage", _usage),
    "query_log": ("query_log", _query_log),
    "stat_scheduler": ("scheduler", _scheduler),
}
VIEWS: Final = frozenset(_GATHERED)
"""The views over the front's own statistics."""
