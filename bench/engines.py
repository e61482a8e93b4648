"""vLLM with and without our pool, and our own engine: time to the first token of ten-round chats.

Run ``python -m bench.engines``. Several chats take turns, so the history outgrows the small KV
cache of every engine. Then each engine is restarted. vLLM runs on the CPU in a separate virtual
environment, made by ``make test-engines``. ``--quick`` compares only vLLM with and without our
connector, starts each once, and omits the restart and the calls, because a start takes half a
minute of a core.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.engines_chats import (
    Plan,
    Results,
    all_at_once,
    cached_share,
    equal_answers,
    median_ms,
    median_ratio,
    play,
    warm_up,
)
from bench.engines_lookup import measure
from bench.engines_model import LARGE, TINY, ModelSize, write_model
from bench.engines_process import ROOT, ServerError
from bench.engines_servers import (
    VLLM_BLOCK,
    Contender,
    OurEngine,
    Pool,
    Setup,
    Vllm,
    find_venv,
    vllm_env,
)
from bench.engines_table import OURS, PHASES, PLAIN, text
from bench.report import Report, finish, machine_facts, make_parser

EXAMPLE = "vllm_example"
NAMES = (PLAIN, OURS, EXAMPLE, OurEngine.name)
QUICK_WITHOUT = (EXAMPLE, OurEngine.name)
PAGE = ROOT / "docs" / "performance.md"
MARKS = ("<!-- engines:begin -->", "<!-- engines:end -->")
PLANS = {
    TINY.name: Plan(chats=4, rounds=10, start=600, turn=184, answer=16, cache=6_144, repeats=2),
    LARGE.name: Plan(chats=3, rounds=10, start=600, turn=184, answer=16, cache=4_608, repeats=1),
}
_CALL_TOKENS, _CALL_PROMPTS = 2_048, 20
QUICK = Plan(chats=3, rounds=3, start=600, turn=184, answer=8, cache=2_432, repeats=1)


def main(argv: Sequence[str] | None = None) -> None:
    """Run and print."""
    parser = make_parser(__doc__ or "")
    parser.add_argument("--venv", type=Path, help="virtual environment with vLLM")
    parser.add_argument("--models", nargs="+", choices=tuple(PLANS), default=None)
    parser.add_argument(
        "--without", nargs="+", choices=NAMES,
        help=f"contenders (with --quick: {' '.join(QUICK_WITHOUT)})",
    )  # fmt: skip
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of each engine")
    parser.add_argument("--write-docs", action="store_true", help=f"update {PAGE.name}")
    arguments = parser.parse_args(argv)
    without = arguments.without or (QUICK_WITHOUT if arguments.quick else ())
    names = [name for name in NAMES if name not in without]
    if not names:
        parser.error("no contender is left")
    sizes = arguments.models or ([TINY.name] if arguments.quick else list(PLANS))
    report, began = Report("engines"), time.monotonic()
    # Servers run in separate sessions, so the end of this process must also end the servers.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    measured: list[str] = []
    try:
        venv = Path() if names == [OurEngine.name] else find_venv(arguments.venv)
        for size in (TINY, LARGE):
            if size.name not in sizes:
                continue
            plan = QUICK if arguments.quick else PLANS[size.name]
            whole = not arguments.quick or names == [OurEngine.name]
            _measure(
                report, size, plan, names, venv, arguments.seed, arguments.threads, whole=whole
            )
            measured.append(size.name)
            if arguments.write_docs:  # Write now, because the next model may fail after minutes.
                _write_docs(report, measured, names, time.monotonic() - began)
    except ServerError as error:
        sys.exit(f"bench.engines: {error}")
    finish(report, arguments.format)


def _measure(
    report: Report,
    size: ModelSize,
    plan: Plan,
    names: Sequence[str],
    venv: Path,
    seed: int,
    threads: int,
    *,
    whole: bool,
) -> None:
    """Play one model's chats and report; ``whole`` adds the parts with more vLLM starts."""
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="tierkv-engines-") as name, ExitStack() as stack:
        setup = Setup(
            venv, Path(name) / "model", plan.cache, size.kv_bytes_per_token, plan.context,
            Path(name), threads,
        )  # fmt: skip
        report.add(f"{size.name}_parameters", write_model(size, setup.model, seed=seed))
        pool = Pool(setup.folder)
        stack.callback(pool.stop)
        pool.start()
        contenders = list(_contenders(setup, pool, names))
        for contender in contenders:
            stack.callback(contender.stop)
        all_at_once(contenders, "start")
        for contender in contenders:
            warm_up(contender, size, plan, rng)
        results = play(contenders, size, plan, rng, restart=whole)
        _report(report, size.name, results, names)
        if OURS in names and size is TINY and whole:
            all_at_once(contenders, "stop")
            _measure_calls(report, setup, pool)
    report.note(
        f"{size.name}: {plan.repeats} x {plan.chats} chats in turn, {plan.rounds} rounds"
        f"{' and one after a restart' if whole else ''}, prompts of {plan.start} to "
        f"{plan.prompt_tokens(plan.rounds - (not whole))} tokens, answers of {plan.answer}; every "
        f"engine holds {plan.cache} tokens of KV; threads per engine: {threads}"
    )


