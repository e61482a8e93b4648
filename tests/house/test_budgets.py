"""Sizes stay readable: a ratchet on files and functions, and no forbidden names."""

from __future__ import annotations

import ast
import statistics
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROOMS = (
    "compute", "costing", "dbfront", "dmp", "integrations", "kvcore", "kvwire", "metaserver",
    "policies",
    "scheduler", "simulator", "sql", "storage", "tierkv",
)  # fmt: skip
CODE = [
    path
    for room in ROOMS
    for path in sorted((ROOT / room).rglob("*.py"))
    if "_pb2" not in path.name
]
MOST_FILE_LINES = 500
MOST_FUNCTION_LINES = 70
MEDIAN_FILE_LINES = 240  # One thing of 80 to 350 lines; fewer files of the same code are larger.


def test_no_file_is_too_long() -> None:
    sizes = {path: len(path.read_text().splitlines()) for path in CODE}
    assert {str(p): n for p, n in sizes.items() if n > MOST_FILE_LINES} == {}
    assert statistics.median(n for n in sizes.values() if n > 3) <= MEDIAN_FILE_LINES


def test_no_function_is_too_long() -> None:
    long = [
        f"{path}:{node.lineno} {node.name}"
        for path in CODE
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and (node.end_lineno or 0) - node.lineno + 1 > MOST_FUNCTION_LINES
    ]
    assert long == []


def test_every_file_says_what_it_is() -> None:
    assert [str(p) for p in CODE if ast.get_docstring(ast.parse(p.read_text())) is None] == []


def test_no_file_is_a_drawer() -> None:
    banned = {"utils", "util", "helpers", "common", "misc"}
    assert [str(path) for path in CODE if path.stem in banned] == []
