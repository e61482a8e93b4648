"""Fenced blocks of the documentation, for the tests that run them.

Conventions (CONTRIBUTING.md): ``sql`` and ``python`` blocks are run, ``sh run`` blocks are run by
bash; ``no-run`` behind the language leaves a block alone. In every ``sh`` block and every block
without a language, lines that start with ``tierkv`` must parse.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FAILS = "-- fails: "

_BLOCK = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_TIERKV = re.compile(r"^(?:\.venv/bin/)?tierkv\b")


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        info: what stands behind the opening fence, such as ``sql no-run``.
        line: of the opening fence, counted from 1.
    """

    page: Path
    info: str
    text: str
    line: int

    @property
    def where(self) -> str:
        """Return ``file:line``, for messages."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"


@dataclass(frozen=True)
class Example:
    """Part of a ``sql`` block: statements, and what the last of them must fail with, if it must."""

    sql: str
    fails: str
    where: str


def blocks(page: Path, *infos: str) -> list[Block]:
    """Return a page's blocks with exactly these words behind the fence; all without any."""
    text = page.read_text()
    found = [
        Block(page, match[1].strip(), match[2], text.count("\n", 0, match.start()) + 1)
        for match in _BLOCK.finditer(text)
    ]
    return [block for block in found if not infos or block.info in infos]


def sql_examples(page: Path) -> list[Example]:
    """Cut a page's ``sql`` blocks at their ``-- fails:`` comments, each good for one statement."""
    found: list[Example] = []
    for block in blocks(page, "sql"):
        fails, lines = "", []
        for line in [*block.text.splitlines(), FAILS]:
            if line.startswith(FAILS.strip()):
                found.append(Example("\n".join(lines), "", block.where))
                fails, lines = line.removeprefix(FAILS).strip(), []
                continue
            lines.append(line)
            if fails and line.rstrip().endswith(";"):
                found.append(Example("\n".join(lines), fails, block.where))
                fails, lines = "", []
    return [example for example in found if example.sql.strip()]


def tierkv_lines(page: Path) -> list[tuple[str, list[str]]]:
    """Return place and arguments of every ``tierkv ...`` command line of a page."""
    found = []
    for block in blocks(page, "", "sh", "sh run"):
        for line in block.text.replace("\\\n", " ").splitlines():
            if _TIERKV.match(line):
                found.append((block.where, shlex.split(line, comments=True)[1:]))
    return found
