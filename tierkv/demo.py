"""``tierkv demo``: the main job on the shipped model, with and without the cache, side by side.

A table of generated customer notes, three statements (generate, filter, group by a generated
label), the same documents asked again with other questions, and a ten-turn chat over REST. Every
step runs with the cache off and on; answers must be equal, the table shows what was saved.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from compute.demo_model.data import INSTRUCTION, Record, make_chats, make_records
from compute.demo_model.instructions import Head
from dbfront.contracts import Column
from dbfront.statistics import AiStats
from kvcore.request import HitTokens
from tierkv.config import LoadedConfig, load_config
from tierkv.dbapi import Connection
from tierkv.demo_chat import ChatRun, play_chat
from tierkv.embedded import EmbeddedProcess, start_embedded
from tierkv.output import OutputFormat, render_rows
from tierkv.progress import StatementBar

L1_OF_THE_DEMO = "24MiB"
"""Smaller than the notes' KV, so that the second pass has to fetch from the pool."""

OFF = '{"cache": false, "max_tokens": 12}'
ON = '{"max_tokens": 12}'


@dataclass(frozen=True, slots=True)
class Step:
    """One statement of the demo; ``%s`` is where the AI call goes."""

    title: str
    question: str
    statement: str
    fact: str


ANSWERS = "SELECT id, %s AS answer FROM notes ORDER BY id"
MATCHES = "SELECT id FROM notes WHERE %s = 'yes' ORDER BY id"
GROUPS = "SELECT %s AS label, count(*) AS notes FROM notes GROUP BY label ORDER BY label"

STEPS = (
    Step("generate", "What did the customer buy?", ANSWERS, "product"),
    Step("filter", "Is the review positive?", MATCHES, "positive"),
    Step("group by label", "What kind of product is it?", GROUPS, ""),
    Step("generate again", "Where does the customer live?", ANSWERS, "city"),
    Step("filter again", "Is the review negative?", MATCHES, "negative"),
    Step("group again", "What is the review about?", GROUPS, ""),
)


@dataclass(frozen=True, slots=True)
class StepRun:
    """One step as it went: rows, what its AI calls cost, and the wall time in seconds."""

    rows: list[tuple[Any, ...]]
    columns: tuple[Column, ...]
    stats: AiStats
    wall_s: float


def run_demo(config: LoadedConfig, *, rows: int, seed: int) -> int:
    """Run everything and print it; 1 when the cache changed an answer."""
    console = Console(soft_wrap=True, width=max(120, Console().width))
    config = _with_small_l1(config)
    console.print(f"Starting TierKV in this process; {rows} notes, seed {seed} ...")
    process = start_embedded(config)
    connection = process.connect()
    try:
        return _run(console, process, connection, make_records(rows, seed), seed)
    finally:
        connection.close()


def _with_small_l1(config: LoadedConfig) -> LoadedConfig:
    """Shrink L1 unless the user chose a size, and take any free HTTP port."""
    flags = {"compute.l1_capacity": L1_OF_THE_DEMO, "front.http_port": 0, "front.max_calls": 0}
    chosen = {key: value for key, value in flags.items() if config.sources[key] == "default"}
    small = load_config(flags=chosen, environ={}).settings
    settings = config.settings
    for key in chosen:
        section, name = key.split(".")
        table = getattr(settings, section)
        table = table.model_copy(update={name: getattr(getattr(small, section), name)})
        settings = settings.model_copy(update={section: table})
    return replace(config, settings=settings)


def _run(
    console: Console,
    process: EmbeddedProcess,
    connection: Connection,
    records: Sequence[Record],
    seed: int,
) -> int:
    connection.execute("CREATE TABLE notes (id INTEGER, note VARCHAR)")
    connection.executemany(
        "INSERT INTO notes VALUES (?, ?)", [(r.record_id, r.text) for r in records]
    )
    console.print(
        f"Each prompt is an instruction of {len(INSTRUCTION.split())} words, a note and a question."
    )
    off = [_run_step(connection, step, OFF, "cache off") for step in STEPS]
    on = []
    for step in STEPS:
        on.append(_run_step(connection, step, ON, "cache on"))
        _print_step(console, step, on[-1], records)
    chat = replace(make_chats(1, seed)[0], head=Head("", INSTRUCTION))
    questions = [m["content"] for m in chat.messages() if m["role"] == "user"]
    port = process.loop.run(process.cluster.front.open_http())
    chat_off, chat_on = (
        play_chat(f"http://127.0.0.1:{port}/v1", questions, use_cache=use) for use in (False, True)
    )
    console.print("\n[bold]chat[/bold], ten turns through the openai client:")
    for question, answer in zip(questions, chat_on.answers, strict=True):
        console.print(f"  {question.splitlines()[-1]}  ->  {answer}", highlight=False)
    right = sum(t.answer == a for t, a in zip(chat.turns, chat_on.answers, strict=True))
    console.print(f"({right} of {len(chat.turns)} answered right)")
    _print_table(console, off, on, chat_off, chat_on)
    return _conclude(console, off, on, chat_off, chat_on)


