"""A statement without its literals: the grouping key of statistics, and the text shown in views.

Pure text work on tokens (sql/text/lexer.py). Called by dbfront/accounts/statement_entry.py. Prompts
and data are literals, so a normal form contains neither.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Final

from tierkv.kvcore import limits
from tierkv.sql.text.lexer import Token, TokenKind

_LITERALS: Final = frozenset({TokenKind.STRING, TokenKind.NUMBER})
_MORE: Final = " /*, ... */"
"""Stands for the rest of a list of literals, as in PostgreSQL."""


def normal_form(tokens: Sequence[Token]) -> str:
    """Write a statement with ``$n`` for each literal, without comments, and on one line.

    A list of literals after IN is shown by its first literal: the length of the list does not
    matter. At most limits.MAX_NORMAL_FORM_CHARS characters are kept.
    """
    pieces: list[str] = []
    end = tokens[0].start if tokens else 0
    number = _highest_parameter(tokens)
    for first, last, text in _shown(tokens, number):
        pieces.append(" " if tokens[first].start > end else "")
        pieces.append(text)
        end = tokens[last].end
    return "".join(pieces)[: limits.MAX_NORMAL_FORM_CHARS]


def query_id(tokens: Sequence[Token]) -> int:
    """Return a 64-bit number, equal for statements that differ only in literals.

    White space, comments and the case of unquoted names make no difference either. The number is
    the same in every run and on every machine.
    """
    hasher = blake2b(digest_size=8)
    for first, _, text in _shown(tokens, _highest_parameter(tokens)):
        folded = text.lower() if tokens[first].kind is TokenKind.WORD else text
        hasher.update(folded.encode(errors="replace") + b"\0")
    return int.from_bytes(hasher.digest(), "little", signed=True)


def _shown(tokens: Sequence[Token], number: int) -> list[tuple[int, int, str]]:
    """Return the shown texts, each with the first and last index of the replaced tokens."""
    shown: list[tuple[int, int, str]] = []
    index, end = 0, _end(tokens)
    while index < end:
        if tokens[index].kind in _LITERALS:
            number += 1
            text = f"${number}"
            more = _rest_of_list(tokens, index)
            shown.append((index, index + more, text + _MORE if more else text))
            index += more
        else:
            shown.append((index, index, tokens[index].text))
        index += 1
    return shown


def _end(tokens: Sequence[Token]) -> int:
    """Return the end of the statement without trailing semicolons."""
    end = len(tokens)
    while end and tokens[end - 1].text == ";":
        end -= 1
    return end


def _rest_of_list(tokens: Sequence[Token], first: int) -> int:
    """Count the tokens of ``, 2, 3`` in ``IN (1, 2, 3)``; 0 for any other text."""
    if first < 2 or tokens[first - 1].text != "(" or tokens[first - 2].upper != "IN":
        return 0
    index = first + 1
    while index + 1 < len(tokens) and tokens[index].text == ",":
        if tokens[index + 1].kind not in _LITERALS:
            return 0
        index += 2
    is_closed = index < len(tokens) and tokens[index].text == ")"
    return index - first - 1 if is_closed else 0


def _highest_parameter(tokens: Sequence[Token]) -> int:
    """Return the statement's highest parameter number; literals are numbered after it."""
    numbers = (
        int(token.text[1:])
        for token in tokens
        if token.kind is TokenKind.PARAMETER and token.text[1:].isdecimal()
    )
    return max(numbers, default=0)
