"""``ai_prompt('Summarise {0} for {1}', body, name)``: a template and its arguments.

sql/plan/rewrite.py writes the template as a concatenation for the engine to evaluate; a NULL
argument makes the prompt NULL, as ``||`` does. The text before the first hole is the same for every
row.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from tierkv.kvcore.errors import UdfArgumentError

Piece = str | int
"""Text, or the number of an argument."""

_PIECE: Final = re.compile(r"\{\{|\}\}|\{(\d{1,4})\}|\{[^{}]*\}?|\}")


@dataclass(frozen=True, slots=True)
class PromptTemplate:
    """Pieces of a template, in order; two texts are never neighbours."""

    pieces: tuple[Piece, ...]


def parse_template(text: str, arguments: int) -> PromptTemplate:
    """Cut a template at its holes ``{0}``, ``{1}``...; ``{{`` and ``}}`` are braces.

    Args:
        text: the template.
        arguments: number of arguments.

    Raises:
        UdfArgumentError: a hole without argument, a lone brace, or an argument without hole.
    """
    pieces: list[Piece] = []
    written: list[str] = []
    at = 0
    for match in _PIECE.finditer(text):
        written.append(text[at : match.start()])
        at = match.end()
        if match[0] in ("{{", "}}"):
            written.append(match[0][0])
        elif match[1] is None:
            raise UdfArgumentError(
                f'ai_prompt: "{match[0]}" is not a hole such as {{0}}',
                hint="Write {{ and }} for braces.",
            )
        else:
            _flush(pieces, written)
            pieces.append(_hole(int(match[1]), arguments))
    written.append(text[at:])
    _flush(pieces, written)
    unused = sorted(set(range(arguments)) - {piece for piece in pieces if isinstance(piece, int)})
    if unused:
        raise UdfArgumentError(f"ai_prompt: the template has no {{{unused[0]}}} for an argument")
    return PromptTemplate(tuple(pieces))


def _hole(number: int, arguments: int) -> int:
    if number >= arguments:
        raise UdfArgumentError(
            f"ai_prompt: nothing is given for {{{number}}}",
            hint="Holes count from {0}; each takes one argument after the template.",
        )
    return number


def _flush(pieces: list[Piece], written: list[str]) -> None:
    text = "".join(written)
    written.clear()
    if text:
        pieces.append(text)