def _run_step(connection: Connection, step: Step, options: str, label: str) -> StepRun:
    call = "ai_generate($1 || note || $2, options => $3)"
    cursor = connection.cursor()
    started = time.monotonic()
    with StatementBar(cursor.session, label=f"{step.title}, {label}"):
        cursor.execute(
            step.statement % call, [f"{INSTRUCTION}\n", f"\nQuestion: {step.question}", options]
        )
    wall_s = time.monotonic() - started
    stats: AiStats = getattr(cursor.session, "last_ai_stats")  # noqa: B009 - not in the contract
    run = StepRun(cursor.fetchall(), cursor.columns, stats, wall_s)
    cursor.close()
    return run


def _print_step(console: Console, step: Step, run: StepRun, records: Sequence[Record]) -> None:
    console.print(f"\n[bold]{step.title}[/bold]: {step.question}")
    console.print(f"[dim]{step.statement % 'ai_generate(instruction || note || question)'}[/dim]")
    shown = render_rows(run.columns, run.rows[:6], OutputFormat.TABLE).splitlines()
    console.print("\n".join(shown[:-1]), highlight=False, markup=False)
    right = _share_right(step, run, records)
    tail = "" if right is None else f", {right:.0%} of the notes answered right"
    console.print(f"({len(run.rows)} rows{tail})")


def _share_right(step: Step, run: StepRun, records: Sequence[Record]) -> float | None:
    """Compare with the facts the notes were made from; None where a step has no such fact."""
    if not step.fact:
        return None
    if step.fact in ("positive", "negative"):
        said = {row[0] for row in run.rows}
        right = sum((r.record_id in said) == (r.sentiment == step.fact) for r in records)
    else:
        answers = dict(run.rows)
        right = sum(answers[r.record_id] == getattr(r, step.fact) for r in records)
    return right / len(records)


def _print_table(
    console: Console,
    off: Sequence[StepRun],
    on: Sequence[StepRun],
    chat_off: ChatRun,
    chat_on: ChatRun,
) -> None:
    # The calls of a statement wait for one another's prefix, so only a chat has a wait to show.
    table = Table(title="\nWhat the cache saved (prompt tokens loaded instead of computed)")
    for name in ("step", "calls", "distinct", "prompt", "hit", "L1", "L2", "L3"):
        table.add_column(name, justify="left" if name == "step" else "right")
    for name in ("time off", "time on", "TTFT off", "TTFT on"):
        table.add_column(name, justify="right")
    for step, before, after in zip(STEPS, off, on, strict=True):
        stats = after.stats
        table.add_row(
            step.title, str(stats.calls), str(stats.distinct_calls),
            *_token_cells(stats.prompt_tokens, stats.hit_tokens),
            f"{before.wall_s:.1f} s", f"{after.wall_s:.1f} s", "", "",
        )  # fmt: skip
    turns = str(len(chat_on.answers))
    tokens = [f"{count:,}" for count in (chat_on.prompt_tokens, chat_on.cached_tokens)]
    table.add_row(
        "chat", turns, turns, *tokens, "", "", "",
        f"{chat_off.wall_s:.1f} s", f"{chat_on.wall_s:.1f} s",
        f"{chat_off.mean_ttft_s * 1e3:.0f} ms", f"{chat_on.mean_ttft_s * 1e3:.0f} ms",
    )  # fmt: skip
    console.print(table)


def _token_cells(prompt: int, hits: HitTokens) -> list[str]:
    return [f"{count:,}" for count in (prompt, hits.total, hits.l1, hits.l2, hits.l3)]


def _conclude(
    console: Console,
    off: Sequence[StepRun],
    on: Sequence[StepRun],
    chat_off: ChatRun,
    chat_on: ChatRun,
) -> int:
    equal = chat_off.answers == chat_on.answers and all(
        sorted(a.rows) == sorted(b.rows) for a, b in zip(off, on, strict=True)
    )
    before = sum(run.wall_s for run in off) + chat_off.wall_s
    after = sum(run.wall_s for run in on) + chat_on.wall_s
    prompt = sum(run.stats.prompt_tokens for run in on) + chat_on.prompt_tokens
    hits = sum(run.stats.hit_tokens.total for run in on) + chat_on.cached_tokens
    said = "equal answers" if equal else "DIFFERENT ANSWERS: this is a bug"
    console.print(
        f"\n[bold]With the cache {after:.1f} s, without {before:.1f} s: {before / after:.1f} times "
        f"faster; {hits / prompt:.0%} of {prompt:,} prompt tokens were loaded; {said}.[/bold]"
    )
    console.print("Next: .venv/bin/tierkv up    # a cluster for psql and any OpenAI client")
    if not equal:
        typer.secho("cached and uncached answers differ", fg="red", err=True)
    return 0 if equal else 1
