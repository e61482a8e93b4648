"""The AI part of EXPLAIN, as lines of text and as JSON.

dbfront/explain/plan.py calls both forms. Text and JSON show the same numbers under the same names;
JSON has durations in milliseconds, text uses a readable unit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tierkv.dbfront.accounts.statement_trace import (
    CascadeTrace,
    FormTrace,
    RoundTrace,
    StatementTrace,
)
from tierkv.dbfront.accounts.statistics import AiStats
from tierkv.dbfront.explain.estimate import Estimate, FormEstimate
from tierkv.kvcore.request import HitTokens
from tierkv.scheduler.plans.forecast import Forecast


def form_trace_lines(form: FormTrace, *, rows: bool) -> list[str]:
    """Show the measured cost of a form's calls; ``rows`` True adds the number of rows."""
    retries = f", retries {form.retries}" if form.retries else ""
    distinct = f"distinct {form.distinct}"
    if rows:
        distinct = f"rows {form.rows}, {distinct} (dedup {form.dedup_ratio:.2f})"
    asked = f"asked {form.asked}, requests {form.requests}, errors {form.errors}{retries}"
    cached = f", from the answer cache {form.cached_answers}" if form.cached_answers else ""
    lines = [f"    {distinct}, {asked}{cached}"]
    if form.cascade is not None:
        lines.append(f"    {_cascade_text(form.cascade)}")
    if form.requests:
        lines += [
            f"    prompt tokens {form.prompt_tokens}, completion tokens "
            f"{form.completion_tokens}, hit tokens {hit_text(form.hit_tokens)}",
            f"    TTFT p50 {_ms(form.ttft_quantile_s(0.5))}, "
            f"p95 {_ms(form.ttft_quantile_s(0.95))}, wall {_ms(form.wall_s)}",
        ]
    return lines


def _cascade_text(told: CascadeTrace) -> str:
    """Say how many distinct rows the model and the classifier answered, or why only the model."""
    if not told.is_used:
        return f"cascade {told.asked:g} not used: {told.unused or 'no row was asked about'}"
    stopped = f"; stopped: {told.unused}" if told.unused else ""
    return (
        f"cascade {told.asked:g}: rows answered by the model {told.by_model}, by the classifier "
        f"{told.by_classifier}; agreement {told.agreed} of {told.checked} checked rows, at least "
        f"{told.bound:.3f} (95 % confidence); vectors {told.vectors}{stopped}"
    )


def round_line(number: int, one: RoundTrace, call_of: Mapping[int, int], *, met: bool) -> str:
    """Show one round of the engine: calls met, if known, and calls asked after the round."""
    name = f"round {number}" if one.runs == 1 else f"rounds {number} to {number + one.runs - 1}"
    asked = _by_call(one.asked, call_of)
    line = f"  {name}: engine {_ms(one.engine_s)}"
    if met:
        seen = _by_call({key: n for key, n in one.lookups.items() if n}, call_of)
        line += f", met {seen or 'no call'}"
    if asked:
        shared = f", {one.plan.shared_tokens} prompt tokens in common" if one.plan.runs else ""
        line += f"; asked {asked}, models {_ms(one.model_s)}{shared}"
    return line


def filter_lines(trace: StatementTrace) -> list[str]:
    """Show the order of several AI filters, and the rows passed by each filter."""
    order = trace.filter_order
    if order is None or len(order.records) < 2:
        return []
    numbers = ", ".join(str(number + 1) for number in order.order())
    passed = "; ".join(
        f"filter {number} passed {record.passed} of {record.rows} rows"
        for number, record in enumerate(order.records, 1)
    )
    return [f"  AI filters of WHERE in the order {numbers}: {passed}"]


