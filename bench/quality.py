"""Cost of reuse in answers: every codec and every way to blend, compared with full recompute.

Run ``make quality``, or ``python -m bench.quality --write-docs`` to update docs/quality.md and the
plot. One thread, no network; the shipped model answers questions with unseen names.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch

from bench import blend_quality, codec_quality
from bench.blend_quality import Measured
from bench.codec_quality import Quality
from bench.line_plot import Panel, save_panels
from bench.quality_table import blend_table, codec_table, methods, points
from bench.report import Report, finish, machine_facts, make_parser
from tierkv.compute.demo_model.data import CHAT_TASKS, SINGLE_TASKS, make_probes
from tools.demo_model.tokenizer import FOLDER

ROOT: Final = Path(__file__).parents[1]
PAGE: Final = ROOT / "docs" / "quality.md"
PICTURE: Final = ROOT / "docs" / "blend-quality.svg"
GROUPS: Final = {"one document": SINGLE_TASKS, "chat": CHAT_TASKS}
ONE_NOTE: Final = tuple(task for task in CHAT_TASKS if task != "cross_document")
LEAST_KL: Final = 1e-4
"""Smaller divergences are drawn as this one: the axis is logarithmic."""
TWO_NOTES: Final = ("cross_document",)


def main(argv: Sequence[str] | None = None) -> None:
    """Run and print."""
    parser = make_parser(__doc__ or "")
    parser.add_argument("--count", type=int, help="probes per task; blending takes half or double")
    parser.add_argument("--write-docs", action="store_true", help=f"update {PAGE.name}")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    count, seed = arguments.count or (4 if arguments.quick else 40), arguments.seed
    started = time.monotonic()
    codecs = {
        name: codec_quality.measure(FOLDER, make_probes(tasks, count, seed))
        for name, tasks in GROUPS.items()
    }
    tried = blend_quality.ways()
    one = blend_quality.measure(FOLDER, ONE_NOTE, tried, count=max(1, count // 4), seed=seed)
    two = blend_quality.measure(FOLDER, TWO_NOTES, tried, count=3 * count, seed=seed)
    if arguments.format == "json":
        finish(_report(codecs, one, two), "json")
    else:
        facts = ", ".join(f"{key} {value}" for key, value in machine_facts().items())
        print(f"quality  ({facts}; {time.monotonic() - started:.0f} s)\n")
        print("\n\n".join([_codec_text(codecs, count), _blend_text(one, two)]))
    if arguments.write_docs:
        save_panels(PICTURE, blend_panels(two))
        picture = f"![Answers by share computed again]({PICTURE.name})"
        _write("codecs", _codec_text(codecs, count))
        _write("blend", f"{_blend_text(one, two)}\n\n{picture}")


def blend_panels(measured: Measured) -> list[Panel]:
    """Show the answers of each method by the share of reused tokens that is computed again."""
    found = {name: points(measured, name) for name in methods(measured)}
    exact = {name: [(r, q.exact_match) for r, q in some] for name, some in found.items()}
    divergence = {
        name: [(r, max(q.kl_mean, LEAST_KL)) for r, q in some] for name, some in found.items()
    }
    label, full = "share of reused tokens computed again", measured.full.exact_match
    return [
        Panel("exact match", exact, x_label=label, logarithmic=False, level=full),
        Panel("mean KL to full recompute, nats", divergence, x_label=label),
    ]


def _codec_text(codecs: dict[str, dict[str, Quality]], count: int) -> str:
    shares = " and ".join(f"{group['none'].reused_share:.0%}" for group in codecs.values())
    return (
        f"{count * len(SINGLE_TASKS)} probes of each kind, blocks of 64 tokens, float32; {shares} "
        f"of the prompt tokens went through the codec:\n\n{codec_table(codecs)}"
    )


def _blend_text(one: Measured, two: Measured) -> str:
    return (
        f"{two.prompts} questions that need two notes; full recompute answers "
        f"{two.full.exact_match:.3f} of them. Exact match, mean KL:\n\n{blend_table(two)}\n\n"
        f"{one.prompts} questions that need one note of several; full recompute answers "
        f"{one.full.exact_match:.3f} of them:\n\n{blend_table(one)}"
    )


def _report(codecs: dict[str, dict[str, Quality]], one: Measured, two: Measured) -> Report:
    report = Report("quality")
    for group, found in codecs.items():
        for name, quality in found.items():
            metric = f"{group}_{name}".replace(" ", "_")
            report.add(f"{metric}_exact_match", quality.exact_match)
            report.add(f"{metric}_kl_mean_nats", quality.kl_mean)
    for group, measured in (("two_notes", two), ("one_note", one)):
        report.add(f"{group}_full_exact_match", measured.full.exact_match)
        for name in methods(measured):
            for ratio, quality in points(measured, name):
                metric = f"{group}_{name}_{ratio:.0%}".replace(" ", "_").replace(",", "")
                report.add(f"{metric}_exact_match", quality.exact_match)
                report.add(f"{metric}_kl_mean_nats", quality.kl_mean)
    return report


def _write(part: str, text: str) -> None:
    """Replace the text between a part's markers in the page."""
    begin_mark, end_mark = f"<!-- {part}:begin -->", f"<!-- {part}:end -->"
    page = PAGE.read_text()
    before, begin, rest = page.partition(begin_mark)
    _, end, after = rest.partition(end_mark)
    if not begin or not end:
        raise SystemExit(f"{PAGE} has no {begin_mark} ... {end_mark}")
    PAGE.write_text(f"{before}{begin}\n{text}\n{end}{after}")


if __name__ == "__main__":
    main()
