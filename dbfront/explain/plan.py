"""The "AI Plan" that EXPLAIN adds to the engine's plan: as lines, or as one JSON object.

Independent of the engine. On DuckDB dbfront/statement/explain.py appends the AI Plan to the
engine's rows. PostgreSQL's EXPLAIN returns rows with one column ``QUERY PLAN``, and the relay
appends one row for each of ``ai_plan_lines``. With FORMAT JSON the server returns a list with one
object, and the relay adds ``ai_plan_json`` under the key ``AI Plan``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Final

from tierkv.dbfront.accounts.statement_trace import StatementTrace
from tierkv.dbfront.accounts.statistics import AiStats
from tierkv.dbfront.calls.agreement import asked_agreement
from tierkv.dbfront.contracts import CallDefaults
from tierkv.dbfront.explain.estimate import Estimate
from tierkv.dbfront.explain.rendering import (
    estimate_json,
    estimate_lines,
    filter_lines,
    filters_json,
    form_estimate_lines,
    form_json,
    form_trace_lines,
    round_json,
    round_line,
    stats_json,
    stats_lines,
)
from tierkv.kvcore.call_options import AnswerScope
from tierkv.sql.calls.dialect import Dialect
from tierkv.sql.calls.functions import DOCUMENTS
from tierkv.sql.jobs.kv_index_command import IndexedText, index_used_by
from tierkv.sql.plan.call_sites import CallSite
from tierkv.sql.plan.plan import StatementPlan

STREAM, REPLAY = "stream", "replay"
_OF_ROWS: Final = ("Rows", "Dedup Ratio")
_SHOWN_CHARS: Final = 60


@dataclass(frozen=True, slots=True)
class Analysis:
    """The measured cost of a statement: the counters of EXPLAIN ANALYZE."""

    stats: AiStats
    trace: StatementTrace


@dataclass(frozen=True, slots=True)
class Explanation:
    """The information to show about the AI calls of a statement.

    Attributes:
        plan: plan of the explained statement.
        defaults: the session's model and settings.
        executor: ``stream`` or ``replay``.
        why_not_stream: the reason, in words; empty if unknown.
        max_calls: maximum number of distinct calls; 0 is no limit.
        analysis: measured cost; None without ANALYZE.
        estimate: estimated cost; None without AI_ESTIMATE.
        not_estimated: reason for a missing estimate, if an estimate was requested.
        indexes: the client's KV indexes.
    """

    plan: StatementPlan
    defaults: CallDefaults
    executor: str = REPLAY
    why_not_stream: str = ""
    max_calls: int = 0
    analysis: Analysis | None = None
    estimate: Estimate | None = None
    not_estimated: str = ""
    indexes: tuple[IndexedText, ...] = ()

    @property
    def counts_rows(self) -> bool:
        """True if the front sees the call of every row; PostgreSQL reports only missed calls."""
        return self.plan.dialect is Dialect.DUCKDB


def ai_plan_lines(told: Explanation) -> list[str]:
    """Describe the AI calls of a statement, line by line."""
    plan = told.plan
    lines = ["AI Plan: " + _ways(told)]
    first_of: dict[int, int] = {}
    for site in plan.sites:
        lines.append(_site_line(site, told.defaults))
        lines += _head_lines(site)
        first = first_of.setdefault(site.form.key, site.number)
        lines += _form_lines(told, site) if first == site.number else [f"    as call {first}"]
    if _shares_answers(told):
        lines.append(f"  answers of equal earlier calls are reused: {_scope(told)} (answer cache)")
    if plan.collect_sql is not None:
        lines.append("  collected with a SELECT before the statement writes")
    if plan.stop_after_rows is not None:
        lines.append(f"  stops after {plan.stop_after_rows} rows (LIMIT)")
    elif plan.stops_early:
        lines.append("  stops when there are enough rows (LIMIT)")
    if told.analysis is not None:
        rounds = told.analysis.trace.rounds
        lines += [
            round_line(number, one, first_of, met=told.counts_rows)
            for number, one in enumerate(rounds, 1)
        ]
        lines += filter_lines(told.analysis.trace)
        lines += stats_lines(told.analysis.stats, told.analysis.trace, rows=told.counts_rows)
    if told.estimate is not None:
        lines += estimate_lines(told.estimate, told.max_calls)
        if _shares_answers(told):
            lines.append("  assumed: the answer cache has no answer")
        if _cascades(told):
            lines.append("  assumed: the model answers all rows, without a cascade")
    if told.not_estimated:
        lines.append(f"  no estimate: {told.not_estimated}")
    return lines


def ai_plan_json(told: Explanation) -> dict[str, Any]:
    """Describe the AI calls of a statement as one JSON object."""
    plan = told.plan
    first_of: dict[int, int] = {}
    for site in plan.sites:
        first_of.setdefault(site.form.key, site.number)
    document: dict[str, Any] = {"Executor": told.executor}
    if told.why_not_stream:
        document["Not Streamed"] = told.why_not_stream
    document["Answer Cache"] = _scope(told)
    document["Collected First"] = plan.collect_sql is not None
    if plan.stop_after_rows is not None:
        document["Stops After Rows"] = plan.stop_after_rows
    elif plan.stops_early:
        document["Stops Early"] = True
    document["Calls"] = [_site_json(site, told, first_of) for site in plan.sites]
    if told.analysis is not None:
        document["Rounds"] = [round_json(one, first_of) for one in told.analysis.trace.rounds]
        document |= filters_json(told.analysis.trace)
        totals = stats_json(told.analysis.stats, told.analysis.trace)
        document["Totals"] = totals if told.counts_rows else _without_rows(totals)
    if told.estimate is not None:
        document["Estimate"] = estimate_json(told.estimate, told.max_calls)
    if told.not_estimated:
        document["Not Estimated"] = told.not_estimated
    return document


def _scope(told: Explanation) -> AnswerScope:
    """Return the session's scope; a call may name another one in its options."""
    return told.defaults.options.answer_cache or AnswerScope.OFF