def stats_lines(stats: AiStats, trace: StatementTrace, *, rows: bool) -> list[str]:
    """Show the totals of a statement; ``rows`` True adds the number of calls by the engine."""
    calls = f"calls {stats.calls}, " * rows
    nodes = ", ".join(f"{node or '?'} {count}" for node, count in sorted(trace.nodes.items()))
    return [
        f"  {calls}distinct {stats.distinct_calls}, errors {stats.errors}, rounds {stats.rounds}",
        f"  prompt tokens {stats.prompt_tokens}, completion tokens "
        f"{stats.completion_tokens}, hit tokens {hit_text(stats.hit_tokens)}",
        *_cached_lines(stats),
        *_classified_lines(stats),
        *_blended_lines(stats),
        *_plan_lines(stats),
        *([f"  requests answered by {nodes}"] if nodes else []),
        f"  mean TTFT {_ms(stats.mean_ttft_s)}, engine {_ms(stats.engine_s)}, "
        f"models {_ms(stats.llm_s)}",
    ]


def form_estimate_lines(estimate: Estimate, key: int, *, rows: bool) -> list[str]:
    """Show the estimated cost of a form's calls; ``rows`` True adds the number of rows."""
    form = estimate.forms[key]
    if not form.known:
        most = f"at most {estimate.rows} calls: how" if estimate.rows is not None else "how"
        return [f"    {most} many is known when the calls of an earlier stage are answered"]
    counted = f"rows {form.rows}, " if rows else ""
    return [f"    {counted}distinct {_number(form.distinct)}, {_tokens(form)}"]


def estimate_lines(estimate: Estimate, max_calls: int) -> list[str]:
    """Show the totals and the assumptions of an estimate."""
    total, forecast = estimate.total, estimate.prospect.forecast
    known = "" if total.known else " of the calls known so far"
    lines = [
        f"  estimate{known}: {_number(total.distinct)} calls, {_tokens(total)}",
        f"  to compute: {_number(total.prompt_tokens - total.hits.total)} prompt tokens, "
        f"expected hit tokens {hit_text(total.hits)}",
        f"  time: about {_s(estimate.seconds)}: wait {_s(forecast.wait_s)}, prompts "
        f"{_s(estimate.factor * forecast.prefill_s)}, answers "
        f"{_s(estimate.factor * forecast.decode_s(sum(estimate.prospect.answer_tokens)))}, "
        f"beside {_s(estimate.factor * forecast.beside_s)}, "
        f"this front {_s(estimate.factor * forecast.fronts_s)}",
        *(f"  assumed: {text}" for text in assumptions(estimate)),
    ]
    if max_calls and total.distinct > max_calls:
        lines.append(f"  it would be refused: tierkv.max_calls allows {max_calls}")
    return lines


def assumptions(estimate: Estimate) -> list[str]:
    """Return the assumptions of an estimate."""
    forecast, prospect = estimate.prospect.forecast, estimate.prospect
    if not forecast.calls:
        return []
    tokens = _number(estimate.factor * sum(prospect.answer_tokens))
    length = "as long as earlier ones" if prospect.learned else "as long as max_tokens allows"
    texts = [
        _where(forecast),
        f"answers {length}, {tokens} tokens in all",
    ]
    if forecast.nodes and not forecast.measured:
        texts.append("prompts at the default rate: no node has measured its own yet")
    if not forecast.token_s:
        texts.append("answers take no time: no node has measured its rate yet")
    if forecast.unanswered:
        texts.append(
            f"the directory did not answer for {forecast.unanswered} of {forecast.looked_up} "
            "prompts: they count as not cached"
        )
    if forecast.looked_up < len(forecast.calls):
        texts.append(
            f"the cache was looked through for {forecast.looked_up} prompts of "
            f"{len(forecast.calls)}; the others are like their neighbours"
        )
    if estimate.factor != 1.0:
        texts.append(f"every prompt that was made stands for {estimate.factor:.1f}")
    return texts


def _where(forecast: Forecast) -> str:
    if not forecast.nodes:
        return "no node serves the model now"
    nodes = "1 node" if forecast.nodes == 1 else f"{forecast.nodes} nodes that are equally busy"
    return f"up to {forecast.max_in_flight} calls at once, on {nodes}"


