"""Names for unnamed result columns with AI calls.

The engine would name these columns after our rewritten text. A lone call is named after its
function, as PostgreSQL does; a longer expression after its own text, as DuckDB does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from tierkv.sql.calls.calls import FoundCall
from tierkv.sql.calls.dialect import Dialect
from tierkv.sql.text.clauses import begins_clause
from tierkv.sql.text.lexer import Token, TokenKind, closing_index, depth_change

_LIST_ENDS: Final = frozenset(
    {
        "FROM",
        "WHERE",
        "GROUP",
        "HAVING",
        "WINDOW",
        "QUALIFY",
        "ORDER",
        "LIMIT",
        "OFFSET",
        "UNION",
        "INTERSECT",
        "EXCEPT",
        "FETCH",
        "FOR",
        "INTO",
        "SELECT",
        "RETURNING",
    }
)
_OPERATOR_WORDS: Final = frozenset(
    {
        "IS",
        "NOT",
        "AND",
        "OR",
        "IN",
        "LIKE",
        "ILIKE",
        "BETWEEN",
        "THEN",
        "ELSE",
        "WHEN",
        "CASE",
        "COLLATE",
        "ESCAPE",
        "SIMILAR",
        "TO",
        "GLOB",
    }
)


def missing_aliases(
    text: str,
    tokens: list[Token],
    calls: Sequence[FoundCall],
    dialect: Dialect = Dialect.DUCKDB,
) -> dict[int, str]:
    """Find missing column names: maps the token index in front of which `` AS name`` belongs.

    PostgreSQL names longer expressions itself, after functions and casts and never after text.
    """
    aliases: dict[int, str] = {}
    if not calls:
        return aliases
    starts = {call.first: call for call in calls}
    ends = {call.last: call for call in calls}
    for index, token in enumerate(tokens):
        if token.kind is TokenKind.WORD and token.upper in ("SELECT", "RETURNING"):
            for first, last in _items(tokens, _list_start(tokens, index + 1)):
                call = starts.get(first)
                if not any(at in starts for at in range(first, last)) or _named(
                    tokens, first, last
                ):
                    continue
                if dialect is Dialect.DUCKDB:
                    if any(t.upper == "COLUMNS" for t in tokens[first:last]):
                        continue  # Several columns, which the engine names after their sources.
                    aliases[last] = _quoted(_name(text, tokens, first, last, call))
                    continue
                naming = _naming(tokens, starts, ends, first, last)
                if naming is not None:
                    aliases[last] = _quoted(naming.function.name)
    return aliases


def _naming(
    tokens: list[Token],
    starts: Mapping[int, FoundCall],
    ends: Mapping[int, FoundCall],
    first: int,
    last: int,
) -> FoundCall | None:
    """Find the call that names an item in PostgreSQL: a lone call, or the value of ELSE."""
    while first < last and tokens[first].text == "(":
        first += 1
    if tokens[first].upper == "CAST" and tokens[first + 1].text == "(":
        close = closing_index(tokens, first + 1)
        types = [at for at in range(first, close) if tokens[at].upper == "AS"]
        if not types or not _adds_no_name(tokens, close + 1, last):
            return None
        return _naming(tokens, starts, ends, first + 2, types[-1])
    call = starts.get(first)
    if call is not None:
        return call if _adds_no_name(tokens, call.last, last) else None
    call = ends.get(last - 1)
    is_case = tokens[first].upper == "CASE" and tokens[last - 1].upper == "END"
    return call if is_case and call and tokens[call.first - 1].upper == "ELSE" else None


def _adds_no_name(tokens: list[Token], index: int, last: int) -> bool:
    """Return whether only brackets, subscripts, collations and casts follow."""
    while index < last and tokens[index].text != "::":
        if tokens[index].text == "[":
            index = closing_index(tokens, index) + 1
        elif tokens[index].text == ")" or tokens[index].upper == "COLLATE":
            index += 1 + (tokens[index].upper == "COLLATE")
        else:
            return False
    return True


def _only(tokens: list[Token], call: FoundCall, last: int) -> bool:
    """Return whether only casts follow a call."""
    return call.last == last or tokens[call.last].text == "::"


def _list_start(tokens: list[Token], index: int) -> int:
    if index < len(tokens) and tokens[index].upper in ("ALL", "DISTINCT"):
        index += 1
        if index + 1 < len(tokens) and tokens[index].upper == "ON":
            return closing_index(tokens, index + 1) + 1
    return index


def _items(tokens: list[Token], first: int) -> list[tuple[int, int]]:
    items: list[tuple[int, int]] = []
    index = first
    while index < len(tokens):
        token = tokens[index]
        change = depth_change(token)
        if change > 0:
            index = closing_index(tokens, index) + 1
            continue
        ends = change < 0 or token.text == ";" or _ends_list(tokens, index)
        if ends or token.text == ",":
            items.append((first, index))
            first = index + 1
        if ends:
            return items
        index += 1
    items.append((first, len(tokens)))
    return items


def _ends_list(tokens: list[Token], index: int) -> bool:
    word, following = tokens[index].upper, tokens[index + 1 : index + 2]
    conflict = word == "ON" and bool(following) and following[0].upper == "CONFLICT"
    return (conflict or word in _LIST_ENDS) and begins_clause(tokens, index)


def _named(tokens: list[Token], first: int, last: int) -> bool:
    """Return whether an item has an alias; in doubt True, which only costs a pretty name."""
    if last - first > 1 and tokens[first + 1].text == ":":
        return True
    star = first + 2 if tokens[first + 1].text == "." else first
    if tokens[star].text == "*":
        return True  # The columns of * REPLACE (...) have names.
    depth = 0
    for index in range(first, last):
        depth += depth_change(tokens[index])
        if depth == 0 and tokens[index].upper == "AS":
            return True
    end, before = tokens[last - 1], tokens[last - 2] if last - first > 1 else None
    if before is None or end.kind not in (TokenKind.WORD, TokenKind.QUOTED) or end.upper == "END":
        return False
    if before.kind is TokenKind.OPERATOR:
        return before.text in (")", "]", "}")
    return before.upper not in _OPERATOR_WORDS and before.upper != "OVER"


def _name(text: str, tokens: list[Token], first: int, last: int, call: FoundCall | None) -> str:
    if call is not None and _only(tokens, call, last):
        return call.function.name
    return " ".join(text[tokens[first].start : tokens[last - 1].end].split())


def _quoted(name: str) -> str:
    escaped = name.replace('"', '""')
    return f'"{escaped}"'
