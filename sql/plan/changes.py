"""Whether a statement may change anything: the single shared check, read from its tokens.

Collecting, transactions, savepoints, cursors, streams and plans depend on this check: a read-only
query may run again, or in parallel with the statement. DuckDB 2.0 and PostgreSQL let the queries of
a WITH change tables, and the first keyword of a statement is not enough. In doubt the result is
True.
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
    """Return whether running a statement may change tables, the schema or files.

    An EXPLAIN changes data only with ANALYZE, and a DECLARE only if its query does. Settings and
    sequences don't count: no transaction rolls them back.
    """
    if not tokens or tokens[0].upper in _READING_WORDS:
        return False
    try:
        options = explain_options(tokens)
    except SqlSyntaxError:
        return True  # The statement will be refused.
    if options is not None:
        return options.analyze and may_change(tokens[options.start :])
    if tokens[0].upper == "DECLARE":
        return may_change(_declared(tokens))
    kind = classify(tokens)
    if kind is StatementKind.QUERY:
        return query_writes(tokens)
    return kind not in _READS


def query_writes(tokens: list[Token]) -> bool:
    """Return whether a SELECT changes tables: by an INTO, or by a WITH whose query writes."""
    depth = 0
    for index, token in enumerate(tokens):
        depth += depth_change(token)
        names = index > 0 and tokens[index - 1].upper in ("AS", ".")
        if depth == 0 and token.upper == "INTO" and token.kind is TokenKind.WORD and not names:
            return True
    return with_writes(tokens)


def with_writes(tokens: list[Token]) -> bool:
    """Return whether a query of a WITH writes, in any kind of statement."""
    return next(writing_bodies(tokens), None) is not None


def writing_bodies(tokens: list[Token]) -> Iterator[tuple[Range, int]]:
    """Yield the writing queries of a WITH: the token range and the verb of each."""
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
    """Return whether a word is the verb of a writing query, not the name of a column."""
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
