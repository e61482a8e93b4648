"""Statements that can't hold AI calls, and misplaced AI aggregates: refused at plan time.

Called by sql/plan/plan.py before anything runs, in the same way for both engines. An engine would
also refuse misplaced aggregates, but with a message about the rewritten text, and without a hint.
Only definite errors are refused here: the WHERE of a subquery may hold an aggregate over the rows
of the outer query, so this case is left to the engine.
"""

from __future__ import annotations

from typing import Final

from sqlglot import exp

from tierkv.kvcore.errors import FeatureNotSupportedError, SqlError
from tierkv.sql.calls.calls import FoundCall
from tierkv.sql.calls.dialect import Dialect
from tierkv.sql.calls.placement import Placement, site_number
from tierkv.sql.plan.changes import writing_bodies
from tierkv.sql.text.clauses import begins_clause
from tierkv.sql.text.lexer import Token, TokenKind, name_value
from tierkv.sql.text.statement import StatementKind, command_name

_MAY_HOLD_CALLS: Final = frozenset(
    {
        StatementKind.QUERY,
        StatementKind.INSERT,
        StatementKind.UPDATE,
        StatementKind.DELETE,
        StatementKind.CREATE_TABLE_AS,
        StatementKind.COPY,
    }
)
_VOLATILE: Final = frozenset(
    {
        "random",
        "gen_random_uuid",
        "uuid",
        "uuidv4",
        "uuidv7",
        "nextval",
        "setseed",
        "clock_timestamp",
        "statement_timestamp",
        "timeofday",
    }
)
_SESSION_LOCKS: Final = frozenset(
    f"pg_{what}{shared}"
    for what in ("advisory_lock", "try_advisory_lock", "advisory_unlock")
    for shared in ("", "_shared")
) | {"pg_advisory_unlock_all"}
_SQLSTATE: Final = "42803"
_SCOPES: Final = (exp.Select, exp.Update, exp.Delete)
_NO_AGGREGATE: Final = {"where": "WHERE", "group": "GROUP BY", "joins": "JOIN conditions"}
_IN_A_SUBQUERY: Final = "Compute the aggregate in a subquery."


def refuse_statement(
    tokens: list[Token], kind: StatementKind, dialect: Dialect, *, position: int
) -> None:
    """Refuse AI calls in a statement that can't hold any, or that must not run more than once.

    Args:
        tokens: tokens of the statement.
        kind: kind of the statement.
        dialect: the target engine.
        position: place of the first AI call in the text, counted from 1.

    Raises:
        FeatureNotSupportedError: the statement can't hold AI calls.
    """
    # PostgreSQL runs a MERGE under a savepoint; DuckDB has no savepoints, and no SELECT meets the
    # calls of a MERGE.
    merges = kind is StatementKind.MERGE and dialect is Dialect.POSTGRES
    if kind not in _MAY_HOLD_CALLS and not merges:
        raise FeatureNotSupportedError(
            f"{command_name(tokens)} can't contain AI calls",
            position=position,
            hint="Put the AI call in a SELECT, INSERT, UPDATE, DELETE or CREATE TABLE AS, "
            "and use the resulting table here.",
        )
    for index, token in enumerate(tokens):
        _refuse_volatile(tokens, index, token)
    for _, verb in writing_bodies(tokens) if dialect is Dialect.DUCKDB else ():
        if tokens[verb].upper == "COPY":
            raise FeatureNotSupportedError(
                "COPY in a WITH can't be used in a statement with AI calls, which is run more "
                "than once: files are not rolled back",
                position=tokens[verb].start + 1,
                hint="Run the COPY by itself.",
            )


def _refuse_volatile(tokens: list[Token], index: int, token: Token) -> None:
    following = tokens[index + 1].text if index + 1 < len(tokens) else ""
    is_call = token.kind in (TokenKind.WORD, TokenKind.QUOTED) and following == "("
    name = name_value(token)
    if is_call and name in _SESSION_LOCKS:
        raise FeatureNotSupportedError(
            f"{name}() can't be used in a statement with AI calls, which is run more than once: "
            "each run would take or release a lock of the session",
            position=token.start + 1,
            hint="Use pg_advisory_xact_lock() or pg_try_advisory_xact_lock(), which the "
            "transaction releases at its end, or a separate statement.",
        )
    volatile = is_call and name in _VOLATILE
    sampled = (token.upper == "TABLESAMPLE" and begins_clause(tokens, index)) or (
        token.upper == "SAMPLE" and index and tokens[index - 1].upper == "USING"
    )
    if not volatile and not sampled:
        return
    what = f"{name}()" if volatile else "sampling"
    raise FeatureNotSupportedError(
        f"{what} can't be used in a statement with AI calls, which is run more than once",
        position=token.start + 1,
        hint="Store the rows first (CREATE TEMP TABLE t AS SELECT ...), then make the AI calls "
        "over t.",
    )


def refuse_misplaced(tokens: list[Token], calls: list[FoundCall], placement: Placement) -> None:
    """Refuse aggregates inside aggregates, and in clauses evaluated before grouping.

    Raises:
        SqlError: 42803, with the position of the call.
    """
    aggregates = {number for number, call in enumerate(calls) if call.gathering is not None}
    if not aggregates or placement.tree is None:
        return
    for node in placement.tree.find_all(exp.Anonymous):
        number = site_number(node)
        if number in aggregates and not isinstance(node.parent, exp.Window):
            _refuse_aggregate(node, aggregates, tokens[calls[number].first].start + 1)


def _refuse_aggregate(node: exp.Expr, aggregates: set[int], position: int) -> None:
    while node.parent is not None and not isinstance(node.parent, _SCOPES):
        node = node.parent
        if isinstance(node, exp.AggFunc) or site_number(node) in aggregates:
            raise SqlError(
                "aggregate function calls cannot be nested",
                sqlstate=_SQLSTATE,
                position=position,
                hint="Compute the inner aggregate in a subquery.",
            )
    statement = node.parent
    if statement is None or statement.find_ancestor(*_SCOPES) is not None:
        return
    clause = _NO_AGGREGATE.get((node.arg_key or "").strip("_"))
    if isinstance(statement, exp.Update):
        clause = "UPDATE"
    if clause is not None:
        raise SqlError(
            f"aggregate functions are not allowed in {clause}",
            sqlstate=_SQLSTATE,
            position=position,
            hint="Put the condition into HAVING, or compute the aggregate in a subquery."
            if clause == "WHERE"
            else _IN_A_SUBQUERY,
        )