def hit_text(hits: HitTokens) -> str:
    """Format hit tokens by tier."""
    return f"L1 {hits.l1} L2 {hits.l2} L3 {hits.l3} L4 {hits.l4}"


def _tokens(form: FormEstimate) -> str:
    more = "at least " if form.at_least else ""
    too_long = f", too long {_number(form.too_long)}" if form.too_long else ""
    return (
        f"requests {more}{_number(form.requests)}{too_long}, "
        f"prompt tokens {more}{_number(form.prompt_tokens)}, "
        f"shared with earlier ones {_number(form.shared_tokens)}, in cache {hit_text(form.found)}"
    )


def _by_call(counts: Mapping[int, int], call_of: Mapping[int, int]) -> str:
    return ", ".join(
        f"call {call_of[key]} {count} {'time' if count == 1 else 'times'}"
        for key, count in sorted(counts.items(), key=lambda item: call_of[item[0]])
    )


def _plan_lines(stats: AiStats) -> list[str]:
    if not stats.planned_runs:
        return []
    runs = f"{stats.planned_runs} run{'s' * (stats.planned_runs != 1)}"
    return [f"  plan: {runs}, {stats.shared_tokens} prompt tokens in common with other calls"]


def _cached_lines(stats: AiStats) -> list[str]:
    if not stats.cached_answers:
        return []
    return [f"  answers from the answer cache {stats.cached_answers}: no model was asked for them"]


def _classified_lines(stats: AiStats) -> list[str]:
    if not stats.vectors and not stats.classified_calls:
        return []
    return [
        f"  answers by a classifier {stats.classified_calls}, which are approximate; vectors "
        f"{stats.vectors}"
    ]


def _blended_lines(stats: AiStats) -> list[str]:
    if not stats.blended_tokens and not stats.recomputed_tokens:
        return []
    return [
        f"  blended: {stats.blended_tokens} tokens reused out of place, "
        f"{stats.recomputed_tokens} computed again; answers are approximate"
    ]


def _number(value: float) -> str:
    return str(round(value))


