"""The account of one statement: the cost of its AI calls, and the way the statement ended.

SQL sessions (DuckDB and the PostgreSQL relay) report events here; dbfront/accounts/statement_log.py
opens the account. Literals, answers and error texts are never kept, because these texts may contain
prompts and data.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, Final
from uuid import UUID

from tierkv.dbfront.accounts.ended_call import EndedCall
from tierkv.dbfront.accounts.statistic_store import StatisticStore
from tierkv.dbfront.accounts.statistic_tables import (
    FIRST_TOKENS,
    FUNCTIONS,
    HOUR_S,
    KV_INDEX_USES,
    STATEMENTS,
    USAGE,
    step_of,
)
from tierkv.dbfront.accounts.statistics import AiStats
from tierkv.dbfront.contracts import CallDefaults, ClientInfo, PreparedCall
from tierkv.kvcore.clock import Clock
from tierkv.kvcore.errors import CancelledByUserError, SqlSyntaxError, TierKVError, UnknownUdfError
from tierkv.sql.calls.ai_call import AiCall, CallForm
from tierkv.sql.jobs.kv_index_command import IndexedText
from tierkv.sql.text.lexer import tokenize
from tierkv.sql.text.statement import normal_form, query_id

_SHORT: Final = 65_536
"""The normal form of a longer text is computed off the event loop, or omitted if the statement has
no AI calls or failed before its start.
"""

_INTERNAL_ERROR: Final = "XX000"


class LoggedStatements(StrEnum):
    """The statements to log."""

    AI = "ai"
    ALL = "all"
    OFF = "off"


class LogEvent(StrEnum):
    """Event type of a log row; the names are ClickHouse's."""

    START = "QueryStart"
    FINISH = "QueryFinish"
    FAILED_BEFORE = "ExceptionBeforeStart"
    FAILED = "ExceptionWhileProcessing"


