"""The text of prompts that a statement shows: templates of ``ai_prompt``, and constant beginnings.

Pure; reads tokens, never asks the engine. ``ai_prompt('Summarise {0} for {1}', body, name)`` is a
template and its arguments: sql/plan/rewrite.py writes the template as a concatenation that the
engine evaluates; a NULL argument makes the prompt NULL, as ``||`` does.

The constant text at the beginning of a prompt expression is shared by every row's prompt. An
expression that could mean anything except text concatenated from the left has no constant prefix.
Column types are unknown: where ``||`` appends to an array, ``bytea`` or ``tsvector`` the result
would be wrong. Therefore use the prefix only for display and for optional optimisations.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from tierkv.kvcore.errors import UdfArgumentError
from tierkv.sql.calls.functions import PROMPT_TEMPLATE
from tierkv.sql.text.lexer import Token, TokenKind, depth_change, string_value

_Piece = str | int
"""Text, or the number of an argument."""

_PIECE: Final = re.compile(r"\{\{|\}\}|\{(\d{1,4})\}|\{[^{}]*\}?|\}")


@dataclass(frozen=True, slots=True)
class PromptTemplate:
    """Pieces of a template, in order; two texts are never neighbours."""

    pieces: tuple[_Piece, ...]


def parse_template(text: str, arguments: int) -> PromptTemplate:
    """Cut a template at its holes ``{0}``, ``{1}``...; ``{{`` and ``}}`` are braces.

    Args:
        text: the template.
        arguments: number of arguments.

    Raises:
        UdfArgumentError: a hole without argument, a lone brace, or an argument without hole.
    """
    pieces: list[_Piece] = []
    written: list[str] = []
    at = 0
    for match in _PIECE.finditer(text):
        written.append(text[at : match.start()])
        at = match.end()
        if match[0] in ("{{", "}}"):
            written.append(match[0][0])
        elif match[1] is None:
            raise UdfArgumentError(
                f'ai_prompt: "{match[0]}" is not a placeholder such as {{0}}',
                hint="Write {{ and }} for literal braces.",
            )
        else:
            _flush(pieces, written)
            pieces.append(_hole(int(match[1]), arguments))
    written.append(text[at:])
    _flush(pieces, written)
    unused = sorted(set(range(arguments)) - {piece for piece in pieces if isinstance(piece, int)})
    if unused:
        raise UdfArgumentError(f"ai_prompt: the template has no {{{unused[0]}}} for its argument")
    return PromptTemplate(tuple(pieces))


def _hole(number: int, arguments: int) -> int:
    if number >= arguments:
        raise UdfArgumentError(
            f"ai_prompt: there is no argument for {{{number}}}",
            hint="Placeholders count from {0}; each needs one argument after the template.",
        )
    return number


def _flush(pieces: list[_Piece], written: list[str]) -> None:
    text = "".join(written)
    written.clear()
    if text:
        pieces.append(text)


_TEXT_TYPES: Final = frozenset({"TEXT", "VARCHAR"})
_CLOSER: Final = frozenset({".", "::", ")", "]", "}"})
"""Operators outside brackets that bind closer than ``||``."""

_LOOSER: Final = frozenset(
    {
        "AND", "OR", "NOT", "IS", "ISNULL", "NOTNULL", "IN", "LIKE", "ILIKE", "SIMILAR", "GLOB",
        "BETWEEN", "OVERLAPS", "COLLATE", "AT", "ESCAPE", "OPERATOR",
    }
)  # fmt: skip
"""Words that change, or may change, the meaning of the whole preceding ``||`` chain."""


@dataclass(frozen=True, slots=True)
class _Head:
    """Text at the beginning; ``whole``: the text is the complete value."""

    text: str
    whole: bool


_NOTHING: Final = _Head("", whole=False)


def static_prefix(tokens: Sequence[Token]) -> str:
    """Return the text at the beginning of an expression's value in all rows, unless NULL.

    Understands literals, ``'a' || b``, ``concat('a', b)``, ``ai_prompt('a {0}', b)``, brackets
    around these, and casts of literals to text. Any other expression has no known beginning.

    Args:
        tokens: tokens of one argument, without its name.
    """
    return _head(tokens).text


def _head(tokens: Sequence[Token]) -> _Head:
    parts = list(_split(tokens, "||"))
    if len(parts) > 1:
        if not all(_is_operand(part) for part in parts) or _may_be_no_text(parts[0]):
            return _NOTHING
        return _joined(_operand(part) for part in parts)
    return _operand(tokens)


def _operand(tokens: Sequence[Token]) -> _Head:
    """Read an operand of ``||``."""
    if len(tokens) > 2 and tokens[-2].text == "::" and tokens[-1].upper in _TEXT_TYPES:
        tokens = tokens[:-2]
    if len(tokens) == 1 and tokens[0].kind is TokenKind.STRING:
        return _Head(string_value(tokens[0]), whole=True)
    if len(tokens) < 3 or not _one_bracket(tokens):
        return _NOTHING
    if tokens[0].text == "(":
        return _head(tokens[1:-1])
    if tokens[0].upper == "CONCAT":
        # concat skips NULLs, so the first possibly NULL argument ends the known text.
        parts = (_head(part) for part in _split(tokens[2:-1], ","))
        return _joined(part if part.whole else _NOTHING for part in parts)
    if tokens[0].upper == PROMPT_TEMPLATE.upper():
        return _template(list(_split(tokens[2:-1], ",")))
    return _NOTHING


def _one_bracket(tokens: Sequence[Token]) -> bool:
    """Return whether tokens are exactly ``( ... )`` or ``name( ... )``."""
    opening = 0 if tokens[0].text == "(" else 1
    if opening and tokens[0].kind is not TokenKind.WORD:
        return False
    if tokens[opening].text != "(":
        return False
    depth = 0
    for index in range(opening, len(tokens)):
        depth += depth_change(tokens[index])
        if depth == 0:
            return index == len(tokens) - 1
    return False


def _joined(heads: Iterator[_Head]) -> _Head:
    texts: list[str] = []
    for head in heads:
        texts.append(head.text)
        if not head.whole:
            return _Head("".join(texts), whole=False)
    return _Head("".join(texts), whole=True)


def _template(arguments: Sequence[Sequence[Token]]) -> _Head:
    if not arguments or len(arguments[0]) != 1 or arguments[0][0].kind is not TokenKind.STRING:
        return _NOTHING
    try:
        pieces = parse_template(string_value(arguments[0][0]), len(arguments) - 1).pieces
    except UdfArgumentError:
        return _NOTHING
    if not pieces or not isinstance(pieces[0], str):
        return _NOTHING
    return _Head(pieces[0], whole=len(pieces) == 1)


def _is_operand(tokens: Sequence[Token]) -> bool:
    """Return whether tokens contain only operators that bind closer than ``||``."""
    for _, token in _outside(tokens):
        if token.kind is TokenKind.WORD and token.upper in _LOOSER:
            return False
        if token.kind is TokenKind.OPERATOR and token.text not in _CLOSER:
            return False
        if token.text == "?" and len(tokens) > 1:
            return False  # PostgreSQL's operator of jsonb.
    return bool(tokens)


def _may_be_no_text(tokens: Sequence[Token]) -> bool:
    """Return whether a literal before ``||`` could become JSON, an array, bytes or a number.

    PostgreSQL gives a literal the type of the other operand; ``'[1]' || column`` is the beginning
    of an array if the column is an array.
    """
    while len(tokens) > 2 and tokens[0].text == "(" and _one_bracket(tokens):
        tokens = tokens[1:-1]
    if len(tokens) != 1 or tokens[0].kind is not TokenKind.STRING:
        return False
    text = string_value(tokens[0]).strip()
    if text[:1] in ("{", "[", "\\", '"'):
        return True
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _split(tokens: Sequence[Token], separator: str) -> Iterator[Sequence[Token]]:
    """Cut tokens at a separator outside brackets and CASE ... END."""
    first = 0
    for index, token in _outside(tokens):
        if token.text == separator:
            yield tokens[first:index]
            first = index + 1
    yield tokens[first:]


def _outside(tokens: Sequence[Token]) -> Iterator[tuple[int, Token]]:
    """Number the tokens outside brackets and CASE ... END, without the opening tokens."""
    depth, cases = 0, 0
    for index, token in enumerate(tokens):
        depth += depth_change(token)
        if depth:
            continue
        if token.kind is TokenKind.WORD and token.upper == "CASE":
            cases += 1
        elif cases:
            cases -= token.kind is TokenKind.WORD and token.upper == "END"
        else:
            yield index, token