def _contenders(setup: Setup, pool: Pool, names: Sequence[str]) -> Iterator[Contender]:
    for name in NAMES:
        if name not in names:
            continue
        if name == OurEngine.name:
            yield OurEngine(setup, pool)
        else:
            yield Vllm(name, setup, _connector(name, setup, pool))


def _connector(name: str, setup: Setup, pool: Pool, **more: str) -> dict[str, Any] | None:
    """Return the value of ``--kv-transfer-config``; None means no connector.

    Args:
        name: the contender.
        setup: the setup, for the example connector's files.
        pool: our pool.
        more: settings of our connector.
    """
    if name == OURS:
        return {
            "kv_connector": "TierKvConnector",
            "kv_connector_module_path": "tierkv.integrations.vllm.connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"pool": pool.address, "meta": pool.meta} | more,
        }
    if name == EXAMPLE:
        files = setup.folder / "example"
        files.mkdir()
        return {
            "kv_connector": "ExampleConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": str(files)},
        }
    return None


def _measure_calls(report: Report, setup: Setup, pool: Pool) -> None:
    """Measure the cost of our connector classes for vLLM's scheduler, per call."""
    python, env = setup.venv / "bin" / "python", vllm_env(setup.threads)
    log = setup.folder / "calls.log"
    engine = {
        "model": str(setup.model), "dtype": "float32", "enforce_eager": True, "max_num_seqs": 4,
        "max_model_len": _CALL_TOKENS, "max_num_batched_tokens": _CALL_TOKENS,
        "num_gpu_blocks_override": 2 * _CALL_TOKENS // VLLM_BLOCK,
        "kv_transfer_config": _connector(OURS, setup, pool, load_policy="always"),
    }  # fmt: skip
    spec = {"engine": engine, "prompts": _CALL_PROMPTS}
    for name, times in measure(python, env, log, spec).items():
        if not times:
            continue
        report.add(f"{name}_p50" + _unit(name), statistics.median(times))
        if not name.startswith("hit"):
            report.add(f"{name}_p99_us", sorted(times)[int(0.99 * len(times))])


def _unit(name: str) -> str:
    return "" if name.startswith("hit") else "_us"


def _report(report: Report, model: str, results: Results, names: Sequence[str]) -> None:
    for phase in PHASES:
        samples = results.of(phase)
        if not samples:
            continue
        for name in names:
            report.add(f"{model}_{phase}_{name}_ttft_ms", median_ms(samples, name))
            report.add(f"{model}_{phase}_{name}_cached_share", cached_share(samples, name))
            if name != PLAIN and PLAIN in names:
                ratio = median_ratio(samples, name, PLAIN)
                report.add(f"{model}_{phase}_{name}_ttft_of_plain", ratio)
                whole = median_ratio(samples, name, PLAIN, whole=True)
                report.add(f"{model}_{phase}_{name}_whole_answer_of_plain", whole)
    for number in range(results.plan.rounds + 1):
        samples = [s for s in results.samples if s.round == number]
        if not samples:
            continue
        report.add(f"{model}_round_{number + 1}_tokens", samples[0].prompt_tokens)
        for name in names:
            report.add(f"{model}_round_{number + 1}_{name}_ttft_ms", median_ms(samples, name))
    report.add(f"{model}_answers", len(results.samples))
    for name in names:
        if name != PLAIN and PLAIN in names:
            equal = equal_answers(results.samples, name, PLAIN)
            report.add(f"{model}_{name}_answers_equal_to_plain", equal)


def _write_docs(report: Report, models: Sequence[str], names: Sequence[str], took_s: float) -> None:
    facts = ", ".join(f"{key} {value}" for key, value in machine_facts().items())
    notes = "\n".join(f"- {note}" for note in report.notes)
    told = "\n\n".join(
        [
            f"{time.strftime('%Y-%m')}, one run of {took_s:.0f} s ({facts}).",
            notes,
            text(report.metrics, models, names),
        ]
    )
    page = PAGE.read_text()
    before, begin, rest = page.partition(MARKS[0])
    _, end, after = rest.partition(MARKS[1])
    if not begin or not end:
        raise SystemExit(f"{PAGE} has no {MARKS[0]} ... {MARKS[1]}")
    told = "\n".join(_wrapped(line) for line in told.splitlines())
    PAGE.write_text(f"{before}{begin}\n{told}\n{end}{after}")


def _wrapped(line: str) -> str:
    if line.startswith("|"):
        return line
    indent = "  " if line.startswith("- ") else ""
    return textwrap.fill(line, 120, subsequent_indent=indent, break_on_hyphens=False)


if __name__ == "__main__":
    main()
