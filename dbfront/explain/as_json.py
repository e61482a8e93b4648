"""Counters and estimates of AI calls as JSON values for programs; see dbfront/explain/plan.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tierkv.dbfront.accounts.statement_trace import FormTrace, RoundTrace, StatementTrace
from tierkv.dbfront.accounts.statistics import AiStats
from tierkv.dbfront.explain.as_text import assumptions
from tierkv.dbfront.explain.estimate import Estimate, FormEstimate
from tierkv.kvcore.request import HitTokens


def form_json(trace: StatementTrace | None, estimate: Estimate | None, key: int) -> dict[str, Any]:
    """Tell what became, or would become, of the calls that are written alike."""
    if trace is not None:
        return _trace_json(trace.forms[key])
    if estimate is None:
        return {}
    form = estimate.forms[key]
    if not form.known:
        return {"Known": False, "Calls at Most": estimate.rows}
    return {"Known": True, "Rows": form.rows, **_estimated_json(form)}


def round_json(one: RoundTrace, call_of: Mapping[int, int]) -> dict[str, Any]:
    """Tell one round of the engine, and what was asked after it."""
    return {
        "Runs": one.runs,
        "Engine ms": _ms(one.engine_s),
        "Met": [{"Call": call_of[key], "Rows": n} for key, n in one.lookups.items() if n],
        "Asked": [{"Call": call_of[key], "Distinct Calls": n} for key, n in one.asked.items()],
        "Models ms": _ms(one.model_s),
        "Prefix Runs": one.plan.runs,
        "Shared Tokens": one.plan.shared_tokens,
    }


def filters_json(trace: StatementTrace) -> dict[str, Any]:
    """Tell in which order several AI filters were asked, and what had been learned of them."""
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
    """Sum a statement up."""
    return {
        "Rows": stats.calls,
        "Distinct Calls": stats.distinct_calls,
        "Requests": stats.requests,
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
        "Engine ms": _ms(stats.engine_s),
        "Models ms": _ms(stats.llm_s),
        "Mean TTFT ms": _ms(stats.mean_ttft_s),
        "Nodes": dict(sorted(trace.nodes.items())),
    }


def estimate_json(estimate: Estimate, max_calls: int) -> dict[str, Any]:
    """Sum an estimate up."""
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


def _trace_json(form: FormTrace) -> dict[str, Any]:
    return {
        "Rows": form.rows,
        "Distinct Calls": form.distinct,
        "Dedup Ratio": round(form.dedup_ratio, 4),
        "Asked": form.asked,
        "Requests": form.requests,
        "Errors": form.errors,
        "Retries": form.retries,
        "Prompt Tokens": form.prompt_tokens,
        "Completion Tokens": form.completion_tokens,
        "Hit Tokens": _tiers(form.hit_tokens),
        "TTFT p50 ms": _ms(form.ttft_quantile_s(0.5)),
        "TTFT p95 ms": _ms(form.ttft_quantile_s(0.95)),
        "Wall ms": _ms(form.wall_s),
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


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
