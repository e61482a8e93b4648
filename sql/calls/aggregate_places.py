"""Refusal of misplaced AI aggregates at plan time, in the same way for both engines.

An engine would also refuse misplaced aggregates, but with a message about the rewritten text, and
without a hint. Only definite errors are refused here: the WHERE of a subquery may hold an aggregate
over the rows of the outer query, so this case is left to the engine.
"""

from __future__ import annotations

from typing import Final

from sqlglot import exp

from tierkv.kvcore.errors import SqlError
from tierkv.sql.calls.calls import FoundCall
from tierkv.sql.calls.placement import Placement, site_number
from tierkv.sql.text.lexer import Token

_SQLSTATE: Final = "42803"
_STATEMENTS: Final = (exp.Select, exp.Update, exp.Delete)
_REFUSED: Final = {"where": "WHERE", "group": "GROUP BY", "joins": "JOIN conditions"}
_IN_A_SUBQUERY: Final = "Compute the aggregate in a subquery."


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
            _check(node, aggregates, tokens[calls[number].first].start + 1)


def _check(node: exp.Expr, aggregates: set[int], position: int) -> None:
    while node.parent is not None and not isinstance(node.parent, _STATEMENTS):
        node = node.parent
        if isinstance(node, exp.AggFunc) or site_number(node) in aggregates:
            raise SqlError(
                "aggregate function calls cannot be nested",
                sqlstate=_SQLSTATE,
                position=position,
                hint="Compute the inner aggregate in a subquery.",
            )
    statement = node.parent
    if statement is None or statement.find_ancestor(*_STATEMENTS) is not None:
        return
    clause = _REFUSED.get((node.arg_key or "").strip("_"))
    if isinstance(statement, exp.Update):
        clause = "UPDATE"
    if clause is not None:
        raise SqlError(
            f"aggregate functions are not allowed in {clause}",
            sqlstate=_SQLSTATE,
            position=position,
            hint=f"Put the condition into HAVING. {_IN_A_SUBQUERY}"
            if clause == "WHERE"
            else _IN_A_SUBQUERY,
        )
