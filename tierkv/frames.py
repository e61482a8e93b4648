"""Results as data frames: pandas, Arrow and polars, each only if installed.

``db.sql(...)`` returns a QueryResult; cursors convert the rows not fetched yet. Columns keep
DuckDB's types if the library has them. A value that the library can't hold is an error that names
its column, never another value. Equal names get a number, as in DuckDB's own frames.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

from tierkv.dbapi_errors import translate_error
from tierkv.dbfront.statement_results import Column, Notice
from tierkv.kvcore.errors import ConfigError, SqlError
from tierkv.output import OutputFormat, render_rows, unique_names

SHOWN_ROWS: Final = 20

_INTEGERS: Final = {
    "TINYINT": "int8",
    "SMALLINT": "int16",
    "INTEGER": "int32",
    "BIGINT": "int64",
    "UTINYINT": "uint8",
    "USMALLINT": "uint16",
    "UINTEGER": "uint32",
    "UBIGINT": "uint64",
}
_FLOATS: Final = {"FLOAT": "float32", "DOUBLE": "float64"}
_DECIMAL: Final = re.compile(r"DECIMAL\((\d+),\s*(\d+)\)")
_DECIMAL_DIGITS: Final = 38
_LIST: Final = re.compile(r"(.+)\[\d*\]")


@dataclass(frozen=True, slots=True)
class QueryResult:
    """The result of a statement: rows, columns, tag and notices.

    Attributes:
        columns: names and DuckDB's types; empty for a statement without rows.
        rows: all rows.
        command_tag: PostgreSQL's tag, for example ``SELECT 3``.
        notices: warnings and notices.
    """

    columns: tuple[Column, ...]
    rows: Sequence[tuple[Any, ...]]
    command_tag: str = ""
    notices: tuple[Notice, ...] = ()

    def fetchall(self) -> list[tuple[Any, ...]]:
        """Return all rows."""
        return list(self.rows)

    def df(self) -> Any:
        """Return a pandas.DataFrame.

        Raises:
            Error: pandas is not installed.
        """
        pandas = _library("pandas", "df()")
        series = {}
        for number, (column, values) in enumerate(self._by_column()):
            with _naming(column, "pandas"):
                kind = _pandas_type(column.type_name, values)
                series[number] = pandas.Series(values, dtype=kind)
        frame = pandas.DataFrame(series)
        frame.columns = self._names()
        return frame

    def arrow(self) -> Any:
        """Return a pyarrow.Table.

        Raises:
            Error: pyarrow is not installed.
        """
        pyarrow = _library("pyarrow", "arrow()")
        arrays = []
        for column, values in self._by_column():
            with _naming(column, "Arrow"):
                digits = _digits(values) if "HUGEINT" in column.type_name else 0
                kind = _arrow_type(pyarrow, column.type_name, digits=digits)
                arrays.append(pyarrow.array(values, type=kind))
        return pyarrow.Table.from_arrays(arrays, names=self._names())

    def pl(self) -> Any:
        """Return a polars.DataFrame.

        Raises:
            Error: polars is not installed.
        """
        polars = _library("polars", "pl()")
        series = []
        for name, (column, values) in zip(self._names(), self._by_column(), strict=True):
            with _naming(column, "polars", polars.exceptions.PolarsError):
                kind = _polars_type(polars, column.type_name)
                made = polars.Series(name, values, dtype=kind, strict=False)
                if made.null_count() != values.count(None):
                    raise ValueError("a value became NULL")
                series.append(made)
        return polars.DataFrame(series)

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        if not self.columns:
            return self.command_tag
        shown = render_rows(self.columns, self.rows[:SHOWN_ROWS], OutputFormat.TABLE).splitlines()
        of = f", the first {SHOWN_ROWS} shown" if len(self.rows) > SHOWN_ROWS else ""
        rows = "row" if len(self.rows) == 1 else "rows"
        return "\n".join([*shown[:-1], f"({len(self.rows)} {rows}{of})"])

    def _names(self) -> list[str]:
        """Return the names of the columns, made unique."""
        return unique_names([column.name for column in self.columns])

    def _by_column(self) -> Iterator[tuple[Column, list[Any]]]:
        for position, column in enumerate(self.columns):
            yield column, [_plain(row[position]) for row in self.rows]


def _library(name: str, wanted_by: str) -> Any:
    try:
        return importlib.import_module(name)  # optional, and takes a second to import
    except ImportError:
        missing = ConfigError(
            f"{wanted_by} needs {name}, which is not installed", hint=f"Run `pip install {name}`."
        )
        raise translate_error(missing) from None


@contextmanager
def _naming(
    column: Column, library: str, own_error: type[Exception] = ValueError
) -> Iterator[None]:
    """Name the column in errors of a conversion; pyarrow's are ValueErrors and TypeErrors.

    Raises:
        Error: 22003, the library can't hold a value.
    """
    try:
        yield
    except (ValueError, TypeError, OverflowError, own_error) as error:
        raise translate_error(
            SqlError(
                f'{library} can\'t hold a value of column "{column.name}" ({column.type_name}): '
                f"{error}",
                sqlstate="22003",
                hint="Cast the column to VARCHAR in the statement.",
            )
        ) from None


def _digits(value: Any) -> int:
    """Return the digits of the longest integer in a value, also in lists."""
    if isinstance(value, list | tuple):
        return max(map(_digits, value), default=0)
    return len(str(abs(value))) if isinstance(value, int) else 0


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, UUID) else value


def _pandas_type(kind: str, values: Sequence[Any]) -> str | None:
    """Return a dtype as in DuckDB's own frames; None: pandas infers the dtype."""
    has_null = None in values
    if kind in _INTEGERS:
        return "float64" if has_null else _INTEGERS[kind]
    if kind == "BOOLEAN":
        return "object" if has_null else "bool"
    if kind in ("DATE", "TIMESTAMP"):
        return "datetime64[us]"
    return _FLOATS.get(kind) or (None if values else "object")


