"""``tierkv demo``: a demonstration of the cache on the shipped model, with and without cache.

Several questions over the same generated customer notes, the first question once more, and a chat
of ten turns over REST, sent by the openai client as a chat application would send them. Everything
runs without the cache first and then with the cache. The answers must be equal.
``tierkv/commands/demo_report.py`` prints the results.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import typer
from rich.console import Console

from tierkv.commands.demo_report import ChatTurn, DemoStatement, Story, print_story
from tierkv.compute.demo_model.data import INSTRUCTION, CustomerRecord, make_chats, make_records
from tierkv.compute.demo_model.phrasings import Head
from tierkv.config import LoadedConfig, load_config
from tierkv.dbapi import Connection
from tierkv.embedded import EmbeddedProcess, start_embedded
from tierkv.kvcore.errors import ConfigError
from tierkv.output import OutputFormat, StatementBar, render_rows

L1_OF_THE_DEMO = "16MiB"
"""Smaller than the notes' KV, so later questions have to fetch KV from the pool."""

OFF = '{"cache": false, "max_tokens": 12}'
ON = '{"max_tokens": 12}'
SHOWN_ROWS = 3
LEAST_WIDTH = 100


@dataclass(frozen=True, slots=True)
class Step:
    """One statement of the demo.

    Attributes:
        title: name in the table.
        question: question about each note.
        statement: SQL; ``%s`` is the place of the AI call.
        fact: the field of the notes' records that is the right answer; empty if none.
        about: the purpose of the statement.
    """

    title: str
    question: str
    statement: str
    fact: str
    about: str


ANSWERS = "SELECT id, %s AS answer FROM notes ORDER BY id"
MATCHES = "SELECT id FROM notes WHERE %s = 'yes' ORDER BY id"
GROUPS = "SELECT %s AS label, count(*) AS notes FROM notes GROUP BY label ORDER BY label"

STEPS = (
    Step("1 first question", "What did the customer buy?", ANSWERS, "product",
         "The cache is empty: one row computes the instruction, the others load it."),
    Step("2 second question", "Where does the customer live?", ANSWERS, "city",
         "Another question about the same notes: their KV is loaded too."),
    Step("3 a filter", "Is the review positive?", MATCHES, "positive",
         "The same notes in a WHERE."),
    Step("4 a GROUP BY", "What kind of product is it?", GROUPS, "",
         "The same notes, grouped by a generated label."),
)  # fmt: skip
REPEATED = replace(
    STEPS[0], title="5 the first again", about="The first statement once more, with a warm cache."
)


def run_demo(config: LoadedConfig, *, rows: int, seed: int) -> int:
    """Run everything and print the results; return 1 if the cache changed an answer."""
    console = Console(soft_wrap=True, width=max(LEAST_WIDTH, Console().width))
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
    records: Sequence[CustomerRecord],
    seed: int,
) -> int:
    connection.execute("CREATE TABLE notes (id INTEGER, note VARCHAR)")
    connection.executemany(
        "INSERT INTO notes VALUES (?, ?)", [(r.record_id, r.text) for r in records]
    )
    counted = connection.execute("SELECT ai_count_tokens(?)", [INSTRUCTION]).fetchone()
    assert counted is not None, "a SELECT without FROM has a row"
    console.print(
        f"Each prompt is an instruction of {counted[0]} tokens, then one of the notes, then a "
        "question.\nFirst everything without the cache ...",
        highlight=False,
    )
    warm_up = replace(STEPS[0], statement=ANSWERS.replace("ORDER BY id", "LIMIT 4"))
    _run_step(connection, warm_up, OFF, "warming up")
    off = [_run_step(connection, step, OFF, f"{step.title}, without cache") for step in STEPS]
    console.print("... and now with it.")
    on = []
    for step in (*STEPS, REPEATED):
        on.append(_run_step(connection, step, ON, f"{step.title}, with cache"))
        _print_step(console, step, on[-1], records)
    chat = replace(make_chats(1, seed)[0], head=Head("", INSTRUCTION))
    questions = [m["content"] for m in chat.messages() if m["role"] == "user"]
    port = process.loop.run(process.cluster.front.open_http())
    chat_off, chat_on = (
        play_chat(f"http://127.0.0.1:{port}/v1", questions, use_cache=use) for use in (False, True)
    )
    titles = [step.title for step in (*STEPS, REPEATED)]
    template = _template_tokens(connection, off[0])
    story = Story(titles, off, on, chat_off, chat_on, questions, counted[0], template)
    print_story(console, story)
    console.print("Next: .venv/bin/tierkv up    # a cluster for psql and any OpenAI client")
    if not story.equal:
        typer.secho("answers with and without the cache differ", fg="red", err=True)
    return 0 if story.equal else 1