def _shares_answers(told: Explanation) -> bool:
    return bool(told.plan.sites) and _scope(told) is not AnswerScope.OFF


def _cascades(told: Explanation) -> bool:
    """Return whether a classifier may answer rows; a call may ask for a cascade in its options."""
    return any(asked_agreement(site.form, told.defaults) for site in told.plan.sites)


def _ways(told: Explanation) -> str:
    if not told.plan.sites:
        return "no AI calls"
    if told.executor == STREAM:
        return "stream"
    why = f" (not streamed: {told.why_not_stream})" if told.why_not_stream else ""
    return f"collect, evaluate, replay{why}"


def _form_lines(told: Explanation, site: CallSite) -> list[str]:
    key = site.form.key
    index = index_used_by(told.plan.text, dict(site.arguments), told.indexes)
    used = [] if index is None else [f"    kv index {index.name}{_index_tokens(told, key)}"]
    if told.analysis is not None:
        return [*form_trace_lines(told.analysis.trace.forms[key], rows=told.counts_rows), *used]
    if told.estimate is not None:
        return [*form_estimate_lines(told.estimate, key, rows=told.counts_rows), *used]
    return used


def _index_tokens(told: Explanation, key: int) -> str:
    """Return how many tokens of a form's prompts are cached, as far as they are known."""
    if told.analysis is not None:
        form = told.analysis.trace.forms[key]
        return f": {form.hit_tokens.total} of {form.prompt_tokens} prompt tokens were cached"
    if told.estimate is not None:
        cost = told.estimate.forms[key]
        return f": {round(cost.hits.total)} of {round(cost.prompt_tokens)} prompt tokens are cached"
    return ""


def _site_line(site: CallSite, defaults: CallDefaults) -> str:
    return (
        f"  call {site.number}: {site.function} in {site.clause}, "
        f"stage {site.stage + 1}, model {_model(site, defaults) or 'computed per row'}"
        f"{_documents_text(site)}"
    )


def _head_lines(site: CallSite) -> list[str]:
    """Show the common beginning of all prompts of a call, which is computed once."""
    head = site.shared_head
    if not head:
        return []
    shown = head if len(head) <= _SHOWN_CHARS else f"{head[: _SHOWN_CHARS - 3]}..."
    text = json.dumps(shown, ensure_ascii=False)
    return [f"    every prompt begins with the same {len(head)} characters: {text}"]


def _site_json(site: CallSite, told: Explanation, first_of: dict[int, int]) -> dict[str, Any]:
    document: dict[str, Any] = {
        "Call": site.number,
        "Function": site.function,
        "Clause": site.clause,
        "Stage": site.stage + 1,
        "Position": site.position,
        "Model": _model(site, told.defaults),
    }
    documents = _documents(site)
    if documents is not None:
        document["Documents"] = documents
    index = index_used_by(told.plan.text, dict(site.arguments), told.indexes)
    if index is not None:
        document["KV Index"] = index.name
    if site.shared_head:
        document["Prompts Begin With"] = site.shared_head
    first = first_of[site.form.key]
    if first != site.number:
        return document | {"As Call": first}
    trace = told.analysis.trace if told.analysis is not None else None
    numbers = form_json(trace, told.estimate, site.form.key)
    return document | (numbers if told.counts_rows else _without_rows(numbers))


def _without_rows(numbers: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in numbers.items() if name not in _OF_ROWS}


def _model(site: CallSite, defaults: CallDefaults) -> str | None:
    """Return the model's name; None if each row may name another model."""
    if "model" in site.form.row_parameters:
        return None
    return str(site.form.constant("model") or defaults.model or "default")


def _documents(site: CallSite) -> int | str | None:
    if DOCUMENTS in site.form.collected:
        return "of a query"
    if DOCUMENTS in site.form.row_parameters:
        return "per row"
    documents = site.form.constant(DOCUMENTS)
    return len(documents) if isinstance(documents, tuple) else None


def _documents_text(site: CallSite) -> str:
    documents = _documents(site)
    return "" if documents is None else f", documents {documents}"
