"""Bars on a terminal, for the demo.

Lengths are shares of the largest value of a plot. Each kind of bar has a character of its own as
well as a colour, so that a plot without colours reads the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from rich.text import Text

BAR_WIDTH = 40
_ASCII = {"█": "#", "▓": "=", "▒": "+", "░": "-"}


@dataclass(frozen=True, slots=True)
class Kind:
    """What a piece of a bar means, and how it looks."""

    name: str
    character: str
    colour: str


@dataclass(frozen=True, slots=True)
class Bar:
    """One line of a plot: its label, its pieces and what stands behind them."""

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
    """Cells per piece; rounded at the pieces' ends, so that the whole bar has its length."""
    ends, total = [0], 0.0
    for _, value in bar.pieces:
        total += value
        ends.append(round(BAR_WIDTH * total / most))
    return [end - begin for begin, end in pairwise(ends)]


def _character(kind: Kind, unicode: bool) -> str:
    return kind.character if unicode else _ASCII[kind.character]