def _arrow_type(pyarrow: Any, kind: str, *, digits: int) -> Any:
    """Return a pyarrow type; None: pyarrow infers the type from the values.

    Args:
        pyarrow: the library.
        kind: DuckDB's type.
        digits: of the longest integer. Arrow's usual decimal holds 38 digits, a HUGEINT up to 39.
    """
    if listed := _LIST.fullmatch(kind):
        inner = _arrow_type(pyarrow, listed[1], digits=digits)
        return None if inner is None else pyarrow.list_(inner)
    if sized := _DECIMAL.fullmatch(kind):
        return pyarrow.decimal128(int(sized[1]), int(sized[2]))
    if name := _INTEGERS.get(kind) or _FLOATS.get(kind):
        return getattr(pyarrow, name)()
    others = {
        "BOOLEAN": pyarrow.bool_(),
        "VARCHAR": pyarrow.string(),
        "UUID": pyarrow.string(),
        "JSON": pyarrow.string(),
        "BLOB": pyarrow.binary(),
        "DATE": pyarrow.date32(),
        "TIME": pyarrow.time64("us"),
        "TIMESTAMP": pyarrow.timestamp("us"),
        "TIMESTAMP WITH TIME ZONE": pyarrow.timestamp("us", tz="UTC"),
        "INTERVAL": pyarrow.duration("us"),
    }
    if kind in ("HUGEINT", "UHUGEINT"):
        wide = digits > _DECIMAL_DIGITS
        return pyarrow.decimal256(digits, 0) if wide else pyarrow.decimal128(_DECIMAL_DIGITS, 0)
    return others.get(kind)


def _polars_name(name: str) -> str:
    """Spell ``uint8`` as ``UInt8``, ``float64`` as ``Float64``."""
    return f"U{name[1:].capitalize()}" if name.startswith("u") else name.capitalize()


def _polars_type(polars: Any, kind: str) -> Any:
    """Return a polars type; None: polars infers the type from the values."""
    if listed := _LIST.fullmatch(kind):
        inner = _polars_type(polars, listed[1])
        return None if inner is None else polars.List(inner)
    if sized := _DECIMAL.fullmatch(kind):
        return polars.Decimal(int(sized[1]), int(sized[2]))
    if name := _INTEGERS.get(kind) or _FLOATS.get(kind):
        return getattr(polars, _polars_name(name))
    others = {
        "BOOLEAN": polars.Boolean,
        "VARCHAR": polars.String,
        "UUID": polars.String,
        "JSON": polars.String,
        "BLOB": polars.Binary,
        "DATE": polars.Date,
        "TIME": polars.Time,
        "TIMESTAMP": polars.Datetime("us"),
        "TIMESTAMP WITH TIME ZONE": polars.Datetime("us", "UTC"),
        "INTERVAL": polars.Duration("us"),
        "HUGEINT": polars.Int128,
        "UHUGEINT": getattr(polars, "UInt128", None),  # not in old versions
    }
    return others.get(kind)
