"""``CatalogSession``: a SqlSession that speaks PostgreSQL where DuckDB's dialect stops.

Wraps the real session and answers settings, cursors, transaction modes and a few no-op commands
itself; catalog queries are rewritten and passed on. Everything else goes through untouched.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shlex
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from tierkv.dbfront.contracts import (
    ClientInfo,
    Column,
    RowStream,
    SqlSession,
    StatementDescription,
    StatementResult,
)
from tierkv.dbfront.postgres_dialect.catalog.install import client_names, install
from tierkv.dbfront.postgres_dialect.catalog.table_numbers import TableNumbers
from tierkv.dbfront.postgres_dialect.rewriting.alter import lost_length, without_only
from tierkv.dbfront.postgres_dialect.rewriting.ddl import rewrite_create
from tierkv.dbfront.postgres_dialect.rewriting.intervals import has_interval
from tierkv.dbfront.postgres_dialect.rewriting.naming import Naming
from tierkv.dbfront.postgres_dialect.rewriting.rewrite import Rewritten, rewrite
from tierkv.dbfront.postgres_dialect.rewriting.rewriter import DATABASE
from tierkv.dbfront.postgres_dialect.session import queries
from tierkv.dbfront.postgres_dialect.session.cursors import Cursors, parse_declare
from tierkv.dbfront.postgres_dialect.session.plans import described_plan, plan_rows
from tierkv.dbfront.postgres_dialect.session.sequences import SequenceValues, returning
from tierkv.dbfront.postgres_dialect.session.transactions import Transactions
from tierkv.dbfront.postgres_dialect.settings.carry_out import (
    OUR_SETTINGS,
    SEARCH_PATH,
    SET_CONFIG_COLUMN,
    SettingCommands,
    own_row,
)
from tierkv.dbfront.postgres_dialect.settings.commands import SettingCommand, parse_setting_command
from tierkv.dbfront.postgres_dialect.settings.settings import SERVER_VERSION, SPECS, Settings
from tierkv.dbfront.postgres_values.sql_tokens import first_word, tokens
from tierkv.kvcore.errors import FeatureNotSupportedError, SqlError, TierKVError

Params = Sequence[Any] | Mapping[str, Any] | None
Deallocator = Callable[[str], StatementResult | None]

_GIVES_UP: Final = frozenset({"ROLLBACK", "ABORT"})
_NO_ROWS: Final = frozenset(
    {"BEGIN", "START", "COMMIT", "END", "ROLLBACK", "ABORT", "SET", "RESET", "DISCARD"}
    | {"DEALLOCATE", "CLOSE", "LISTEN", "UNLISTEN", "NOTIFY", "LOCK", "MOVE", "SAVEPOINT"}
    | {"RELEASE", "CHECKPOINT", "VACUUM", "USE", "ATTACH", "DETACH", "LOAD", "INSTALL"}
)

_CHANGES_TABLES: Final = frozenset({"CREATE", "ALTER", "DROP"})
_STREAMED: Final = frozenset({"SELECT", "WITH"})
_FACTS_OF_ENGINE: Final = (
    "SELECT current_setting('TimeZone'), current_database(), NOT EXISTS (FROM duckdb_schemas() "
    "WHERE database_name = current_database() AND schema_name = 'public')"
)
_READ_SETTINGS: Final = (f"{DATABASE}.main.pg_settings", f"{DATABASE}.main.own_setting")


class CatalogSession:
    """One client's session; implements SqlSession.

    Attributes:
        settings: the PostgreSQL settings.
        cursors: the SQL cursors.
    """

    def __init__(
        self,
        inner: SqlSession,
        client: ClientInfo,
        defaults: Mapping[str, str] | None = None,
        numbers: TableNumbers | None = None,
    ) -> None:
        self.settings = Settings(client.user, client.application_name, defaults)
        self.cursors = Cursors()
        self._transactions = Transactions(inner, self.cursors.close_streams)
        self._commands = SettingCommands(inner, self.settings, client, self._transactions)
        self._inner = inner
        self._client = client
        self._numbers = numbers or TableNumbers()
        self._naming = Naming(client.database)
        self._sequences = SequenceValues()
        # A statement is described and then run: its rewriting is kept for the second time.
        self._last: tuple[str, Mapping[str, str], Rewritten] | None = None
        self._deallocate: Deallocator = lambda _sql: None
        self._facts = {
            "current_user": _literal(client.user),
            "session_user": _literal(client.user),
            "current_role": _literal(client.user),
            "user": _literal(client.user),
            "current_catalog": _literal(client.database),
            "current_database()": _literal(client.database),
            "current_catalog()": _literal(client.database),
            "current_schema": f"{DATABASE}.main.own_current_schema()",
            "current_schema()": f"{DATABASE}.main.own_current_schema()",
            "pg_backend_pid()": str(inner.pid),
            "version()": _literal(f"PostgreSQL {SERVER_VERSION} on DuckDB"),
            "current_user()": _literal(client.user),
        }

    @property
    def pid(self) -> int:
        return self._inner.pid

    @property
    def transaction_status(self) -> str:
        return self._inner.transaction_status

    def set_deallocator(self, deallocate: Deallocator) -> None:
        """Let DEALLOCATE reach the prepared statements of the wire protocol."""
        self._deallocate = deallocate

    async def start(self, install_lock: asyncio.Lock) -> None:
        """Make the catalog if it is missing, and apply the settings of the startup message."""
        async with install_lock:
            await install(self._inner)
        zone, engine, public = (await self._inner.execute(_FACTS_OF_ENGINE)).rows[0]
        self._last = None
        self._naming = self._commands.naming = Naming(self._client.database, engine, public)
        await self._inner.execute_own(
            f"SET VARIABLE tierkv_pg_client = {{'user': {_literal(self._client.user)}, "
            f"'database': {_literal(self._client.database)}, 'public': {public}}}"
        )
        self.settings.time_zone = str(zone)
        for name, value in self._startup_settings():
            if name.lower() != "application_name":
                await self._commands.assign(SettingCommand("SET", name, value))
        self.settings.take_changes()

    def _startup_settings(self) -> list[tuple[str, str]]:
        found = [(k, v) for k, v in self._client.options.items() if k != "options"]
        words = iter(shlex.split(self._client.options.get("options", "")))
        for word in words:
            text = next(words, "") if word == "-c" else word.removeprefix("-c").removeprefix("--")
            name, _, value = text.partition("=")
            found.append((name.replace("-", "_"), value))
        return found

    def split(self, sql: str) -> list[str]:
        return self._inner.split(sql)

    async def cancel(self) -> None:
        await self._inner.cancel()

    async def close(self) -> None:
        await self._inner.close()

    async def execute_own(self, sql: str) -> Sequence[tuple[Any, ...]]:
        return await self._inner.execute_own(sql)

    def catalogue_state(self) -> Hashable | None:
        return self._inner.catalogue_state()

    async def learn_tables(self, sql: str) -> None:
        """Look up, before a statement runs, what ``numbered`` needs to know of its tables."""
        await self._numbers.learn(sql, self._inner)

    def numbered(self, columns: tuple[Column, ...], sql: str) -> tuple[Column, ...]:
        """Give the columns of a statement's result the numbers of their tables."""
        return self._numbers.numbered(columns, sql, self._inner, self._naming)

    async def copy_in(
        self, table: str, columns: Sequence[str], rows: Sequence[Sequence[str | None]]
    ) -> int:
        table = self._rewrite(f"TABLE {table}").text.removeprefix("TABLE ")
        return await self._inner.copy_in(table, columns, rows)

    def _rewrite(self, sql: str) -> Rewritten:
        facts: Mapping[str, str] = self._facts
        lowered = sql.lower()
        if "current_setting" in lowered:
            known = {
                f"current_setting {name.lower()}": _literal(value)
                for name, value, _ in self.settings.all()
            }
            facts = {**self._facts, **known, "current_setting search_path": SEARCH_PATH}
        if "lastval" in lowered or "currval" in lowered:
            facts = {**facts, **self._sequences.literals(lowered)}
        if "duckdb_" in lowered:  # the engine's own catalog knows the database by its own name
            facts = {name: text for name, text in facts.items() if name != "current_database()"}
        if self._last is None or self._last[:2] != (sql, facts):
            self._last = (sql, facts, rewrite(sql, client_names(), facts, self._naming))
        return self._last[2]

    async def _run(self, sql: str, params: Params) -> StatementResult:
        """Run a statement that the engine understands, once its catalog names are ours."""
        rewritten = self._rewrite(sql)
        await self._fill_settings(rewritten.text)
        with rewritten.placing_errors():
            result = await queries.run(self._inner, rewritten.text, params)
        word = first_word(sql)
        if word in _CHANGES_TABLES:
            self._sequences.forget_tables()
        elif word == "SELECT":
            self._sequences.note_query(sql, result)
        elif word == "EXPLAIN":
            result = plan_rows(sql, result, self._naming.shown_plan)
        return result

    async def fail_transaction(self) -> None:
        """Make the open transaction a failed one, after an error the engine never saw."""
        if self.transaction_status == "T":
            await self.cursors.close_streams()
            with contextlib.suppress(TierKVError):  # always refused, and that is what counts
                await self._inner.execute("ROLLBACK TO SAVEPOINT own_nothing")

    async def own_rows(self, sql: str) -> Sequence[tuple[Any, ...]]:
        """Rows of a query of our own, for what the protocol needs to know."""
        return (await self._inner.execute(sql)).rows

    async def _fill_settings(self, rewritten: str) -> None:
        """Put the settings where the view pg_settings reads them."""
        if not any(name in rewritten for name in _READ_SETTINGS):
            return
        rows = [
            {"name": name, "setting": value, "default": SPECS[name.lower()].default}
            for name, value, _ in self.settings.all()
        ]
        rows += map(own_row, (await self._inner.execute(OUR_SETTINGS)).rows)
        rows.append({"name": "TimeZone", "setting": self.settings.time_zone, "default": "UTC"})
        text = _literal(json.dumps(rows))
        await self._inner.execute_own(f"SET VARIABLE tierkv_pg_settings = {text}")

    async def describe(self, sql: str) -> StatementDescription:
        word = first_word(sql)
        if word == "DECLARE":
            inner = await self._inner.describe(self._rewrite(parse_declare(sql).query).text)
            return StatementDescription(None, inner.parameter_types)
        if word == "FETCH":
            return StatementDescription(self.cursors.fetch_columns(sql))
        command = parse_setting_command(sql) if word in ("SHOW", "SELECT") else None
        if command is not None and command.verb == "SET_CONFIG":
            return StatementDescription(SET_CONFIG_COLUMN)
        if command is not None and self._commands.shows(command):
            return StatementDescription(self._commands.columns(command))
        if word in _NO_ROWS:
            return StatementDescription(None)
        rewritten = self._rewrite(sql)
        definition = rewrite_create(rewritten.text) if word == "CREATE" else None
        text = rewritten.text if definition is None else definition.sql
        with rewritten.placing_errors():
            described = await self._inner.describe(text)
        if word == "EXPLAIN":
            return described_plan(sql, described)
        return queries.with_oids(described, rewritten.text)

    async def execute(self, sql: str, params: Params = None) -> StatementResult:
        word = first_word(sql)
        handler = _HANDLERS.get(word)
        failed = self.transaction_status == "E"
        try:
            result = await handler(self, sql, params) if handler is not None else None
            if result is None:
                result = await self._run(sql, params)
        finally:
            if self.transaction_status == "I":
                self.settings.end_transaction()
                self.cursors.end_transaction(committed=word not in _GIVES_UP and not failed)
        return result

    async def execute_rows(self, sql: str, params: Params = None) -> StatementResult | RowStream:
        """Run a statement whose rows are taken as they come; only AI calls take that long."""
        opened = await self._opened(sql, params)
        return await self.execute(sql, params) if opened is None else opened

    async def _opened(self, sql: str, params: Params) -> StatementResult | RowStream | None:
        """Run a statement that may be a stream; None where ``execute`` has to run it."""
        lowered = sql.lower()
        if first_word(sql) not in _STREAMED or "ai_" not in lowered or "set_config" in lowered:
            return None
        if not queries.is_query(sql):  # It must not run again.
            return None
        rewritten = self._rewrite(sql)
        await self._fill_settings(rewritten.text)
        with rewritten.placing_errors():
            opened = await self._inner.execute_rows(rewritten.text, params)
        if has_interval(opened.columns):
            if not isinstance(opened, StatementResult):
                await opened.close()
            return None
        if not isinstance(opened, StatementResult):
            return opened
        return queries.with_oids(opened, rewritten.text)

    async def _on_setting(self, sql: str, params: Params) -> StatementResult | None:
        return await self._commands.run(sql)

    # Cursors, transactions and what needs no work

    async def _on_select(self, sql: str, params: Params) -> StatementResult | None:
        if "set_config" not in sql.lower():
            return None
        return await self._on_setting(sql, params)

    async def _on_create(self, sql: str, params: Params) -> StatementResult | None:
        """Tables in PostgreSQL's spelling; sequences of serial columns start anew with them."""
        rewritten = self._rewrite(sql)
        definition = rewrite_create(rewritten.text)
        if definition is None:
            return None
        schema = _literal(definition.schema) if definition.schema else "current_schema()"
        there = await self._inner.execute(
            "SELECT 1 FROM duckdb_tables() WHERE database_name = current_database() "
            f"AND schema_name = {schema} AND table_name = {_literal(definition.table)}"
        )
        replaced = [token.upper for token in tokens(rewritten.text)[1:3]] == ["OR", "REPLACE"]
        verb = "CREATE SEQUENCE IF NOT EXISTS" if there.rows else "CREATE OR REPLACE SEQUENCE"
        if replaced or not there.rows:
            for name, options in definition.sequences:
                await self._inner.execute(f"{verb} {name} {options}")
        self._sequences.forget_tables()
        with rewritten.placing_errors():
            return await self._inner.execute(definition.sql, params)

    async def _on_alter(self, sql: str, params: Params) -> StatementResult | None:
        """Tables; ``ONLY`` means nothing here, and a length that is lost is told."""
        rewritten = self._rewrite(sql)
        self._sequences.forget_tables()
        text = without_only(rewritten.text)
        notice = lost_length(text)
        if notice is None and text == rewritten.text:
            return None
        with rewritten.placing_errors():
            result = await self._inner.execute(text, params)
        return result if notice is None else replace(result, notices=(*result.notices, notice))

    async def _on_insert(self, sql: str, params: Params) -> StatementResult | None:
        """Rows that draw from a sequence also tell lastval() what they drew."""
        if "returning" in sql.lower():
            result = await self._run(sql, params)
            column = await self._sequences.serial_insert(self._inner, self._rewrite(sql).text)
            names = [one.name for one in result.columns or ()]
            if column is not None and column.name in names and result.rows:
                drawn = result.rows[-1][names.index(column.name)]
                self._sequences.note(column.sequence, drawn)
            return result
        column = await self._sequences.serial_insert(self._inner, self._rewrite(sql).text)
        if column is None:
            return None
        result = await self._run(returning(sql, column), params)
        if result.rows:
            self._sequences.note(column.sequence, result.rows[-1][0])
        return replace(result, columns=None, rows=())

    async def _on_declare(self, sql: str, params: Params) -> StatementResult | None:
        declaration = parse_declare(sql)
        if self.transaction_status == "I" and not declaration.hold:
            raise SqlError(
                "DECLARE CURSOR can only be used in transaction blocks", sqlstate="25P01"
            )
        self.cursors.refuse_taken(declaration.name)
        if not queries.is_query(declaration.query):
            queries.refuse_writing_cursor(declaration.query)
        await self.learn_tables(declaration.query)
        opened = None
        if not declaration.needs_all_rows:
            opened = await self._opened(declaration.query, params)
        if opened is None:
            opened = await self._run(declaration.query, params)
        columns = self.numbered(opened.columns or (), declaration.query)
        return self.cursors.declare(declaration, opened, columns)

    async def _on_fetch(self, sql: str, params: Params) -> StatementResult | None:
        self._transactions.refuse_if_aborted()
        return await self.cursors.fetch(sql)

    async def _on_close(self, sql: str, params: Params) -> StatementResult | None:
        words = tokens(sql)
        name = words[1].name if len(words) > 1 else ""
        await self.cursors.close(None if name == "all" else name)
        return StatementResult("CLOSE CURSOR ALL" if name == "all" else "CLOSE CURSOR")

    async def _on_begin(self, sql: str, params: Params) -> StatementResult | None:
        return await self._transactions.begin(sql)

    async def _on_end(self, sql: str, params: Params) -> StatementResult | None:
        return await self._transactions.end(sql)

    async def _on_savepoint(self, sql: str, params: Params) -> StatementResult | None:
        return await self._transactions.savepoint(sql)

    async def _on_discard(self, sql: str, params: Params) -> StatementResult | None:
        words = [token.upper for token in tokens(sql) if token.text != ";"]
        if words[1:] == ["ALL"]:
            self._deallocate(sql)
            await self.cursors.close(None)
            self.settings.reset("all")
        return StatementResult(" ".join(words))

    async def _on_deallocate(self, sql: str, params: Params) -> StatementResult | None:
        return self._deallocate(sql)

    async def _on_listen(self, sql: str, params: Params) -> StatementResult | None:
        raise FeatureNotSupportedError("LISTEN and NOTIFY are not supported")

    async def _on_unlisten(self, sql: str, params: Params) -> StatementResult | None:
        return StatementResult("UNLISTEN")