class StatementEntry:
    """One statement's account; a reducer of its calls.

    Attributes:
        query_id: id of this run, a UUID that sorts by time.
        queryid: id of the statement without its literals; None until the statement began.
        kind: statement kind, for example ``query`` or ``insert``.
        rows: calls by the engine for final rows, by function and model.
        indexed: KV index used by the prompts of a form, by the form's key.
    """

    def __init__(
        self,
        store: StatisticStore,
        clock: Clock,
        logged: LoggedStatements,
        *,
        client: ClientInfo,
        pid: int,
        text: str,
        query_tag: str = "",
    ) -> None:
        self.query_id = new_query_id(clock.wall())
        self.queryid: int | None = None
        self.kind = ""
        self.rows: Counter[tuple[str, str]] = Counter()
        self.indexed: Mapping[int, IndexedText] = {}
        self._holds_calls: bool | None = None
        self._store = store
        self._clock = clock
        self._logged = logged
        self._client = client
        self._pid = pid
        self._text = text
        self._tag = query_tag
        self._started_s = clock.now()
        self._query: str | None = None
        self._usage_keys: dict[tuple[Any, ...], None] = {}

    def planned(self, kind: str, *, holds_calls: bool) -> None:
        """Record the kind of the statement, and whether the statement has AI calls."""
        self.kind, self._holds_calls = kind, holds_calls

    async def began(self) -> None:
        """Record the start of a statement with AI calls; return when the start is in the log."""
        if len(self._text) > _SHORT:
            self.queryid, self._query = await asyncio.to_thread(identify, self._text)
        else:
            self.queryid, self._query = identify(self._text)
        if self._logged is not LoggedStatements.OFF:
            row = self._row(LogEvent.START)
            self._store.append(lambda: row)
            await asyncio.to_thread(self._store.flush, self._clock.wall())

    def take(self, call: EndedCall) -> None:
        """Count an ended call; a call without a model is not counted."""
        if call.is_local:
            return
        facts = {"user_name": self._client.user, "query_tag": self._tag, "is_completed": 0}
        self._usage_keys[count_call(self._store, call, self._clock.wall(), facts)] = None
        index = self.indexed.get(call.form)
        if index is not None and not call.failed:
            key = (index.owner, index.name, index.made_s)
            counts = {"calls": 1, "hit_tokens": call.cost.usage.hit_tokens.total}
            named = {"model_name": call.model}
            self._store.add(KV_INDEX_USES, key, counts, at_s=self._clock.wall(), facts=named)

    def ended(self, stats: AiStats, error: BaseException | None = None) -> None:
        """Record the end of the statement, with the counters of its AI calls."""
        if self.queryid is not None:
            self._count_statement(stats, failed=error is not None)
            self._complete_usage()
        if self._is_logged(error):
            self._log_end(stats, error)

    def _is_logged(self, error: BaseException | None) -> bool:
        if self._logged is not LoggedStatements.AI:
            return self._logged is LoggedStatements.ALL
        if self._holds_calls is None:  # The statement could not be planned.
            return error is not None and "ai_" in self._text.lower()
        if isinstance(error, UnknownUdfError):
            return True
        return self._holds_calls and (error is not None or self.queryid is not None)

    def _count_statement(self, stats: AiStats, *, failed: bool) -> None:
        clock = self._clock
        counts = {
            "calls": 1,
            "failures": failed,
            "total_time": 1000 * (clock.now() - self._started_s),
            "engine_time": 1000 * stats.engine_s,
            "llm_wait_time": 1000 * stats.llm_s,
            "rounds": stats.rounds,
            "ai_calls": stats.calls,
            "ai_calls_deduped": max(0, stats.calls - stats.distinct_calls),
            "result_cache_hits": stats.cached_answers,
            "classified_calls": stats.classified_calls,
            **_costs(stats),
        }
        key = (self._client.user, self.queryid)
        facts = {"query": self._query}
        self._store.add(STATEMENTS, key, counts, at_s=clock.wall(), facts=facts)
        for function, rows in self.rows.items():
            self._store.add(FUNCTIONS, function, {"rows": rows}, at_s=clock.wall())

    def _complete_usage(self) -> None:
        wall_s = self._clock.wall()
        for key in self._usage_keys:
            self._store.add(USAGE, key, {}, at_s=wall_s, facts={"is_completed": 1})

    def _log_end(self, stats: AiStats, error: BaseException | None) -> None:
        code = None if error is None else _code(error)
        row = self._row(self._ending(code)) | {
            "query_duration": 1000 * (self._clock.now() - self._started_s),
            "exception_code": code,
        }
        if self.queryid is not None:
            row |= {"rounds": stats.rounds, "ai_calls": stats.calls, **_costs(stats)}
            self._store.append(lambda: row)
        else:  # The writer computes the normal form, at no cost to the statement.
            text = self._text if len(self._text) <= _SHORT else ""
            self._store.append(lambda: row | dict(zip(_IDENTITY, identify(text), strict=True)))

    def _ending(self, code: str | None) -> LogEvent:
        if code is None:
            return LogEvent.FINISH
        if self.queryid is not None:
            return LogEvent.FAILED
        # Class 42 has the errors raised by an engine before it runs a statement.
        early = self._holds_calls is not False or code.startswith("42")
        return LogEvent.FAILED_BEFORE if early else LogEvent.FAILED

    def _row(self, event: LogEvent) -> dict[str, Any]:
        return {
            "event_s": self._clock.wall(),
            "type": event.value,
            "query_id": self.query_id,
            "queryid": self.queryid,
            "pid": self._pid,
            "user_name": self._client.user,
            "application_name": self._client.application_name,
            "query_tag": self._tag,
            "query_kind": self.kind,
            "query": self._query,
        }


def new_query_id(wall_s: float) -> str:
    """Return a UUID of version 7, which sorts by its creation time."""
    value = int.from_bytes(os.urandom(10), "big")
    milliseconds = int(wall_s * 1000) & (1 << 48) - 1
    high, low = value >> 62 & 0xFFF, value & (1 << 62) - 1
    return str(UUID(int=milliseconds << 80 | 0x7 << 76 | high << 64 | 0b10 << 62 | low))


