"""Rows of the admin views over the front's own statistics: statements, functions, usage, log.

Column names and types are sql/view_columns.py's; the numbers are
dbfront/accounts/statement_log.py's. Text in them is in normal form, so no prompt is among it.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Final

from tierkv.dbfront.accounts.statement_log import StatementLog
from tierkv.dbfront.accounts.statistic_tables import HOUR_S, LAST, seconds_of
from tierkv.dbfront.views.rows import Row, timestamp

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
    """Return a quantile in milliseconds, as exact as the steps are; None of nothing.

    Args:
        steps: ascending, each with how many answers began within it.
        share: of the answers that began no later.
    """
    counted: Sequence[tuple[int, int]] = list(steps)
    wanted = math.ceil(share * sum(answers for _, answers in counted))
    for step, answers in counted:
        wanted -= answers
        if wanted <= 0:
            return 1000 * seconds_of(step)
    return None


_GATHERED: Final[dict[str, tuple[str, Callable[[StatementLog], Awaitable[list[Row]]]]]] = {
    "stat_statements": ("statements", _statements),
    "stat_functions": ("functions", _functions),
    "usage_history": ("usage", _usage),
    "query_log": ("query_log", _query_log),
    "stat_scheduler": ("scheduler", _scheduler),
}
VIEWS: Final = frozenset(_GATHERED)
"""The views over the front's own statistics."""
