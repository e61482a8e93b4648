"""Commands, Python, JSON and make targets of the documentation are well formed; nothing is run."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.doc_blocks import PAGES, ROOT, blocks, sql_examples, tierkv_lines
from tierkv.cli import app
from tierkv.config import load_config

LANGUAGES = {
    "", "sql", "sql no-run", "python", "python no-run", "sh", "sh run", "toml", "json",
}  # fmt: skip
ROOMS = (
    "compute", "costing", "dbfront", "dmp", "integrations", "kvcore", "kvwire", "metaserver",
    "scheduler", "sql", "storage", "tierkv",
)  # fmt: skip
MAKE_TARGETS = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def parses(arguments: list[str]) -> tuple[bool, str]:
    """Whether verbs and options exist, and what was said; with --help nothing is run."""
    done = CliRunner().invoke(app, [*arguments, "--help"])
    return done.exit_code == 0, done.output


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tierkv_commands_parse(page: Path) -> None:
    for where, arguments in tierkv_lines(page):
        good, said = parses(arguments)
        assert good, f"{where}: tierkv {' '.join(arguments)}: {said}"


@pytest.mark.parametrize("arguments", [["up", "--pg-prot", "1"], ["serv", "meta"]])
def test_a_wrong_command_would_be_found(arguments: list[str]) -> None:
    assert not parses(arguments)[0]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_blocks_are_of_known_kinds_and_well_formed(page: Path, tmp_path: Path) -> None:
    assert page.read_text().count("\n```") % 2 == 0, "a fence is not closed"
    for block in blocks(page):
        assert block.info in LANGUAGES, block.where
        if block.info.startswith("python"):
            ast.parse(block.text, filename=block.where)
        if block.info == "json":
            json.loads(block.text)
        if block.info == "toml":
            (tmp_path / "tierkv.toml").write_text(block.text)
            load_config(tmp_path / "tierkv.toml", environ={})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_make_targets_exist(page: Path) -> None:
    named = set(re.findall(r"(?:`|^)make ([a-z0-9-]+)", page.read_text(), re.MULTILINE))
    assert named <= MAKE_TARGETS


def test_every_expected_failure_is_cut_out_alone() -> None:
    examples = sql_examples(ROOT / "docs/sql.md")
    failing = [example for example in examples if example.fails]
    assert len(failing) >= 10
    assert all(example.sql.count(";") == 1 for example in failing)


def said_by_the_program() -> str:
    """Return every string of the sources, one per line; a placeholder becomes ``...``."""
    found: list[str] = []
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.JoinedStr):
                    parts = [p.value if isinstance(p, ast.Constant) else "..." for p in node.values]
                    found.append("".join(map(str, parts)))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(node.value)
    return "\n".join(found)


def test_messages_of_the_troubleshooting_table_are_said_by_the_program() -> None:
    page = (ROOT / "docs/operations.md").read_text()
    table = page.partition("## Troubleshooting")[2]
    messages = re.findall(r"`([^`]+)`", "\n".join(re.findall(r"^\| (`[^|]+) \|", table, re.M)))
    assert len(messages) > 15
    corpus = said_by_the_program()
    for message in messages:
        pieces = [piece.strip() for piece in message.split("...") if len(piece.strip()) > 4]
        assert pieces
        assert [piece for piece in pieces if piece not in corpus] == [], message
