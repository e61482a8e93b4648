"""The hooks of each engine's class as docs/engines.md lists them: ours, and those left alone."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).parents[3] / "docs" / "engines.md"


@dataclass(frozen=True, slots=True)
class Hooks:
    """The hooks of one class.

    Attributes:
        ours: those we implement.
        left: those that do what the engine's base class does.
    """

    ours: set[str]
    left: set[str]


def hooks_in_docs(name: str) -> Hooks:
    """Read the row of a class from the table of hooks."""
    row = re.search(rf"^\| `{name}` \|(.*)\|(.*)\|$", PAGE.read_text(), re.MULTILINE)
    assert row is not None, f"docs/engines.md has no row for {name}"
    ours, left = (set(re.findall(r"`(\w+)`", cell)) for cell in row.groups())
    return Hooks(ours, left)
