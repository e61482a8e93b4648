"""When the prompt of ``tierkv sql`` runs what was typed, and what it says afterwards."""

from __future__ import annotations

import pytest

from dbfront.statistics import AiStats
from kvcore.request import HitTokens
from tierkv.sql_shell import LEAVING, help_of, is_complete, summarise


@pytest.mark.parametrize(
    ("text", "complete"),
    [
        ("SELECT 1;", True),
        ("SELECT 1; -- done\n", True),
        ("SELECT 1; SELECT 2;\n", True),
        ("SELECT 'a;\nb';\n", True),
        ("SELECT 1", False),
        ("SELECT 'a;\n", False),
        ("SELECT 1 -- not yet;\n", False),
        ("SELECT 1 /* not yet;\n", False),
        ("SELECT $$ a;\n", False),
        ("\n", False),
    ],
)
def test_a_statement_runs_when_its_semicolon_is_outside_strings(text: str, complete: bool) -> None:
    assert is_complete(text) is complete


def test_the_summary_tells_of_blending_only_where_there_was_some() -> None:
    stats = AiStats(calls=2, distinct_calls=1, prompt_tokens=50, hit_tokens=HitTokens(l1=40))
    assert "40 from the cache (L1 40), mean" in summarise(stats)
    stats.blended_tokens = 30
    assert "40 from the cache (L1 40), 30 of them blended, mean" in summarise(stats)


@pytest.mark.parametrize("command", ["help", "HELP;", "\\?", "\\h"])
def test_help_is_asked_for_in_any_of_its_spellings(command: str) -> None:
    told = help_of(command)
    assert "\\dt lists tables" in told
    assert all(name in told for name in ("ai_generate", "ai_classify", "ai_extract"))


def test_an_unknown_command_is_said_to_be_one() -> None:
    assert help_of("\\timing") == "there is no command \\timing here; \\? lists those there are"
    assert help_of("SELECT 1") == help_of("helper") == ""
    assert {"quit", "exit", "\\q"} <= LEAVING
