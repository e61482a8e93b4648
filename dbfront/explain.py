"""The "AI Plan" lines that EXPLAIN adds to the engine's plan."""

from __future__ import annotations

from dbfront.call_defaults import CallDefaults
from dbfront.statistics import AiStats
from sql.functions import DOCUMENTS
from sql.plan import CallSite, StatementPlan


def ai_plan_text(plan: StatementPlan, defaults: CallDefaults, analyzed: AiStats | None) -> str:
    """Describe what the front does for a statement: its calls, and how many rows may do.

    Args:
        plan: the statement's plan.
        defaults: the session's model and settings.
        analyzed: what it cost, after EXPLAIN ANALYZE.
    """
    lines = ["AI Plan: collect, evaluate, replay"]
    lines += [_site_line(site, defaults) for site in plan.sites]
    if plan.collect_sql is not None:
        lines.append("  collected with a SELECT before the statement writes")
    if plan.stop_after_rows is not None:
        lines.append(f"  stops after {plan.stop_after_rows} rows (LIMIT)")
    if analyzed is not None:
        hits = analyzed.hit_tokens
        lines += [
            f"  calls {analyzed.calls}, distinct {analyzed.distinct_calls}, "
            f"errors {analyzed.errors}, rounds {analyzed.rounds}",
            f"  prompt tokens {analyzed.prompt_tokens}, completion tokens "
            f"{analyzed.completion_tokens}, hit tokens L1 {hits.l1} L2 {hits.l2} "
            f"L3 {hits.l3} L4 {hits.l4}",
            *_blended_lines(analyzed),
            *_plan_lines(analyzed),
            f"  mean TTFT {analyzed.mean_ttft_s * 1000:.1f} ms, engine "
            f"{analyzed.engine_s * 1000:.1f} ms, models {analyzed.llm_s * 1000:.1f} ms",
        ]
    return "\n".join(lines)


def _site_line(site: CallSite, defaults: CallDefaults) -> str:
    if "model" in site.form.row_parameters:
        model = "computed per row"
    else:
        model = str(site.form.constant("model") or defaults.model or "default")
    return (
        f"  call {site.number}: {site.function} in {site.clause}, "
        f"stage {site.stage + 1}, model {model}{_documents(site)}"
    )


def _documents(site: CallSite) -> str:
    if DOCUMENTS in site.form.row_parameters:
        return ", documents per row"
    documents = site.form.constant(DOCUMENTS)
    return f", documents {len(documents)}" if isinstance(documents, tuple) else ""


def _plan_lines(stats: AiStats) -> list[str]:
    if not stats.planned_runs:
        return []
    return [
        f"  plan: {stats.planned_runs} runs, {stats.shared_tokens} prompt tokens in common with "
        "other calls"
    ]


def _blended_lines(stats: AiStats) -> list[str]:
    if not stats.blended_tokens and not stats.recomputed_tokens:
        return []
    return [
        f"  blended: {stats.blended_tokens} tokens reused out of place, "
        f"{stats.recomputed_tokens} computed again; answers are approximate"
    ]
