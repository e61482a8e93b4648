"""Results of SQL statements, as the front's doors and sessions exchange them.

A statement returns a StatementResult, or a RowStream whose rows arrive while the statement runs.
``StatementDescription`` tells the shape of a result before. All values are frozen. This module
imports no other package, and loads no heavy library.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Column:
    """A result column.

    Attributes:
        type_name: DuckDB type, for example ``INTEGER`` or ``DECIMAL(18,3)``.
        table_oid: OID of the column's table, as in pg_class; 0 for an expression.
        attnum: the column's number in that table, as in pg_attribute; 0 for an expression.
    """

    name: str
    type_name: str
    table_oid: int = 0
    attnum: int = 0


@dataclass(frozen=True, slots=True)
class Notice:
    """A message in addition to the result; ``severity`` is NOTICE or WARNING."""

    severity: str
    message: str
    sqlstate: str = "00000"
    detail: str = ""
    hint: str = ""


@dataclass(frozen=True, slots=True)
class StatementResult:
    """The result of a statement.

    Attributes:
        command_tag: PostgreSQL's command tag, for example ``SELECT 3``, ``INSERT 0 3``, ``CREATE
            TABLE``.
        columns: None for a statement without a result set.
        rows: all rows, as Python values; empty without a result set.
        notices: warnings and notices, in order.
    """

    command_tag: str
    columns: tuple[Column, ...] | None = None
    rows: Sequence[tuple[Any, ...]] = ()
    notices: tuple[Notice, ...] = ()


class RowStream(Protocol):
    """Rows of a running statement.

    1. ``columns`` are known from the start.
    2. ``next_rows`` waits for the next rows. An empty answer is the end; ``result`` then has the
       tag and the notices, without rows. ``next_rows`` raises the error of a failed statement.
    3. Back-pressure: the statement produces no further rows until the reader has taken the pending
       rows.
    4. ``close`` stops the statement in any state.
    """

    @property
    def columns(self) -> tuple[Column, ...]: ...

    @property
    def result(self) -> StatementResult | None: ...

    async def next_rows(self) -> Sequence[tuple[Any, ...]]: ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class StatementDescription:
    """Shape of a statement, determined without running the statement or any model.

    Attributes:
        columns: None for a statement without a result set.
        parameter_types: DuckDB type per ``$n``; ``VARCHAR`` where unknown.
    """

    columns: tuple[Column, ...] | None
    parameter_types: tuple[str, ...] = ()
