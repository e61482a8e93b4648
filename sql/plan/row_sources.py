"""AI calls in FROM: one row for each row of the preceding relations.

PostgreSQL accepts any function in FROM, DuckDB only table functions; for DuckDB the call becomes a
subquery. Without an alias the relation and its column are named after the function.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlglot import exp

from tierkv.sql.calls.calls import FoundCall
from tierkv.sql.calls.dialect import Dialect
from tierkv.sql.calls.functions import Returns
from tierkv.sql.calls.placement import Placement, site_number
from tierkv.sql.text.lexer import Token

Around = tuple[str, str]


@dataclass(frozen=True, slots=True)
class _Source:
    """An AI call as a relation in FROM.

    Attributes:
        function: name of the function.
        alias: alias of the relation; empty without one.
        bare: no further part of the relation follows, so a name may be written after the call.
    """

    function: str
    alias: str
    bare: bool


def row_sources(
    tokens: Sequence[Token], calls: Sequence[FoundCall], placement: Placement, dialect: Dialect
) -> dict[int, Around]:
    """Return the text to write around calls in FROM, by their first token."""
    if placement.tree is None:
        return {}
    found: dict[int, Around] = {}
    for node in placement.tree.find_all(exp.Anonymous):
        number = site_number(node)
        if number is None or not isinstance(node.parent, exp.Table | exp.Lateral):
            continue
        call = calls[number]
        source = _source(tokens, call, node.parent)
        found[call.first] = _around(source, call.function.returns, dialect)
    return found


def _source(tokens: Sequence[Token], call: FoundCall, relation: exp.Expr) -> _Source:
    following = tokens[call.last].upper if call.last < len(tokens) else ""
    alias = relation.args.get("alias")
    name = alias.this if isinstance(alias, exp.TableAlias) else None
    text = name.name if isinstance(name, exp.Identifier) else ""
    return _Source(call.function.name, text, bare=not text and following != "WITH")


def _around(source: _Source, returns: Returns, dialect: Dialect) -> Around:
    behind = f" AS {source.function}" if source.bare else ""
    if dialect is Dialect.POSTGRES:
        return "", behind
    if returns is Returns.RESULT:
        return "(SELECT UNNEST(", f")){behind}"
    column = (source.alias or source.function).replace('"', '""')
    return "(SELECT ", f' AS "{column}"){behind}'
