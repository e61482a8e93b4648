"""What the front's own statistics are made of: tables of counters that only ever grow.

Each has key columns, facts about the key (the newest are kept) and counters; so what happened since
the last write is added up in memory and then added to the table, and a front that starts again goes
on counting. dbfront/accounts/statistic_store.py keeps them, dbfront/accounts/statement_log.py fills
them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from tierkv.kvcore import limits

LAST: Final = "last_s"
"""Fact of every table: Unix time of its last change. What is oldest by it goes first."""


@dataclass(frozen=True, slots=True)
class CounterTable:
    """A table of counters; each column has a name and an SQLite type.

    Attributes:
        keys: columns that name a row.
        facts: columns that the newest value of is kept; ``LAST`` is added.
        counters: columns that are added up.
        most_rows: rows that are kept.
        group: what ``tierkv.stat_reset(group)`` calls it.
    """

    name: str
    keys: dict[str, str]
    facts: dict[str, str]
    counters: dict[str, str]
    most_rows: int
    group: str

    @property
    def columns(self) -> dict[str, str]:
        """All of them, in order."""
        return {**self.keys, **self.facts, LAST: "REAL", **self.counters}


_TOKENS: Final = {
    "prompt_tokens": "INTEGER",
    "cached_tokens": "INTEGER",
    "completion_tokens": "INTEGER",
}

STATEMENTS: Final = CounterTable(
    "statements",
    keys={"userid": "TEXT", "queryid": "INTEGER"},
    facts={"query": "TEXT"},
    counters={
        "calls": "INTEGER",
        "failures": "INTEGER",
        "total_time": "REAL",
        "engine_time": "REAL",
        "llm_wait_time": "REAL",
        "rounds": "INTEGER",
        "ai_calls": "INTEGER",
        "ai_calls_deduped": "INTEGER",
        "result_cache_hits": "INTEGER",
        **_TOKENS,
        "errors": "INTEGER",
    },
    most_rows=limits.MAX_STATEMENTS_KEPT,
    group="statements",
)
FUNCTIONS: Final = CounterTable(
    "functions",
    keys={"function_name": "TEXT", "model_name": "TEXT"},
    facts={},
    counters={
        "calls": "INTEGER",
        "rows": "INTEGER",
        "errors": "INTEGER",
        "retries": "INTEGER",
        "null_results": "INTEGER",
        **_TOKENS,
        "total_time": "REAL",
        "answered": "INTEGER",
        "ttft_time": "REAL",
    },
    most_rows=limits.MAX_FUNCTIONS_KEPT,
    group="functions",
)
FIRST_TOKENS: Final = CounterTable(
    "first_tokens",
    keys={"function_name": "TEXT", "model_name": "TEXT", "step": "INTEGER"},
    facts={},
    counters={"answers": "INTEGER"},
    most_rows=limits.MAX_FUNCTIONS_KEPT * 100,
    group="functions",
)
"""How many answers began within which step of time; see ``step_of``."""

USAGE: Final = CounterTable(
    "usage",
    keys={
        "start_s": "INTEGER",
        "query_id": "TEXT",
        "function_name": "TEXT",
        "model_name": "TEXT",
    },
    facts={"user_name": "TEXT", "query_tag": "TEXT", "is_completed": "INTEGER"},
    counters={**_TOKENS, "calls": "INTEGER", "errors": "INTEGER"},
    most_rows=limits.MAX_USAGE_ROWS,
    group="usage",
)
SCHEDULER: Final = CounterTable(
    "scheduler",
    keys={"model_name": "TEXT"},
    facts={},
    counters={
        "decisions": "INTEGER",
        "affinity_hit": "INTEGER",
        "affinity_miss": "INTEGER",
        "load_override": "INTEGER",
        "matched_tokens": "INTEGER",
        "predicted_tokens": "INTEGER",
        "queued": "INTEGER",
        "queue_time": "REAL",
    },
    most_rows=limits.MAX_FUNCTIONS_KEPT,
    group="scheduler",
)
TABLES: Final = (STATEMENTS, FUNCTIONS, FIRST_TOKENS, USAGE, SCHEDULER)

QUERY_LOG: Final[dict[str, str]] = {
    "event_s": "REAL",
    "type": "TEXT",
    "query_id": "TEXT",
    "queryid": "INTEGER",
    "pid": "INTEGER",
    "user_name": "TEXT",
    "application_name": "TEXT",
    "query_tag": "TEXT",
    "query_kind": "TEXT",
    "query": "TEXT",
    "query_duration": "REAL",
    "rounds": "INTEGER",
    "ai_calls": "INTEGER",
    **_TOKENS,
    "errors": "INTEGER",
    "exception_code": "TEXT",
}
"""Columns of the log of statements, which is appended to."""

QUERY_LOG_GROUP: Final = "query_log"
GROUPS: Final = tuple(
    dict.fromkeys([*(table.group for table in TABLES), QUERY_LOG_GROUP, "kvcache"])
)
"""What may be reset by itself."""

HOUR_S: Final = 3600

_STEP: Final = math.log(1.02)
_SHORTEST_S: Final = 1e-6


def step_of(seconds: float) -> int:
    """Return the step of a duration: steps grow by 2 %, so that quantiles are as exact."""
    return math.ceil(math.log(max(seconds, _SHORTEST_S) / _SHORTEST_S) / _STEP)


def seconds_of(step: int) -> float:
    """Return the middle of a step."""
    return _SHORTEST_S * math.exp((step - 0.5) * _STEP) if step else _SHORTEST_S
