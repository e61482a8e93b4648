"""Markdown of the engines benchmark: phases, rounds, the scheduler's calls, and the aims.

Called by bench.engines with its metrics; pure. A ratio is the median over prompts that contenders
answered in sequence, and may differ from the quotient of the medians in the table.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from bench.report import render_number

Metrics = Mapping[str, float]
PHASES: Final = ("cold", "fits", "exceeds", "restart")
PLAIN: Final = "vllm"
OURS: Final = "vllm_tierkv"
TITLES: Final = {
    PLAIN: "vLLM",
    OURS: "vLLM + TierKV",
    "vllm_example": "vLLM + example connector",
    "tierkv": "TierKV's own engine",
}
_SLOWER_AT_MOST: Final = 1.05
_CALL_US: Final = 100.0


def text(metrics: Metrics, models: Sequence[str], names: Sequence[str]) -> str:
    """Return all tables of a run."""
    parts = ["Aims:", _table(("aim", "result"), _aims(metrics, models))]
    for model in models:
        parts += [
            f"**{model}** ({metrics[f'{model}_parameters']:,.0f} parameters). Time to the first "
            "token in ms, as a multiple of plain vLLM's, and the share of the prompt that was not "
            "computed:",
            _table(("", *PHASES), _phases(metrics, model, names)),
            "By round, ms:",
            _table(("round", *(TITLES[name] for name in names)), _rounds(metrics, model, names)),
        ]
        equal = [
            f"{TITLES[n]} {metrics[k]:.0f}" for n in names if (k := _equal(model, n)) in metrics
        ]
        if equal:
            told = f"{metrics[f'{model}_answers']:.0f} answers; the same tokens as vLLM's: "
            parts.append(f"{told}{', '.join(equal)}.")
    calls = list(_calls(metrics))
    if calls:
        parts += ["Calls in vLLM's scheduler, us:", _table(("call", "p50", "p99"), calls)]
    return "\n\n".join(parts)


def _aims(metrics: Metrics, models: Sequence[str]) -> Iterator[tuple[str, str]]:
    for model in models:
        for phase, limit in (("exceeds", 1.0), ("restart", 1.0), ("fits", _SLOWER_AT_MOST)):
            for figure, what in (("ttft", "first token"), ("whole_answer", "whole answer")):
                ratio = metrics.get(f"{model}_{phase}_{OURS}_{figure}_of_plain")
                if ratio is not None:
                    yield (
                        f"{model}, {phase}, {what}: vLLM + TierKV at most {limit:g} of plain vLLM",
                        f"{_verdict(ratio <= limit)}: {render_number(ratio)}",
                    )
        equal = metrics.get(_equal(model, OURS))
        if equal is not None:
            answers = metrics[f"{model}_answers"]
            yield f"{model}: the same tokens", f"{equal:.0f} of {answers:.0f} answers"
    for name, took in metrics.items():
        if name.endswith("_p50_us"):
            call = name.removesuffix("_p50_us")
            verdict = _verdict(took < _CALL_US)
            yield f"{call} below {_CALL_US:g} us", f"{verdict}: {render_number(took)} (p50)"


def _verdict(good: bool) -> str:
    return "met" if good else "missed"


def _equal(model: str, name: str) -> str:
    return f"{model}_{name}_answers_equal_to_plain"


def _phases(metrics: Metrics, model: str, names: Sequence[str]) -> Iterator[list[str]]:
    for name in names:
        row = [TITLES[name]]
        for phase in PHASES:
            at = f"{model}_{phase}_{name}"
            if f"{at}_ttft_ms" not in metrics:
                row.append("")
                continue
            ratio = metrics.get(f"{at}_ttft_of_plain")
            times = "" if ratio is None else f" ({render_number(ratio)})"
            share = f"{100 * metrics[f'{at}_cached_share']:.0f} %"
            row.append(f"{render_number(metrics[f'{at}_ttft_ms'])}{times}, {share}")
        yield row


def _rounds(metrics: Metrics, model: str, names: Sequence[str]) -> Iterator[list[str]]:
    number = 1
    while (at := f"{model}_round_{number}") and f"{at}_{names[0]}_ttft_ms" in metrics:
        figures = (render_number(metrics[f"{at}_{name}_ttft_ms"]) for name in names)
        yield [f"{number}, {metrics[f'{at}_tokens']:.0f} tokens", *figures]
        number += 1


def _calls(metrics: Metrics) -> Iterator[list[str]]:
    for name, p50 in metrics.items():
        if name.endswith("_p50_us"):
            call = name.removesuffix("_p50_us")
            yield [f"`{call}`", render_number(p50), render_number(metrics[f"{call}_p99_us"])]


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---", *["--:" for _ in head[1:]]], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
