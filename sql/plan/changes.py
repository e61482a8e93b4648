"""Whether a statement changes anything: one answer, read from its tokens, for everybody who asks.

Collecting, transactions, savepoints, cursors, streams and plans all depend on it: what only reads
may run again, or beside the statement. DuckDB 2.0 and PostgreSQL let the queries of a WITH change
tables, so the first keyword of a statement does not tell. When in doubt the answer is yes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from tierkv.kvcore.errors import SqlSyntaxError
from tierkv.sql.plan.explain_options import explain_options
from tierkv.sql.text.clauses import Range
from tierkv.sql.text.lexer import Token, TokenKind, closing_index, depth_change
from tierkv.sql.text.statement import StatementKind, classify, main_verb

_CHANGES: Final = frozenset({"INSERT", "UPDATE", "DELETE", "MERGE", "TRUNCATE", "COPY"})
_READS: Final = frozenset(
    {StatementKind.SHOW, StatementKind.SET, StatementKind.RESET, StatementKind.SAVEPOINT}
    | {StatementKind.BEGIN, StatementKind.COMMIT, StatementKind.ROLLBACK}
)
_READING_WORDS: Final = frozenset(
    {"DESCRIBE", "DESC", "SUMMARIZE", "PRAGMA", "FETCH", "MOVE", "CLOSE", "DEALLOCATE", "DISCARD"}
    | {"LISTEN", "UNLISTEN"}
)


def may_change(tokens: list[Token]) -> bool:
    """Say whether running a statement may change tables, the schema or files.

    An EXPLAIN does only with ANALYZE, and a DECLARE where its query does. Settings and sequences
    don't count: no transaction takes them back.
    """
    if not tokens or tokens[0].upper in _READING_WORDS:
        return False
    try:
        options = explain_options(tokens)
    except SqlSyntaxError:
        return True  # It is going to be refused.
    if options is not None:
        return options.analyze and may_change(tokens[options.start :])
    if tokens[0].upper == "DECLARE":
        return may_change(_declared(tokens))
    kind = classify(tokens)
    if kind is StatementKind.QUERY:
        return query_writes(tokens)
    return kind not in _READS


def query_writes(tokens: list[Token]) -> bool:
    """Say whether a SELECT changes tables: by an INTO, or by a WITH whose query writes."""
    depth = 0
    for index, token in enumerate(tokens):
        depth += depth_change(token)
        names = index > 0 and tokens[index - 1].upper in ("AS", ".")
        if depth == 0 and token.upper == "INTO" and token.kind is TokenKind.WORD and not names:
            return True
    return with_writes(tokens)


def with_writes(tokens: list[Token]) -> bool:
    """Say whether a query of a WITH writes, in whatever statement it stands."""
    return next(writing_bodies(tokens), None) is not None


def writing_bodies(tokens: list[Token]) -> Iterator[tuple[Range, int]]:
    """Find the queries of a WITH that write: their tokens, and the verb of each."""
    for index in range(1, len(tokens)):
        if tokens[index - 1].text != "(" or tokens[index].kind is not TokenKind.WORD:
            continue
        verb = index
        if tokens[index].upper == "WITH":
            last = closing_index(tokens, index - 1)
            verb += main_verb(tokens[index:last])
        if verb < len(tokens) and _changes(tokens, index - 1, verb):
            yield (index, closing_index(tokens, index - 1)), verb


def _changes(tokens: list[Token], opening: int, verb: int) -> bool:
    """Say whether a word is the verb of a query that writes, not the name of a column."""
    if tokens[verb].upper not in _CHANGES or verb + 1 >= len(tokens):
        return False
    following = tokens[verb + 1]
    if following.text == "(":  # COPY (SELECT ...), or a function of that name
        return opening > 0 and tokens[opening - 1].upper in ("AS", "MATERIALIZED")
    return following.kind is not TokenKind.OPERATOR


def _declared(tokens: list[Token]) -> list[Token]:
    """Return the query of a DECLARE CURSOR."""
    starts = (at for at, token in enumerate(tokens) if token.upper == "FOR")
    return tokens[next(starts, len(tokens)) + 1 :]