def _template_tokens(connection: Connection, run: DemoStatement) -> int:
    """Return the chat template's tokens per prompt in the first statement, rounded up."""
    texts = [f"{INSTRUCTION}\n", f"\nQuestion: {STEPS[0].question}"]
    counted = connection.execute("SELECT sum(ai_count_tokens($1 || note || $2)) FROM notes", texts)
    row = counted.fetchone()
    assert row is not None, "an aggregate has a row"
    return -(-(run.stats.prompt_tokens - int(row[0])) // run.stats.requests)


def _run_step(connection: Connection, step: Step, options: str, label: str) -> DemoStatement:
    call = "ai_generate($1 || note || $2, options => $3)"
    cursor = connection.cursor()
    started = time.monotonic()
    with StatementBar(cursor.session, label=label):
        cursor.execute(
            step.statement % call, [f"{INSTRUCTION}\n", f"\nQuestion: {step.question}", options]
        )
    wall_s = time.monotonic() - started
    run = DemoStatement(cursor.fetchall(), cursor.columns, cursor.session.last_ai_stats, wall_s)
    cursor.close()
    return run


def _print_step(
    console: Console, step: Step, run: DemoStatement, records: Sequence[CustomerRecord]
) -> None:
    console.print(f"\n[bold]{step.title}[/bold]: {step.question}  ({step.about})", highlight=False)
    console.print(f"[dim]{step.statement % 'ai_generate(instruction || note || question)'}[/dim]")
    shown = render_rows(run.columns, run.rows[:SHOWN_ROWS], OutputFormat.TABLE).splitlines()
    console.print("\n".join(shown[:-1]), highlight=False, markup=False)
    more = "..., " if len(run.rows) > SHOWN_ROWS else ""
    right = _share_right(step, run, records)
    tail = "" if right is None else f", {right:.0%} of the notes answered right"
    console.print(f"({more}{len(run.rows)} rows{tail})", highlight=False)


def _share_right(step: Step, run: DemoStatement, records: Sequence[CustomerRecord]) -> float | None:
    """Return the share of answers equal to the notes' facts; None for a step without a fact."""
    if not step.fact:
        return None
    if step.fact in ("positive", "negative"):
        said = {row[0] for row in run.rows}
        right = sum((r.record_id in said) == (r.sentiment == step.fact) for r in records)
    else:
        answers = dict(run.rows)
        right = sum(answers[r.record_id] == getattr(r, step.fact) for r in records)
    return right / len(records)


def play_chat(base_url: str, questions: Sequence[str], *, use_cache: bool) -> list[ChatTurn]:
    """Ask the questions one after the other, each with the whole history.

    Raises:
        ConfigError: the openai package is not installed.
    """
    try:
        import openai  # a development dependency, and takes a second to import
    except ImportError:
        raise ConfigError(
            "the demo's chat needs openai", hint="Run `pip install openai`."
        ) from None
    messages: list[Any] = []
    turns: list[ChatTurn] = []
    with openai.OpenAI(base_url=base_url, api_key="none") as client:
        model = client.models.list().data[0].id
        for question in questions:
            messages.append({"role": "user", "content": question})
            turns.append(_ask(client, model, messages, use_cache=use_cache))
            messages.append({"role": "assistant", "content": turns[-1].answer})
    return turns


def _ask(client: Any, model: str, messages: list[Any], *, use_cache: bool) -> ChatTurn:
    answer, prompt, cached, first_s = "", 0, 0, 0.0
    asked = time.monotonic()
    stream = client.chat.completions.create(
        model=model, messages=messages, temperature=0, max_tokens=16, stream=True,
        stream_options={"include_usage": True}, extra_body={"use_cache": use_cache},
    )  # fmt: skip
    for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content:
            first_s = first_s or time.monotonic() - asked
            answer += chunk.choices[0].delta.content
        if chunk.usage is not None:
            prompt = chunk.usage.prompt_tokens
            details = chunk.usage.prompt_tokens_details
            cached = (details.cached_tokens or 0) if details else 0
    wall_s = time.monotonic() - asked
    return ChatTurn(answer, prompt, cached, first_s or wall_s, wall_s)