def _s(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 or not seconds else _ms(seconds)


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms"


def form_json(trace: StatementTrace | None, estimate: Estimate | None, key: int) -> dict[str, Any]:
    """Return the measured or estimated cost of a form's calls."""
    if trace is not None:
        return _trace_json(trace.forms[key])
    if estimate is None:
        return {}
    form = estimate.forms[key]
    if not form.known:
        return {"Known": False, "Calls at Most": estimate.rows}
    return {"Known": True, "Rows": form.rows, **_estimated_json(form)}


def round_json(one: RoundTrace, call_of: Mapping[int, int]) -> dict[str, Any]:
    """Return one round of the engine, with the calls asked after the round."""
    return {
        "Runs": one.runs,
        "Engine ms": _milliseconds(one.engine_s),
        "Met": [{"Call": call_of[key], "Rows": n} for key, n in one.lookups.items() if n],
        "Asked": [{"Call": call_of[key], "Distinct Calls": n} for key, n in one.asked.items()],
        "Models ms": _milliseconds(one.model_s),
        "Prefix Runs": one.plan.runs,
        "Shared Tokens": one.plan.shared_tokens,
    }


def filters_json(trace: StatementTrace) -> dict[str, Any]:
    """Return the order of several AI filters, and the rows passed by each filter."""
    order = trace.filter_order
    if order is None or len(order.records) < 2:
        return {}
    return {
        "Filters": [
            {
                "Filter": number + 1,
                "Rows": order.records[number].rows,
                "Passed": order.records[number].passed,
            }
            for number in order.order()
        ]
    }


def stats_json(stats: AiStats, trace: StatementTrace) -> dict[str, Any]:
    """Return the totals of a statement."""
    return {
        "Rows": stats.calls,
        "Distinct Calls": stats.distinct_calls,
        "Requests": stats.requests,
        "Cached Answers": stats.cached_answers,
        "Classified Calls": stats.classified_calls,
        "Vectors": stats.vectors,
        "Errors": stats.errors,
        "Retries": sum(form.retries for form in trace.forms.values()),
        "Prompt Tokens": stats.prompt_tokens,
        "Completion Tokens": stats.completion_tokens,
        "Hit Tokens": _tiers(stats.hit_tokens),
        "Blended Tokens": stats.blended_tokens,
        "Recomputed Tokens": stats.recomputed_tokens,
        "Prefix Runs": stats.planned_runs,
        "Shared Tokens": stats.shared_tokens,
        "Rounds": stats.rounds,
        "Engine ms": _milliseconds(stats.engine_s),
        "Models ms": _milliseconds(stats.llm_s),
        "Mean TTFT ms": _milliseconds(stats.mean_ttft_s),
        "Nodes": dict(sorted(trace.nodes.items())),
    }


def estimate_json(estimate: Estimate, max_calls: int) -> dict[str, Any]:
    """Return the totals of an estimate."""
    total, forecast = estimate.total, estimate.prospect.forecast
    answer_tokens = sum(estimate.prospect.answer_tokens)
    return {
        "Complete": total.known and not total.at_least,
        **_estimated_json(total),
        "Seconds": round(estimate.seconds, 3),
        "Wait Seconds": round(forecast.wait_s, 3),
        "Prompt Seconds": round(estimate.factor * forecast.prefill_s, 3),
        "Answer Seconds": round(estimate.factor * forecast.decode_s(answer_tokens), 3),
        "Beside Seconds": round(estimate.factor * forecast.beside_s, 3),
        "Front Seconds": round(estimate.factor * forecast.fronts_s, 3),
        "Answer Tokens": round(estimate.factor * answer_tokens),
        "Max Calls": max_calls,
        "Refused": bool(max_calls and total.distinct > max_calls),
        "Assumed": assumptions(estimate),
    }


def _cascade_json(told: CascadeTrace | None) -> dict[str, Any]:
    if told is None:
        return {}
    numbers: dict[str, Any] = {
        "Asked": told.asked,
        "Used": told.is_used,
        "Model Rows": told.by_model,
        "Classifier Rows": told.by_classifier,
        "Vectors": told.vectors,
        "Checked Rows": told.checked,
        "Agreed Rows": told.agreed,
        "Agreement at Least": round(told.bound, 4),
    }
    return {"Cascade": numbers | ({"Not Used": told.unused} if told.unused else {})}


def _trace_json(form: FormTrace) -> dict[str, Any]:
    return {
        "Rows": form.rows,
        "Distinct Calls": form.distinct,
        "Dedup Ratio": round(form.dedup_ratio, 4),
        "Asked": form.asked,
        "Requests": form.requests,
        "Cached Answers": form.cached_answers,
        "Errors": form.errors,
        "Retries": form.retries,
        "Prompt Tokens": form.prompt_tokens,
        "Completion Tokens": form.completion_tokens,
        "Hit Tokens": _tiers(form.hit_tokens),
        "TTFT p50 ms": _milliseconds(form.ttft_quantile_s(0.5)),
        "TTFT p95 ms": _milliseconds(form.ttft_quantile_s(0.95)),
        "Wall ms": _milliseconds(form.wall_s),
        **_cascade_json(form.cascade),
    }


def _estimated_json(form: FormEstimate) -> dict[str, Any]:
    return {
        "Distinct Calls": round(form.distinct),
        "Requests": round(form.requests),
        "At Least": form.at_least,
        "Too Long": round(form.too_long),
        "Prompt Tokens": round(form.prompt_tokens),
        "Shared Tokens": round(form.shared_tokens),
        "Cached Tokens": _tiers(form.found),
        "Expected Hit Tokens": _tiers(form.hits),
    }


def _tiers(hits: HitTokens) -> dict[str, int]:
    return {"L1": hits.l1, "L2": hits.l2, "L3": hits.l3, "L4": hits.l4}


def _milliseconds(seconds: float) -> float:
    return round(seconds * 1000, 3)
