"""Results as data frames: pandas, Arrow and polars, each only if installed.

``db.sql(...)`` returns a QueryResult; cursors convert the rows not fetched yet. Columns keep
DuckDB's types if the library has them. Equal names get a number, as in DuckDB's own frames.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

from tierkv.dbapi_errors import translate_error
from tierkv.dbfront.contracts import Column, Notice
from tierkv.kvcore.errors import ConfigError
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
        series = {
            number: pandas.Series(values, dtype=_pandas_type(column.type_name, values))
            for number, (column, values) in enumerate(self._by_column())
        }
        frame = pandas.DataFrame(series)
        frame.columns = self._names()
        return frame

    def arrow(self) -> Any:
        """Return a pyarrow.Table.

        Raises:
            Error: pyarrow is not installed.
        """
        pyarrow = _library("pyarrow", "arrow()")
        arrays = [
            pyarrow.array(values, type=_arrow_type(pyarrow, column.type_name))
            for column, values in self._by_column()
        ]
        return pyarrow.Table.from_arrays(arrays, names=self._names())

    def pl(self) -> Any:
        """Return a polars.DataFrame.

        Raises:
            Error: polars is not installed.
        """
        polars = _library("polars", "pl()")
        return polars.DataFrame(
            [
                polars.Series(
                    name, values, dtype=_polars_type(polars, column.type_name), strict=False
                )
                for name, (column, values) in zip(self._names(), self._by_column(), strict=True)
            ]
        )

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
            f"{wanted_by} needs {name}, which is not installed", hint=f"pip install {name}"
        )
        raise translate_error(missing) from None


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


def _arrow_type(pyarrow: Any, kind: str) -> Any:
    """Return a pyarrow type; None: pyarrow infers the type from the values."""
    if listed := _LIST.fullmatch(kind):
        inner = _arrow_type(pyarrow, listed[1])
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
        "HUGEINT": pyarrow.decimal128(38, 0),
    }
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
    }
    return others.get(kind)
