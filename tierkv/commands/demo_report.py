"""The output of ``tierkv demo``: a table, bars and the conclusions.

Every number is computed from the given runs. Time to the first token is shown for the chat only,
because the calls of a statement are sent together and wait for each other. A bar's length is a
share of the longest bar. Each kind of bar has a separate character and colour.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tierkv.dbfront.accounts.statistics import AiStats
from tierkv.dbfront.statement_results import Column

BAR_WIDTH = 40
_ASCII = {"█": "#", "▓": "=", "▒": "+", "░": "-"}


@dataclass(frozen=True, slots=True)
class Kind:
    """The meaning and look of a piece of a bar."""

    name: str
    character: str
    colour: str


@dataclass(frozen=True, slots=True)
class Bar:
    """One line of a plot: a label, pieces and a note behind the bar."""

    label: str
    pieces: Sequence[tuple[Kind, float]]
    note: str


def plot_lines(
    title: str, kinds: Sequence[Kind], bars: Sequence[Bar], *, unicode: bool
) -> list[Text]:
    """Return the lines of a plot: a title with its key, then one line per bar."""
    head = Text(f"{title}   ", style="bold")
    for kind in kinds:
        head.append(
            f"{_character(kind, unicode) * 2} {kind.name}   ", style=f"not bold {kind.colour}"
        )
    label_width = max(len(bar.label) for bar in bars)
    most = max(sum(value for _, value in bar.pieces) for bar in bars) or 1.0
    lines = [head]
    for bar in bars:
        line = Text(f"{bar.label:<{label_width}}  ")
        for (kind, _), length in zip(bar.pieces, _lengths(bar, most), strict=True):
            line.append(_character(kind, unicode) * length, style=kind.colour)
        line.append(f" {bar.note}")
        lines.append(line)
    return lines


def _lengths(bar: Bar, most: float) -> list[int]:
    """Return cells per piece; the ends are rounded, so the whole bar has the exact length."""
    ends, total = [0], 0.0
    for _, value in bar.pieces:
        total += value
        ends.append(round(BAR_WIDTH * total / most))
    return [end - begin for begin, end in pairwise(ends)]


def _character(kind: Kind, unicode: bool) -> str:
    return kind.character if unicode else _ASCII[kind.character]


WITHOUT = Kind("without the cache", "░", "yellow")
WITH = Kind("with it", "█", "green")
COMPUTED = Kind("computed", "█", "red")
TIERS = (
    Kind("L1 (this node)", "▓", "green"),
    Kind("L2 (pool of this host)", "▒", "cyan"),
    Kind("L3 (other hosts)", "░", "blue"),
    Kind("L4 (disk)", "░", "magenta"),
)


@dataclass(frozen=True, slots=True)
class ChatTurn:
    """One turn as seen by the client.

    Attributes:
        answer: the whole answer.
        prompt_tokens: tokens of the history and the question.
        cached_tokens: tokens of the prompt that were loaded instead of computed.
        ttft_s: seconds from sending the request to the first piece of the answer.
        wall_s: seconds to the end of the answer.
    """

    answer: str
    prompt_tokens: int
    cached_tokens: int
    ttft_s: float
    wall_s: float


@dataclass(frozen=True, slots=True)
class DemoStatement:
    """The run of one statement: rows, statistics of AI calls, and wall time in seconds."""

    rows: list[tuple[Any, ...]]
    columns: tuple[Column, ...]
    stats: AiStats
    wall_s: float

    @property
    def computed(self) -> int:
        """Prompt tokens that were computed."""
        return self.stats.prompt_tokens - self.stats.hit_tokens.total

    def loaded_of_notes(self, shared_tokens: int) -> int:
        """Return loaded tokens of notes: those beyond the shared tokens of each call."""
        calls = self.stats.requests
        return max(0, self.stats.hit_tokens.total - calls * shared_tokens)


@dataclass(frozen=True, slots=True)
class Story:
    """All results of the demo.

    Attributes:
        titles: titles of the statements.
        off: the statements without the cache; the last statement, a repetition, has no such run.
        on: the statements with the cache, in the same order.
        chat_off: the chat without the cache.
        chat_on: the chat with the cache.
        questions: the questions of the chat.
        instruction_tokens: length of the instruction, with which all prompts begin.
        template_tokens: tokens of the chat template in each prompt.
    """

    titles: Sequence[str]
    off: Sequence[DemoStatement]
    on: Sequence[DemoStatement]
    chat_off: Sequence[ChatTurn]
    chat_on: Sequence[ChatTurn]
    questions: Sequence[str]
    instruction_tokens: int
    template_tokens: int

    @property
    def shared_tokens(self) -> int:
        """Tokens that are the same in every prompt."""
        return self.instruction_tokens + self.template_tokens

    @property
    def equal(self) -> bool:
        """True if the cache changed no answer."""
        before = [*self.off, self.off[0]]
        same_rows = all(
            sorted(a.rows) == sorted(b.rows) for a, b in zip(before, self.on, strict=True)
        )
        answers = [[turn.answer for turn in chat] for chat in (self.chat_off, self.chat_on)]
        return same_rows and answers[0] == answers[1]


def print_story(console: Console, story: Story) -> None:
    """Print the chat, the table of statements, the bars and the conclusions."""
    _print_chat(console, story)
    _print_statements(console, story)
    _print_plots(console, story)
    _print_conclusions(console, story)


def _table(console: Console, title: str) -> Table:
    """Print a title, which a narrow table would break, and begin the table below the title."""
    console.print(f"\n[bold]{title}[/bold]", highlight=False)
    return Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)


def _print_chat(console: Console, story: Story) -> None:
    turns = len(story.questions)
    table = _table(console, f"A chat of {turns} turns: each sends the whole conversation again")
    table.add_column("question", max_width=38, no_wrap=True, overflow="ellipsis")
    table.add_column("answer")
    for name in ("prompt\ntokens", "of them\nloaded", "TTFT\nwithout", "TTFT\nwith cache"):
        table.add_column(name, justify="right")
    for question, before, after in zip(story.questions, story.chat_off, story.chat_on, strict=True):
        shown = question.splitlines()[-1].removeprefix("Question: ")
        table.add_row(
            shown, after.answer, f"{after.prompt_tokens:,}",
            f"{after.cached_tokens:,}", _milliseconds(before.ttft_s), _milliseconds(after.ttft_s),
        )  # fmt: skip
    console.print(table, highlight=False)


def _print_statements(console: Console, story: Story) -> None:
    table = _table(console, f"Statements over the same {story.on[0].stats.calls:,} notes")
    table.add_column("statement")
    names = ("prompt\ntokens", "\ncomputed", "\nloaded", "loaded\nof notes")
    for name in (*names, "seconds\nwithout", "seconds\nwith cache", "times\nas fast"):
        table.add_column(name, justify="right")
    before = [*story.off, story.off[0]]
    for title, off, on in zip(story.titles, before, story.on, strict=True):
        counts = (on.stats.prompt_tokens, on.computed, on.stats.hit_tokens.total)
        table.add_row(
            title,
            *(f"{count:,}" for count in (*counts, on.loaded_of_notes(story.shared_tokens))),
            f"{off.wall_s:.1f}", f"{on.wall_s:.1f}", f"{off.wall_s / on.wall_s:.1f}",
        )  # fmt: skip
    console.print(table, highlight=False)
    console.print(
        f"Every prompt has the same {story.instruction_tokens:,} tokens of the instruction and "
        f"{story.template_tokens:,} of the chat template. "
        '"loaded of notes"\ncounts what was loaded beyond them: KV of the notes themselves, kept '
        "from an earlier question.",
        highlight=False,
    )


def _print_plots(console: Console, story: Story) -> None:
    unicode = console.encoding.startswith("utf")
    seconds, tokens = [], []
    before = [*story.off, story.off[0]]
    for title, off, on in zip(story.titles, before, story.on, strict=True):
        seconds.append(Bar(title, [(WITHOUT, off.wall_s)], f"{off.wall_s:.1f} s"))
        seconds.append(Bar("", [(WITH, on.wall_s)], f"{on.wall_s:.1f} s"))
        tokens.append(_token_bar(title, on))
    plots = [
        ("Seconds", (WITHOUT, WITH), seconds),
        ("Prompt tokens", (COMPUTED, *_tiers_used(story)), tokens),
    ]
    for name, kinds, bars in plots:
        console.print()
        for line in plot_lines(name, kinds, bars, unicode=unicode):
            console.print(line, highlight=False)


def _tier_counts(run: DemoStatement) -> tuple[int, ...]:
    hits = run.stats.hit_tokens
    return (hits.l1, hits.l2, hits.l3, hits.l4)


def _tiers_used(story: Story) -> list[Kind]:
    counts = [_tier_counts(run) for run in story.on]
    return [kind for i, kind in enumerate(TIERS) if any(tier[i] for tier in counts)]


def _token_bar(title: str, run: DemoStatement) -> Bar:
    pieces = [(COMPUTED, run.computed), *zip(TIERS, _tier_counts(run), strict=True)]
    share = run.computed / max(1, run.stats.prompt_tokens)
    return Bar(title, pieces, f"{share:.0%} computed")


def _print_conclusions(console: Console, story: Story) -> None:
    cold, warm = story.on[0], story.on[-1]
    without = sum(run.wall_s for run in story.off) + sum(t.wall_s for t in story.chat_off)
    with_cache = sum(run.wall_s for run in story.on[:-1]) + sum(t.wall_s for t in story.chat_on)
    lines = [
        f"The same statement: {story.off[0].wall_s:.1f} s without the cache, {cold.wall_s:.1f} s "
        f"with a cold one, {warm.wall_s:.1f} s with a warm one.",
        f"A chat's turn begins to answer after {_mean_ttft(story.chat_on)} with the cache, "
        f"{_mean_ttft(story.chat_off)} without (mean of {len(story.questions)}).",
        f"In all {without:.1f} s without the cache, {with_cache:.1f} s with it: "
        f"{without / with_cache:.1f} times as fast.",
        "The answers are the same with and without the cache."
        if story.equal
        else "ANSWERS DIFFER with and without the cache: this is a bug.",
    ]
    console.print()
    for line in lines:
        console.print(line, style="bold", highlight=False)


def _mean_ttft(chat: Sequence[ChatTurn]) -> str:
    return _milliseconds(sum(turn.ttft_s for turn in chat) / len(chat))


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms"
