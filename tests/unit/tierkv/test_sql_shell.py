"""When the prompt of ``tierkv sql`` runs what was typed."""

from __future__ import annotations

import pytest

from tierkv.sql_shell import is_complete


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
