"""``Preparation``: a statement's text from a client's dialect to the engine's, and its catalog.

session/session.py creates a Preparation per session. The engine's facts (the database's name, the
time zone) are looked up only when a statement first needs these facts, so most sessions start
without a query.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Final

from tierkv.dbfront.contracts import ClientInfo
from tierkv.dbfront.postgres_dialect.catalog.install import SharedCatalog, client_names
from tierkv.dbfront.postgres_dialect.rewriting.rewrite import Rewritten, may_tell, rewrite
from tierkv.dbfront.postgres_dialect.rewriting.rewriter import DATABASE, PUBLIC, Naming
from tierkv.dbfront.postgres_dialect.session.sequences import SequenceValues
from tierkv.dbfront.postgres_dialect.session.settings import SERVER_VERSION, SPECS, PgSettings
from tierkv.dbfront.sql_session import SqlSession
from tierkv.sql.settings import SETTINGS

SEARCH_PATH: Final = f"{DATABASE}.main.own_search_path()"
OUR_SETTINGS: Final = (
    "SELECT name, setting, description, source FROM tierkv.settings WHERE name LIKE 'tierkv.%'"
)

_NEEDS_FACTS: Final = frozenset({"SET", "RESET", "SHOW", "BEGIN", "START", "EXPLAIN"})
"""Statements that need the engine's facts, or may fail the transaction and so prevent a look-up."""
_FACTS_OF_ENGINE: Final = (
    "SELECT current_setting('TimeZone'), current_database(), NOT EXISTS (FROM duckdb_schemas() "
    "WHERE database_name = current_database() AND schema_name = 'public')"
)
_SOURCES: Final = {"server": "configuration file"}
_READ_SETTINGS: Final = (f"{DATABASE}.main.pg_settings", f"{DATABASE}.main.own_setting")


class Preparation:
    """A session's knowledge of its engine, and the resulting rewriting.

    Attributes:
        naming: the client's and the engine's names; complete once ``learned``.
        learned: the engine's facts were looked up.
        sequences: values that the session drew from sequences.
    """

    def __init__(
        self, inner: SqlSession, client: ClientInfo, catalog: SharedCatalog, settings: PgSettings
    ) -> None:
        """Create without any look-up; ``inner`` runs the later look-ups."""
        self.naming = Naming(client.database)
        self.learned = False
        self.sequences = SequenceValues()
        self._inner = inner
        self._client = client
        self._catalog = catalog
        self._settings = settings
        self._facts: Mapping[str, str] = {}
        self._introduced = False
        # A statement is described and then run: its rewriting is kept for the run.
        self._last: tuple[str, Mapping[str, str], Rewritten] | None = None

    async def learn(self) -> None:
        """Look up the engine's name of the database, and the time zone."""
        if self.learned or self._inner.transaction_status == "E":
            return
        zone, engine, public = (await self._inner.execute(_FACTS_OF_ENGINE)).rows[0]
        self.learned, self._last = True, None
        naming = self.naming = Naming(self._client.database or engine, engine, public)
        self._settings.time_zone = str(zone)
        user, database = literal(self._client.user), literal(naming.database)
        self._facts = {
            "current_user": user,
            "session_user": user,
            "current_role": user,
            "user": user,
            "current_catalog": database,
            "current_database()": database,
            "current_catalog()": database,
            "current_schema": f"{DATABASE}.main.own_current_schema()",
            "current_schema()": f"{DATABASE}.main.own_current_schema()",
            "pg_backend_pid()": str(self._inner.pid),
            "version()": literal(f"PostgreSQL {SERVER_VERSION} on DuckDB"),
            "current_user()": user,
        }

    async def learn_for(self, sql: str, word: str) -> None:
        """Look up the engine's facts if a statement may need these facts."""
        if not self.learned and (word in _NEEDS_FACTS or may_tell(sql) or PUBLIC in sql.lower()):
            await self.learn()

    async def need_catalog(self, text: str) -> None:
        """Create the catalog and register this session if a statement's text names the catalog."""
        if DATABASE not in text or self._inner.transaction_status == "E":
            return
        await self._catalog.need()
        if not self._introduced:
            await self.learn()
            naming = self.naming
            await self._inner.execute_own(
                f"SET VARIABLE tierkv_pg_client = {{'user': {literal(self._client.user)}, "
                f"'database': {literal(naming.database)}, 'public': {naming.public}}}"
            )
            self._introduced = True
        if any(name in text for name in _READ_SETTINGS):
            await self._fill_settings()

    async def ready(self, sql: str) -> Rewritten:
        """Rewrite a statement, and prepare the catalog for it."""
        rewritten = self.rewrite(sql)
        await self.need_catalog(rewritten.text)
        return rewritten

    def rewrite(self, sql: str) -> Rewritten:
        """Rewrite a statement for the engine, with the facts known so far."""
        facts: Mapping[str, str] = self._facts
        lowered = sql.lower()
        if "current_setting" in lowered:
            known = {
                f"current_setting {name.lower()}": literal(value)
                for name, value, _ in self._settings.all()
            }
            facts = {**self._facts, **known, "current_setting search_path": SEARCH_PATH}
        if "lastval" in lowered or "currval" in lowered:
            facts = {**facts, **self.sequences.literals(lowered)}
        if "duckdb_" in lowered:  # the engine's own catalog knows the database by its own name
            facts = {name: text for name, text in facts.items() if name != "current_database()"}
        if self._last is None or self._last[:2] != (sql, facts):
            self._last = (sql, facts, rewrite(sql, client_names(), facts, self.naming))
        return self._last[2]

    async def _fill_settings(self) -> None:
        """Write the settings where the view pg_settings reads them."""
        rows = [
            {"name": name, "setting": value, "default": SPECS[name.lower()].default}
            for name, value, _ in self._settings.all()
        ]
        rows += map(_own_row, (await self._inner.execute(OUR_SETTINGS)).rows)
        rows.append({"name": "TimeZone", "setting": self._settings.time_zone, "default": "UTC"})
        text = literal(json.dumps(rows))
        await self._inner.execute_own(f"SET VARIABLE tierkv_pg_settings = {text}")


def literal(text: str) -> str:
    """Return a string literal of SQL."""
    return "'" + text.replace("'", "''") + "'"


def _own_row(row: tuple[str, str, str, str]) -> dict[str, str]:
    """Convert a row of ``OUR_SETTINGS`` for the view pg_settings."""
    name, value, description, source = row
    return {
        "name": name,
        "setting": value,
        "default": SETTINGS[name].shown(SETTINGS[name].default),
        "description": description,
        "source": _SOURCES.get(source, source),
    }