def hour_of(wall_s: float) -> int:
    """Return the Unix time of the start of the hour, as in usage_history."""
    return int(wall_s // HOUR_S) * HOUR_S


def count_call(
    store: StatisticStore, call: EndedCall, wall_s: float, facts: Mapping[str, Any]
) -> tuple[Any, ...]:
    """Count a call by function, by time to first token and by hour.

    Args:
        store: updated in place.
        call: a call of a statement or by REST.
        wall_s: Unix time of the call's end.
        facts: facts for the row of ``USAGE``.

    Returns:
        the key of the row of ``USAGE``.
    """
    cost, function = call.cost, (call.function, call.model)
    begun = [ttft_s for ttft_s in cost.first_tokens_s if ttft_s > 0.0]
    counts = {
        "calls": 1,
        "errors": call.failed,
        "prompt_tokens": cost.usage.prompt_tokens,
        "cached_tokens": cost.usage.hit_tokens.total,
        "completion_tokens": cost.usage.completion_tokens,
    }
    more = {
        "null_results": call.is_null,
        "classified_calls": call.is_classified,
        "retries": call.retries,
        "total_time": 1000 * cost.total_s,
        "answered": len(begun),
        "ttft_time": 1000 * sum(begun),
    }
    store.add(FUNCTIONS, function, counts | more, at_s=wall_s)
    for ttft_s in begun:
        store.add(FIRST_TOKENS, (*function, step_of(ttft_s)), {"answers": 1}, at_s=wall_s)
    key = (hour_of(wall_s), call.statement, *function)
    store.add(USAGE, key, counts, at_s=wall_s, facts=facts)
    return key


_IDENTITY: Final = ("queryid", "query")


def identify(text: str) -> tuple[int | None, str | None]:
    """Return the id and the normal form of a statement; None if the text cannot be tokenized."""
    try:
        tokens = tokenize(text)
    except SqlSyntaxError:
        return None, None
    return (query_id(tokens), normal_form(tokens)) if tokens else (None, None)


def _costs(stats: AiStats) -> dict[str, float]:
    return {
        "prompt_tokens": stats.prompt_tokens,
        "cached_tokens": stats.hit_tokens.total,
        "completion_tokens": stats.completion_tokens,
        "errors": stats.errors,
    }


def _code(error: BaseException) -> str:
    """Return the SQLSTATE sent to the client."""
    if isinstance(error, asyncio.CancelledError):
        return CancelledByUserError.sqlstate
    return error.sqlstate if isinstance(error, TierKVError) else _INTERNAL_ERROR


class CallNames:
    """Function and model names for the statistics of a statement's calls.

    Attributes:
        _models: names of answering models, by requested name.
    """

    def __init__(self, forms: Sequence[CallForm], defaults: CallDefaults) -> None:
        self._forms = [form for form in forms if not form.function.local]
        self._defaults = defaults
        self._models: dict[str | None, str] = {}

    def prepared(self, prepared: PreparedCall) -> None:
        """Record the answering model for a requested name; without a name, for the default."""
        self._models[prepared.call.model] = prepared.model.name

    def model_of(self, call: AiCall) -> str:
        """Return the answering model of a call, or the requested name if no call was prepared."""
        asked = call.model or self._defaults.model
        return self._models.get(asked, asked or "")

    def rows(self, lookups: Mapping[int, int]) -> Mapping[tuple[str, str], int]:
        """Sum up the rows of forms by function and model.

        The model is empty if each row names its own model.

        Args:
            lookups: rows by form key.
        """
        rows = Counter[tuple[str, str]]()
        for form in self._forms:
            name = form.function.canonical
            by_row = "model" in form.row_parameters
            model = "" if by_row else self.model_of(AiCall(name, form.constants))
            rows[name, model] += lookups[form.key]
        return rows
