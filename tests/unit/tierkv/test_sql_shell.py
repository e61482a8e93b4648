"""When the prompt of ``tierkv sql`` runs what was typed, and what it says afterwards."""

from __future__ import annotations

from pathlib import Path

import pytest

from tierkv.config import state_folder
from tierkv.dbfront.accounts.statistics import AiStats
from tierkv.kvcore.request import HitTokens
from tierkv.shell.commands import (
    LEAVING,
    Reply,
    answer,
    is_command,
    is_complete,
    script_parts,
)
from tierkv.shell.prompt import MAX_ENTRY_CHARS, StatementHistory, catalog_of, words_for
from tierkv.shell.sql_shell import summarise
from tierkv.sql.calls.functions import AI_FUNCTIONS


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
        ("\n", True),
        ("-- a comment\n", True),
        ("-- a comment\nSELECT 1", False),
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
    assert is_command(command)
    told = answer(command, timing=False).text
    assert all(name in told for name in ("\\dt", "\\df", "\\timing", "ai_generate", "\\q"))


def test_an_unknown_command_is_said_to_be_one() -> None:
    unknown = answer("\\x", timing=False)
    assert unknown.refused and "there is no command \\x here" in unknown.text
    assert not is_command("SELECT 1")
    assert is_command("quit ;") and answer("\\timing ;", timing=False).timing
    assert not is_command("helper")
    assert {"quit", "exit", "\\q"} <= LEAVING


def test_a_script_is_commands_between_statements() -> None:
    script = "SELECT 1;\n\\timing\n  \\df ai_*\nSELECT 'a\n\\l\n';\n\\q\n;\n"
    assert script_parts(script) == [
        "SELECT 1;\n", "\\timing", "\\df ai_*", "SELECT 'a\n\\l\n';\n", "\\q", ";\n"
    ]  # fmt: skip
    commented = "-- first;\n\\timing\n/* then */\n\\l\nSELECT 1 -- not yet\n\\l\n;"
    assert script_parts(commented) == [
        "-- first;\n", "\\timing", "/* then */\n", "\\l", "SELECT 1 -- not yet\n\\l\n;"
    ]  # fmt: skip
    words = "help\nSELECT 1;\nExit;\nSELECT 'a\nquit\n';\nSELECT 1 AS\nhelp\n;quit"
    assert script_parts(words) == [
        "help", "SELECT 1;\n", "Exit;", "SELECT 'a\nquit\n';\nSELECT 1 AS\nhelp\n;quit"
    ]  # fmt: skip
    assert script_parts("") == []
    assert script_parts("\\l") == ["\\l"]


def test_timing_is_switched_or_set() -> None:
    assert answer("\\timing", timing=False) == Reply(text="Timing is on.", timing=True)
    assert answer("\\timing", timing=True) == Reply(text="Timing is off.", timing=False)
    assert answer("\\timing on", timing=True) == Reply(text="Timing is on.", timing=True)
    assert answer("\\timing maybe", timing=True).timing is None


def test_functions_are_listed_with_their_arguments() -> None:
    listed = answer("\\df ai_count", timing=False)
    assert listed.rows == (("ai_count_tokens", "input, [model]", "integer"),)
    assert len(answer("\\df", timing=False).rows) == len(AI_FUNCTIONS)
    assert answer("\\df *count*", timing=False) == listed


CATALOG = catalog_of(
    [
        ("main", "notes", "id"),
        ("main", "notes", "body"),
        ("tierkv", "nodes", "role"),
        ("main", "orders", "total"),
    ]
)


@pytest.mark.parametrize(
    ("text", "some"),
    [
        ("SEL", ["SELECT"]),
        ("sel", ["select"]),
        ("SELECT * FROM no", ["notes"]),
        ("SELECT * FROM notes, or", ["orders"]),
        ("INSERT INTO ", ["notes", "orders", "tierkv.nodes"]),
        ("SELECT * FROM tierkv.n", ["tierkv.nodes"]),
        ("UPDATE notes SET bo", ["body"]),
        ("SELECT 1; SHOW tierkv.see", ["tierkv.seed"]),
        ("SELECT bo", ["body"]),
        ("SELECT * FROM orders WHERE to", ["total"]),
        ("SELECT * FROM orders WHERE bod", []),
        ("SELECT * FROM notes n WHERE notes.b", ["notes.body"]),
        ("SELECT ai_cl", ["ai_classify(", "ai_classify_multi("]),
        ("SET tierkv.max_ca", ["tierkv.max_calls"]),
        ("SELECT 'SEL", []),
        ("SELECT 1 /* SEL", []),
        ("\\ti", ["\\timing"]),
        ("\\d no", ["notes"]),
    ],
)  # fmt: skip
def test_tab_offers_what_may_stand_there(text: str, some: list[str]) -> None:
    assert words_for(text, CATALOG, commands=["\\d", "\\timing"]) == some


def test_history_is_private_bounded_and_keeps_whole_statements_without_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tierkv.shell.prompt.MAX_ENTRIES", 4)
    path = tmp_path / "state" / "sql_history"
    history = StatementHistory(path)
    kept = ["SELECT 1;", "SELECT a,\n  b\nFROM t;", "SELECT ai_count_tokens('x');"]
    for statement in (
        *kept,
        "ATTACH 'postgres://ann:pw@host/db';",
        "CREATE SECRET s (TYPE s3, KEY_ID 'a');",
        "ALTER USER ann PASSWORD 'x';",
        "SELECT '" + "x" * MAX_ENTRY_CHARS + "';",
    ):
        history.append_string(statement)
    again = StatementHistory(path)
    assert list(again.load_history_strings()) == kept[::-1]
    assert path.stat().st_mode & 0o077 == path.parent.stat().st_mode & 0o077 == 0
    for number in range(3):
        again.append_string(f"SELECT {number};")
    newest = list(StatementHistory(path).load_history_strings())
    assert newest == ["SELECT 2;", "SELECT 1;"]
    assert [file.name for file in path.parent.iterdir()] == ["sql_history"]
    assert path.stat().st_mode & 0o077 == 0


def test_state_lies_where_xdg_says() -> None:
    assert state_folder({"XDG_STATE_HOME": "/x"}) == Path("/x/tierkv")
    at_home = Path("~/.local/state/tierkv").expanduser()
    assert state_folder({}) == state_folder({"XDG_STATE_HOME": "relative"}) == at_home
