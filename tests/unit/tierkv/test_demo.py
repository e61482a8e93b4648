"""The demo's table and bars say what the runs gave, and its tiny run proves the reuse of notes."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from tierkv.commands.demo import run_demo
from tierkv.commands.demo_report import (
    Bar,
    ChatTurn,
    DemoStatement,
    Kind,
    Story,
    plot_lines,
    print_story,
)
from tierkv.config import load_config
from tierkv.dbfront.accounts.statistics import AiStats
from tierkv.kvcore.request import HitTokens

GREEN, RED = Kind("with", "█", "green"), Kind("without", "░", "red")


def _run(wall_s: float, *, hits: HitTokens, answer: str = "oak") -> DemoStatement:
    stats = AiStats(calls=10, distinct_calls=10, requests=10, prompt_tokens=1000, hit_tokens=hits)
    return DemoStatement([(1, answer)], (), stats, wall_s)


def _story(*, answer: str = "oak") -> Story:
    return Story(
        titles=["first", "second", "again"],
        off=[_run(4.0, hits=HitTokens()), _run(4.0, hits=HitTokens())],
        on=[
            _run(2.0, hits=HitTokens(l1=500)),
            _run(1.0, hits=HitTokens(l1=500, l2=300), answer=answer),
            _run(0.5, hits=HitTokens(l1=500, l2=400)),
        ],
        chat_off=[ChatTurn("yes", 80, 0, 0.2, 0.3)],
        chat_on=[ChatTurn("yes", 80, 64, 0.05, 0.1)],
        questions=["a note\nQuestion: Is it?"],
        instruction_tokens=48,
        template_tokens=2,
    )


def _printed(story: Story) -> str:
    console = Console(file=io.StringIO(), width=100)
    print_story(console, story)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_table_parts_what_was_loaded_of_the_notes_from_the_instruction() -> None:
    text = _printed(_story())
    table = text[text.index("Statements over") :].splitlines()
    cells = {line.split()[0]: line.split()[1:] for line in table[:10] if line.strip()}
    assert cells["first"] == ["1,000", "500", "500", "0", "4.0", "2.0", "2.0"]
    assert cells["second"] == ["1,000", "200", "800", "300", "4.0", "1.0", "4.0"]
    assert cells["again"] == ["1,000", "100", "900", "400", "4.0", "0.5", "8.0"]


def test_the_conclusions_are_computed_from_the_runs() -> None:
    text = _printed(_story())
    assert "4.0 s without the cache, 2.0 s with a cold one, 0.5 s with a warm one" in text
    assert "after 50 ms with the cache, 200 ms without (mean of 1)" in text
    assert "In all 8.3 s without the cache, 3.1 s with it: 2.7 times as fast" in text
    assert "The answers are the same" in text
    assert _story(answer="elm").equal is False
    assert "ANSWERS DIFFER" in _printed(_story(answer="elm"))


def test_a_bar_is_as_long_as_its_share_of_the_longest() -> None:
    bars = [Bar("a", [(GREEN, 3), (RED, 1)], "all"), Bar("bc", [(GREEN, 1), (RED, 1)], "half")]
    head, *lines = [line.plain for line in plot_lines("Tokens", (GREEN, RED), bars, unicode=True)]
    assert head.split() == ["Tokens", "██", "with", "░░", "without"]
    assert lines == ["a   " + "█" * 30 + "░" * 10 + " all", "bc  " + "█" * 10 + "░" * 10 + " half"]
    plain = plot_lines("Tokens", (GREEN, RED), bars, unicode=False)
    assert plain[1].plain.isascii()


@pytest.mark.integration
def test_the_demo_proves_its_own_story(capsys: pytest.CaptureFixture[str]) -> None:
    config = load_config(flags={"dmp.capacity": "64MiB", "compute.threads": 1}, environ={})
    assert run_demo(config, rows=6, seed=7) == 0
    text = capsys.readouterr().out
    table = text[text.index("Statements over the same 6 notes") :]
    row = re.compile(r"^ ?[1-5] .*? +[\d,]+ +[\d,]+ +[\d,]+ +([\d,]+) +\d+\.\d", re.M)
    loaded = [int(cell.replace(",", "")) for cell in row.findall(table)]
    assert len(loaded) == 5
    assert loaded[0] == 0
    assert min(loaded[1:]) > 0
    assert "A chat of 10 turns" in text
    (before,) = re.findall(r"an instruction of (\d+) tokens", text)
    assert f"the same {before} tokens of the instruction" in text
