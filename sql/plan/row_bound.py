"""For how many rows a query's later AI calls can be made at most, whatever earlier ones answer.

EXPLAIN (AI_ESTIMATE) asks no model, so it does not know which rows pass an AI filter. Those that
could are the rows of FROM and of the rest of WHERE; groups, outputs and sort keys are no more.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Final

from tierkv.sql.calls.calls import FoundCall
from tierkv.sql.plan.changes import with_writes
from tierkv.sql.plan.rewrite import Piece
from tierkv.sql.text.clauses import Range, select_clauses
from tierkv.sql.text.lexer import Token, TokenKind, depth_change
from tierkv.sql.text.statement import main_verb

_AFTER_FROM: Final = frozenset(
    {"WHERE", "GROUP", "HAVING", "WINDOW", "QUALIFY", "ORDER", "LIMIT", "OFFSET"}
)
_SETS: Final = frozenset({"UNION", "INTERSECT", "EXCEPT"})
_MORE_ROWS: Final = frozenset(
    {"UNNEST", "ROLLUP", "CUBE", "GROUPING", "GENERATE_SERIES", "GENERATE_SUBSCRIPTS", "SELECT"}
    | {"REGEXP_MATCHES", "REGEXP_SPLIT_TO_TABLE", "JSON_ARRAY_ELEMENTS", "JSONB_ARRAY_ELEMENTS"}
)


def row_bound(tokens: list[Token], start: int, calls: Sequence[FoundCall]) -> list[Piece] | None:
    """Derive the query that counts such rows; None when that is not understood.

    Args:
        tokens: of the whole text.
        start: first token of the query.
        calls: AI calls anywhere in the text.
    """
    verb = start + main_verb(tokens[start:])
    clauses = select_clauses(tokens, verb)
    if clauses is None or _first_of(tokens, verb, _SETS) < len(tokens) or with_writes(tokens):
        return None
    from_at = clauses.items[-1][1]
    from_end = _first_of(tokens, from_at, _AFTER_FROM)
    if any(
        _contains((start, verb), call) or _contains((from_at, from_end), call) for call in calls
    ):
        return None
    asking = [span for span in clauses.conjuncts if any(_contains(span, call) for call in calls)]
    rest = (clauses.conjuncts[-1][1] if clauses.conjuncts else from_end, len(tokens))
    if any(_multiplies(tokens, span) for span in ((verb + 1, from_at), *asking, rest)):
        return None
    pieces: list[Piece] = [(start, verb), " SELECT count(*) ", (from_at, from_end), " WHERE TRUE"]
    for span in clauses.conjuncts:
        if span not in asking:
            pieces += [" AND (", span, ")"]
    return pieces


def _contains(span: Range, call: FoundCall) -> bool:
    return span[0] <= call.first < span[1]


def _multiplies(tokens: list[Token], span: Range) -> bool:
    """Say whether there may be more calls than rows: a subquery, or a function that makes rows."""
    return any(
        token.kind is TokenKind.WORD and token.upper in _MORE_ROWS
        for token in tokens[span[0] : span[1]]
    )


def _first_of(tokens: list[Token], first: int, words: Set[str]) -> int:
    """Return the index of the first of some words outside brackets, ``len(tokens)`` if none."""
    depth = 0
    for index in range(first, len(tokens)):
        depth += depth_change(tokens[index])
        if depth == 0 and tokens[index].kind is TokenKind.WORD and tokens[index].upper in words:
            return index
    return len(tokens)
