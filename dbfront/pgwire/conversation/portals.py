"""Prepared statements and portals of one connection, and the types of their parameters.

extended_query.py owns the objects; nothing here does I/O. A parameter of a declared type is cast in
the SQL text, so describing and running a statement agree on the types.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Final

from tierkv.dbfront.copying.statement import CopyStatement
from tierkv.dbfront.pgwire.protocol.messages import Bind
from tierkv.dbfront.postgres_values.parameters import decode_parameter, is_text
from tierkv.dbfront.postgres_values.sql_tokens import (
    long_casts,
    parameter_count,
    position_without,
    replace_parameters,
    selected_parameters,
)
from tierkv.dbfront.postgres_values.types import TEXT, PgType, by_oid, pg_type
from tierkv.dbfront.statement_results import RowStream, StatementDescription, StatementResult
from tierkv.kvcore.errors import FeatureNotSupportedError, SqlError, UserError
from tierkv.sql.plan.plan import SqlStatement

_MAX_DECIMAL_DIGITS: Final = 38
_UNDECLARED: Final = (0, 705)
_KEPT_CASTS: Final = 2
"""The described text and the last run's text: a decimal's width may differ between runs."""


@dataclass(slots=True)
class PreparedStatement:
    """A parsed statement.

    Attributes:
        sql: one statement, or empty; ``cast_sql`` returns the text that is described and run.
        declared: OIDs as in Parse; missing and 0 mean not declared.
        parameters: number of ``$n`` parameters.
        copy: set for a COPY through the client.
        description: set at the first Describe or Bind that needs a description.
        long_casts: types of parameters that the text casts to arrays, or to a type with a zone.
        inferred: types of parameters (from 1), inferred from their places.
    """

    sql: SqlStatement
    declared: tuple[int, ...] = ()
    parameters: int = 0
    copy: CopyStatement | None = None
    description: StatementDescription | None = None
    long_casts: dict[int, str] = field(default_factory=dict)
    inferred: dict[int, PgType] = field(default_factory=dict)
    _cast: deque[tuple[dict[int, str], SqlStatement]] = field(
        default_factory=lambda: deque(maxlen=_KEPT_CASTS)
    )

    def cast_sql(self, casts: dict[int, str]) -> SqlStatement:
        """Return the SQL with its parameters cast; recent results are cached by ``casts``."""
        for known, sql in self._cast:
            if known == casts:
                return sql
        sql = SqlStatement.of(replace_parameters(self.sql, casts))
        self._cast.append((casts, sql))
        return sql

    def untyped(self) -> bool:
        """Return True if a parameter has neither a declared type nor a long cast."""
        return any(
            self.declared_type(at) is None and at + 1 not in self.long_casts
            for at in range(self.parameters)
        )

    def cast_type(self, at: int) -> PgType | None:
        """Return the cast type of parameter ``at``: declared or inferred; None for no cast."""
        kind = self.declared_type(at)
        if kind is None:
            kind = self.inferred.get(at + 1)
        return None if kind is None or is_text(kind) else kind

    def declared_type(self, at: int) -> PgType | None:
        """Return the declared type of parameter ``at`` (from 0), or None."""
        oid = self.declared[at] if at < len(self.declared) else 0
        if oid in _UNDECLARED:
            return None
        return by_oid(oid) or TEXT

    def described_casts(self) -> dict[int, str]:
        """Return the casts for describing the SQL: parameters get their later types."""
        casts = {}
        for at in range(self.parameters):
            kind = self.cast_type(at)
            if kind is not None:
                decimal = _decimal_cast(None, array=kind.element is not None)
                casts[at + 1] = kind.duckdb or decimal
        return self.with_text(casts)

    def with_text(self, casts: dict[int, str]) -> dict[int, str]:
        """Add casts to text of untyped parameters that are columns, for all DuckDB versions."""
        return {**dict.fromkeys(selected_parameters(self.sql), "VARCHAR"), **casts}

    def parameter_type(self, at: int) -> PgType:
        """Return the declared type, else the inferred type, else text."""
        declared = self.declared_type(at)
        if declared is not None:
            return declared
        if at + 1 in self.long_casts:
            return pg_type(self.long_casts[at + 1])
        if at + 1 in self.inferred:
            return self.inferred[at + 1]
        inferred = self.description.parameter_types if self.description else ()
        return pg_type(inferred[at]) if at < len(inferred) else TEXT

    def parameter_oids(self) -> list[int]:
        """Return the OIDs for ParameterDescription; a declared OID is returned unchanged."""
        oids = []
        for at in range(self.parameters):
            declared = self.declared[at] if at < len(self.declared) else 0
            oids.append(self.parameter_type(at).oid if declared in _UNDECLARED else declared)
        return oids

    def needs_description(self) -> bool:
        """Return True if Bind needs inferred parameter types."""
        return self.description is None and any(
            self.declared_type(at) is None for at in range(self.parameters)
        )


@contextmanager
def placing_errors(sql: str, casts: dict[int, str]) -> Iterator[None]:
    """Map error positions in ``replace_parameters(sql, casts)`` to positions in ``sql``."""
    try:
        yield
    except UserError as error:
        if error.position:
            error.position = position_without(sql, casts, error.position)
        raise


def prepare(
    sql: SqlStatement, declared: tuple[int, ...], copy: CopyStatement | None
) -> PreparedStatement:
    """Create a prepared statement from one SQL statement."""
    count = max(parameter_count(sql), len(declared)) if sql else 0
    casts = long_casts(sql) if count else {}
    return PreparedStatement(sql, declared, count, copy, long_casts=casts)


@dataclass(slots=True)
class Portal:
    """A bound statement, and its result after the first Execute.

    Attributes:
        statement: the prepared statement.
        casts: casts of the parameters, in the SQL that is run.
        values: the parameters.
        result_formats: as in Bind.
        result: set by the first Execute.
        stream: set by the first Execute of a statement with rows before its end.
        waiting: rows taken from the stream and not sent.
        sent: number of rows of ``result`` sent.
    """

    statement: PreparedStatement
    casts: dict[int, str]
    values: tuple[Any, ...] = ()
    result_formats: tuple[int, ...] = ()
    result: StatementResult | None = None
    stream: RowStream | None = None
    waiting: deque[tuple[Any, ...]] = field(default_factory=deque)
    sent: int = 0
    described: StatementDescription | None = field(default=None)

    async def close(self) -> None:
        """Stop the statement if the statement still runs."""
        if self.stream is not None:
            await self.stream.close()

    async def take(self, most: int) -> list[tuple[Any, ...]]:
        """Take up to ``most`` rows of the stream as soon as rows are ready; no rows at its end."""
        assert self.stream is not None, "it is a stream"
        if not self.waiting:
            self.waiting.extend(await self.stream.next_rows())
        return [self.waiting.popleft() for _ in range(min(most, len(self.waiting)))]


def bind(statement: PreparedStatement, message: Bind) -> Portal:
    """Decode parameters and create a portal.

    Raises:
        SqlError: wrong number of parameters (08P01) or a value that does not fit its type.
        FeatureNotSupportedError: a binary value of an unknown type.
    """
    given = len(message.parameters)
    if given != statement.parameters:
        raise SqlError(
            f"bind message supplies {given} parameters, but prepared statement "
            f'"{message.statement}" requires {statement.parameters}',
            sqlstate="08P01",
        )
    codes = message.parameter_formats
    values: list[Any] = []
    for at, data in enumerate(message.parameters):
        code = codes[at] if len(codes) > 1 else (codes[0] if codes else 0)
        values.append(None if data is None else _value(statement, at, data, code))
    return Portal(statement, _casts(statement, values), tuple(values), message.result_formats)


def _value(statement: PreparedStatement, at: int, data: bytes, code: int) -> Any:
    declared = statement.declared[at] if at < len(statement.declared) else 0
    if code and declared not in _UNDECLARED and by_oid(declared) is None:
        raise FeatureNotSupportedError(
            f"binary parameter ${at + 1} has unknown type OID {declared}",
            hint="Send it as text.",
        )
    return decode_parameter(data, statement.parameter_type(at), code)


def _casts(statement: PreparedStatement, values: Sequence[Any]) -> dict[int, str]:
    casts = {}
    for at, value in enumerate(values):
        kind = statement.cast_type(at)
        if kind is None:
            continue
        cast = kind.duckdb or _decimal_cast(value, array=kind.element is not None)
        if cast:
            casts[at + 1] = cast
    return casts


def _decimal_cast(value: Any, *, array: bool) -> str:
    """Return the narrowest DECIMAL for the value, or for all values of an array, else DOUBLE."""
    if value is None:
        return "DECIMAL(18,3)[]" if array else "DECIMAL(18,3)"
    if array:
        numbers = [item for item in value if item is not None]
        return f"{_narrowest(numbers)}[]" if _are_decimals(numbers) else ""
    return _narrowest([value]) if isinstance(value, Decimal) else ""


def _are_decimals(items: Sequence[Any]) -> bool:
    return all(isinstance(item, Decimal) for item in items)


def _narrowest(numbers: Sequence[Decimal]) -> str:
    whole = scale = 0
    for number in numbers:
        _, digits, exponent = number.as_tuple()
        if not isinstance(exponent, int):  # infinity or NaN
            return "DOUBLE"
        scale = max(scale, -exponent)
        whole = max(whole, len(digits) + exponent)
    precision = max(whole + scale, 1)
    return f"DECIMAL({precision},{scale})" if precision <= _MAX_DECIMAL_DIGITS else "DOUBLE"