Handler = Callable[..., Any]
_HANDLERS: Final[dict[str, Handler]] = {
    "SET": CatalogSession._on_setting,
    "RESET": CatalogSession._on_setting,
    "SHOW": CatalogSession._on_setting,
    "SELECT": CatalogSession._on_select,
    "CREATE": CatalogSession._on_create,
    "ALTER": CatalogSession._on_alter,
    "INSERT": CatalogSession._on_insert,
    "DECLARE": CatalogSession._on_declare,
    "FETCH": CatalogSession._on_fetch,
    "MOVE": CatalogSession._on_fetch,
    "CLOSE": CatalogSession._on_close,
    "BEGIN": CatalogSession._on_begin,
    "START": CatalogSession._on_begin,
    "COMMIT": CatalogSession._on_end,
    "END": CatalogSession._on_end,
    "ROLLBACK": CatalogSession._on_end,
    "ABORT": CatalogSession._on_end,
    "DISCARD": CatalogSession._on_discard,
    "DEALLOCATE": CatalogSession._on_deallocate,
    "LISTEN": CatalogSession._on_listen,
    "NOTIFY": CatalogSession._on_listen,
    "UNLISTEN": CatalogSession._on_unlisten,
    "SAVEPOINT": CatalogSession._on_savepoint,
    "RELEASE": CatalogSession._on_savepoint,
}


def _literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
