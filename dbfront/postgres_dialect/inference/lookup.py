"""Infers a statement's open parameter types, with the columns of its tables looked up.

extended_query.py asks before it describes a statement. A statement that sqlglot reads is walked as
a tree; another one is looked at token by token, which finds the plain cases only.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence

from tierkv.dbfront.postgres_dialect.inference import by_tokens
from tierkv.dbfront.postgres_dialect.inference.scope import TableColumns, tables_sql
from tierkv.dbfront.postgres_dialect.inference.statements import parameter_types, parsed
from tierkv.dbfront.postgres_values.types import PgType, by_name, pg_type

Rows = Callable[[str], Awaitable[Iterable[Sequence[object]]]]
"""Runs a query of our own."""


async def infer_types(sql: str, rows: Rows) -> dict[int, PgType]:
    """Return the types of parameters, by number; of those that can be told."""
    tree = parsed(sql)
    if tree is None:
        return await _by_tokens(sql, rows)
    tables = TableColumns()
    if query := tables_sql(tree):
        tables.add(await rows(query))
    found = {number: by_name(name) for number, name in parameter_types(tree, tables).items()}
    return {number: kind for number, kind in found.items() if kind is not None}


async def _by_tokens(sql: str, rows: Rows) -> dict[int, PgType]:
    uses = by_tokens.parameter_uses(sql)
    found: Iterable[Sequence[object]] = ()
    if uses.tables and (uses.columns or uses.positions):
        found = await rows(by_tokens.lookup_sql(uses))
    kinds = by_tokens.inferred_types(uses, found)
    return {number: pg_type(name) for number, name in kinds.items()}
