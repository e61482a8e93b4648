"""Does a statement change anything? The one answer for everybody who asks.

Transactions, savepoints, statistics and retries must agree on it, or a change is lost or made
twice. The answer errs on the side of yes: a statement that is not known to only read may change
something.
"""

from __future__ import annotations

from typing import Final

from sql.explain_options import explain_options
from sql.lexer import Token
from sql.statement import StatementKind, classify, query_writes

_ONLY_READS: Final = frozenset(
    {StatementKind.SHOW, StatementKind.SET, StatementKind.RESET, StatementKind.SAVEPOINT}
    | {StatementKind.BEGIN, StatementKind.COMMIT, StatementKind.ROLLBACK}
)
_SHOWS: Final = frozenset({"DESCRIBE", "DESC", "SUMMARIZE", "PRAGMA"})


def may_change(tokens: list[Token]) -> bool:
    """Say whether running a statement may change tables, the schema or files.

    A WITH or INTO makes a SELECT a change; EXPLAIN changes what its statement does, but only with
    ANALYZE.
    """
    explain = explain_options(tokens)
    if explain is not None:
        return explain.analyze and may_change(tokens[explain.start :])
    kind = classify(tokens)
    if kind is StatementKind.QUERY:
        return query_writes(tokens)
    shows = bool(tokens) and tokens[0].upper in _SHOWS
    return kind not in _ONLY_READS and not shows
