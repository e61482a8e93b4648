"""``x::varchar(3)`` and ``CAST(x AS varchar(3))`` cut a text off; DuckDB's casts ignore the length.

A rule of rewrite.py: such a cast becomes ``left(CAST(x AS VARCHAR), 3)``.
"""

from __future__ import annotations

from typing import Final

from dbfront.pgwire.catalog.casts import BEFORE_PARENTHESIS
from dbfront.pgwire.catalog.rewriter import Rewriter
from dbfront.pgwire.catalog.text_lengths import text_length

_NO_OPERAND: Final = BEFORE_PARENTHESIS | {"end", "array", "interval"}
_CLOSING: Final = {"(": ")", "[": "]"}


def cast_to_length(r: Rewriter, i: int) -> int:
    """Rewrite the cast that begins at ``i``, with its operand."""
    if r.at(i) == "cast" and r.at(i + 1) == "(":
        return _written_out(r, i)
    operand = _operand_end(r, i)
    end = operand
    while operand and r.at(end) in ("::", "["):
        if r.at(end) == "[":
            end = _closing(r, end) + 1
            continue
        length = text_length(r.tokens, end + 1)
        if length is not None and length.kind == "varchar":
            return _cut(r, i, i, end, end + 1 + length.words, length.characters)
        end = _type_end(r, end + 1)
    return 0


def _written_out(r: Rewriter, i: int) -> int:
    close = r.closing(i + 1)
    for at in range(i + 2, close):
        if r.at(at) == "as":
            length = text_length(r.tokens, at + 1)
            if length is not None and length.kind == "varchar" and at + 1 + length.words == close:
                return _cut(r, i, i + 2, at, close + 1, length.characters)
    return 0


def _cut(r: Rewriter, first: int, start: int, stop: int, after: int, characters: int) -> int:
    """Replace [first, after) by the tokens [start, stop), cut off."""
    inner = r.nested(r.sql[r.tokens[start].start : r.tokens[stop - 1].end])
    return r.replace(first, after - first, f"left(CAST({inner} AS VARCHAR), {characters})")


def _operand_end(r: Rewriter, i: int) -> int:
    """Where the operand of a cast that begins at ``i`` ends; 0 if there can't be one."""
    kind = r.tokens[i].kind
    if r.at(i - 1) in (".", "::"):
        return 0
    if kind in ("string", "number", "param"):
        typed = i > 0 and r.tokens[i - 1].kind == "word" and r.at(i - 1) not in BEFORE_PARENTHESIS
        return 0 if kind == "string" and typed else i + 1
    end = i
    if kind in ("word", "ident"):
        if kind == "word" and r.at(i) in _NO_OPERAND:
            return 0
        end = i + 1
        while r.at(end) == "." and end + 1 < len(r.tokens):
            end += 2
    return _closing(r, end) + 1 if r.at(end) == "(" else end if end > i else 0


def _type_end(r: Rewriter, at: int) -> int:
    """Where the type at ``at`` ends: names, and what stands in parentheses."""
    while at < len(r.tokens) and (r.tokens[at].kind in ("word", "ident") or r.at(at) == "."):
        at += 1
        if r.at(at) not in (".", "(") and r.at(at) not in _MORE_OF_TYPE:
            break
    return _closing(r, at) + 1 if r.at(at) == "(" else at


_MORE_OF_TYPE: Final = frozenset({"precision", "varying", "with", "without", "time", "zone"})


def _closing(r: Rewriter, index: int) -> int:
    """Index of the partner of the bracket at ``index``; the end if there is none."""
    opening = r.at(index)
    depth = 0
    for at in range(index, len(r.tokens)):
        depth += (r.at(at) == opening) - (r.at(at) == _CLOSING[opening])
        if depth == 0:
            return at
    return len(r.tokens) - 1
