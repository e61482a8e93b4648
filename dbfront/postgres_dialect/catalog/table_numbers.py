"""The table and column numbers in RowDescription: PostgreSQL's table oid and attnum.

Drivers derive from the numbers which table a result's column belongs to. The numbers are the same
as in the session's pg_class and pg_attribute. A table is looked up once for all sessions with the
same catalog (``SqlSession.catalogue_state``), so repeated statements need no look-up. The numbers
are optional: in any doubt a column has no number, and no statement fails because of the numbers.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from tierkv.dbfront.postgres_dialect.catalog.install import client_names
from tierkv.dbfront.postgres_dialect.inference.origins import (
    Columns,
    Origin,
    OutputColumn,
    origins,
    tables_of_output,
)
from tierkv.dbfront.postgres_dialect.rewriting.rewriter import ENGINE_SCHEMA, Naming
from tierkv.dbfront.sql_session import SqlSession
from tierkv.dbfront.statement_results import Column
from tierkv.kvcore.errors import CancelledByUserError, TierKVError

_LOG = logging.getLogger(__name__)
_MAX_STATES: Final = 64
_MAX_TABLES: Final = 1024
_MAX_STATEMENTS: Final = 256
_TEMPORARY: Final = "temp"
_PATH: Final = "[]"
"""Stands for the search path among the names of tables."""
_TABLES: Final = """
SELECT lower(table_name), lower(database_name), lower(schema_name),
       CASE WHEN min((database_name, schema_name, table_name)) OVER same
              = max((database_name, schema_name, table_name)) OVER same THEN table_oid ELSE 0 END,
       lower(column_name), column_index, data_type
FROM duckdb_columns()
WHERE database_name IN (current_database(), 'temp') AND NOT internal
WINDOW same AS (PARTITION BY table_oid)
QUALIFY lower(table_name) IN ({names})
UNION ALL
SELECT '[]', lower(current_database()), lower(s), 0, '', place, ''
FROM (SELECT unnest(path) AS s, generate_subscripts(path, 1) AS place
      FROM (SELECT CASE WHEN len(current_schemas(false)) > 0 THEN current_schemas(false)
                        ELSE [current_schema()] END AS path))
ORDER BY 1, 6
"""


@dataclass(slots=True)
class _Catalogue:
    """Cached look-ups of one state of the catalog.

    Attributes:
        tables: columns by database and schema, by table; no entry before the look-up of a table.
        path: the schemas of the search path, in order.
        statements: output columns by statement and client's names.
    """

    tables: dict[str, dict[tuple[str, str], list[OutputColumn]]] = field(default_factory=dict)
    database: str = ""
    path: tuple[str, ...] = ()
    statements: OrderedDict[tuple[str, Naming], tuple[OutputColumn, ...]] = field(
        default_factory=OrderedDict
    )

    def add(self, names: Iterable[str], rows: Iterable[Sequence[Any]]) -> None:
        """Add the rows of a look-up of tables."""
        found: dict[str, dict[tuple[str, str], list[OutputColumn]]] = {one: {} for one in names}
        path = []
        for table, database, schema, oid, column, number, type_name in rows:
            if table == _PATH and not oid and not column:
                self.database = database
                path.append(schema)
            elif table in found:
                origin = Origin(int(oid), int(number), type_name) if oid else None
                columns = found[table].setdefault((database, schema), [])
                columns.append(OutputColumn(column, origin))
        self.path = tuple(path)
        self.tables |= found


@dataclass(frozen=True, slots=True)
class _Named:
    """The tables of a catalog by the names in a client's statement; implements Tables."""

    catalogue: _Catalogue
    naming: Naming

    def columns(self, database: str, schema: str, table: str) -> Columns | None:
        """Return a table's columns, in order; None if the table is unknown or ambiguous."""
        known = self.catalogue.tables.get(table)
        if not known or (not schema and client_names().has(table)):
            return None
        if not schema:
            places = [(_TEMPORARY, ENGINE_SCHEMA)]
            places += [(self.catalogue.database, one) for one in self.catalogue.path]
            return next((known[place] for place in places if place in known), None)
        if database and database != self.naming.database.lower() != self.catalogue.database:
            return None
        found = [place for place in known if place[1] == self._schema(schema)]
        return known[found[0]] if len(found) == 1 else None

    def same_schema(self, written: str, also_written: str) -> bool:
        """Return True if two schema names mean the same schema."""
        return bool(also_written) and self._schema(written) == self._schema(also_written)

    def _schema(self, name: str) -> str:
        return ENGINE_SCHEMA if self.naming.public and name == "public" else name


class TableNumbers:
    """Cached numbers of tables, for all sessions of a server."""

    def __init__(self) -> None:
        self._states: OrderedDict[Hashable, _Catalogue] = OrderedDict()

    async def learn(self, sql: str, session: SqlSession) -> None:
        """Look up the tables of a statement's output, unless the tables are known."""
        names = tables_of_output(sql)
        state = session.catalogue_state() if names else None
        if state is None:
            return
        catalogue = self._states.get(state)
        if catalogue is None or len(catalogue.tables) > _MAX_TABLES:
            catalogue = self._states[state] = _Catalogue()
            while len(self._states) > _MAX_STATES:
                self._states.popitem(last=False)
        missing = sorted(name for name in names if name not in catalogue.tables)
        if missing:
            listed = ", ".join("'" + name.replace("'", "''") + "'" for name in missing)
            try:
                catalogue.add(missing, await session.execute_own(_TABLES.format(names=listed)))
            except CancelledByUserError:
                raise
            except TierKVError:
                _LOG.debug("tables of columns not looked up", exc_info=True)
                catalogue.tables |= {name: {} for name in missing}

    def numbered(
        self, columns: tuple[Column, ...], sql: str, session: SqlSession, naming: Naming
    ) -> tuple[Column, ...]:
        """Add the numbers of their tables to a result's columns, if ``learn`` found the tables."""
        names = tables_of_output(sql)
        state = session.catalogue_state() if names else None
        catalogue = None if state is None else self._states.get(state)
        if catalogue is None or not catalogue.tables.keys() >= names:
            return columns
        output = _output(catalogue, sql, naming)
        if len(output) != len(columns) or not all(map(_fits, columns, output)):
            return columns
        return tuple(
            column
            if one.origin is None
            else replace(column, table_oid=one.origin.table_oid, attnum=one.origin.attnum)
            for column, one in zip(columns, output, strict=True)
        )


def _output(catalogue: _Catalogue, sql: str, naming: Naming) -> tuple[OutputColumn, ...]:
    known = catalogue.statements.get((sql, naming))
    if known is None:
        known = origins(sql, _Named(catalogue, naming))
        catalogue.statements[sql, naming] = known
        if len(catalogue.statements) > _MAX_STATEMENTS:
            catalogue.statements.popitem(last=False)
    return known


def _fits(column: Column, output: OutputColumn) -> bool:
    """Return True if the engine's name is the expected name, perhaps with a number appended."""
    return output.origin is None or column.name.lower().startswith(output.name)
