"""SET, RESET, SHOW and set_config; BEGIN, COMMIT, ROLLBACK and savepoints, as in PostgreSQL.

``parse_setting_command`` reads a statement; the result is None for other statements, and for forms
that the engine handles (``SET VARIABLE``). session.py passes the commands to ``SettingCommands``,
and settings.py keeps the values: PostgreSQL's settings here, other settings in the engine. Settings
named ``tierkv.*`` are not handled here, but in the session below.

``Transactions`` passes transactions on to the engine. Outside a transaction there are warnings
instead of errors, and modes that DuckDB does not parse are dropped.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from tierkv.dbfront.contracts import ClientInfo
from tierkv.dbfront.postgres_dialect.rewriting.rewriter import ENGINE_SCHEMA, PUBLIC
from tierkv.dbfront.postgres_dialect.session.preparation import (
    OUR_SETTINGS,
    SEARCH_PATH,
    Preparation,
    literal,
)
from tierkv.dbfront.postgres_dialect.session.settings import PgSettings
from tierkv.dbfront.postgres_values.sql_tokens import SqlToken, first_word, tokens
from tierkv.dbfront.sql_session import SqlSession
from tierkv.dbfront.statement_results import Column, Notice, StatementResult
from tierkv.kvcore.errors import FeatureNotSupportedError, SqlError, SqlSyntaxError


class Transactions:
    """The transaction commands of one session."""

    def __init__(self, inner: SqlSession, before_end: Callable[[], Awaitable[None]]) -> None:
        """Create the commands; ``before_end`` stops queries that cannot outlive the transaction."""
        self._inner = inner
        self._before_end = before_end

    def refuse_if_aborted(self) -> None:
        """Raise 25P02 in a failed transaction."""
        if self._inner.transaction_status == "E":
            raise SqlError(
                "current transaction is aborted, commands ignored until end of transaction block",
                sqlstate="25P02",
            )

    async def begin(self, sql: str) -> StatementResult:
        """Begin without modes that DuckDB does not parse; the isolation is always a snapshot."""
        self.refuse_if_aborted()
        if self._inner.transaction_status == "T":
            warning = Notice("WARNING", "there is already a transaction in progress", "25001")
            return StatementResult("BEGIN", notices=(warning,))
        read_only = re.search(r"\bread\s+only\b", sql, re.IGNORECASE) is not None
        begin = "BEGIN TRANSACTION READ ONLY" if read_only else "BEGIN TRANSACTION"
        result = await self._inner.execute(begin)
        tag = "START TRANSACTION" if first_word(sql) == "START" else "BEGIN"
        return StatementResult(tag, notices=result.notices)

    async def end(self, sql: str) -> StatementResult:
        """Run COMMIT or ROLLBACK; outside a transaction return a warning, as PostgreSQL does."""
        words = [token for token in tokens(sql) if token.text != ";"]
        verbs = [word.upper for word in words]
        if "TO" in verbs:
            return await self.savepoint(sql)
        if "PREPARED" in verbs:
            raise FeatureNotSupportedError("two-phase commit is not supported by this server")
        if "CHAIN" in verbs and "NO" not in verbs:
            raise FeatureNotSupportedError("AND CHAIN is not supported by this server")
        tag = "COMMIT" if verbs[0] in ("COMMIT", "END") else "ROLLBACK"
        if self._inner.transaction_status == "I":
            warning = Notice("WARNING", "there is no transaction in progress", "25P01")
            return StatementResult(tag, notices=(warning,))
        if self._inner.transaction_status == "E":
            tag = "ROLLBACK"
        await self._before_end()
        result = await self._inner.execute(tag)
        return StatementResult(tag, notices=result.notices)

    async def savepoint(self, sql: str) -> StatementResult:
        """Run SAVEPOINT, RELEASE or ROLLBACK TO."""
        if first_word(sql) == "ROLLBACK":
            await self._before_end()
        return await self._inner.execute(sql)


_VERBS: Final = frozenset({"SET", "SHOW", "RESET", "SELECT"})
_SCOPES: Final = ("SESSION", "LOCAL")


@dataclass(frozen=True, slots=True)
class PgSettingCommand:
    """``verb`` SET, RESET, SHOW or SET_CONFIG; ``name`` in the client's spelling.

    Attributes:
        value: the new value; None for DEFAULT, RESET and SHOW.
        local: only until the transaction ends.
    """

    verb: str
    name: str
    value: str | None = None
    local: bool = False


def parse_setting_command(sql: str) -> PgSettingCommand | None:
    """Parse a settings statement; None for any other statement.

    Raises:
        SqlSyntaxError: a SET without a value.
    """
    verb = first_word(sql)
    if verb not in _VERBS or (verb == "SELECT" and "set_config" not in sql.lower()):
        return None
    words = [token for token in tokens(sql) if token.text != ";"]
    if verb == "SET":
        return _parse_set(words[1:])
    if verb in ("SHOW", "RESET") and len(words) > 1:
        return PgSettingCommand(verb, _spaced_name(words[1:]))
    if verb == "SELECT":
        return _parse_set_config(words)
    return None


def _spaced_name(words: list[SqlToken]) -> str:
    joined = " ".join(word.upper for word in words)
    if joined == "TIME ZONE":
        return "TimeZone"
    if joined == "TRANSACTION ISOLATION LEVEL":
        return "transaction_isolation"
    if joined == "SESSION AUTHORIZATION":
        return "session_authorization"
    return "".join(word.name for word in words)


def _parse_set(words: list[SqlToken]) -> PgSettingCommand | None:
    local = False
    if words and words[0].upper in _SCOPES and len(words) > 1 and words[1].text not in ("=", "."):
        if words[1].upper == "CHARACTERISTICS":
            return PgSettingCommand("SET", "default_transaction_isolation", "")
        if words[1].upper == "AUTHORIZATION":
            return PgSettingCommand("SET", "role", _value(words[2:]))
        local = words[0].upper == "LOCAL"
        words = words[1:]
    if not words or words[0].upper in ("VARIABLE", "GLOBAL"):
        return None
    if words[0].upper == "TRANSACTION":
        return PgSettingCommand("SET", "transaction_isolation", "", local=True)
    if [word.upper for word in words[:2]] == ["TIME", "ZONE"]:
        return PgSettingCommand("SET", "TimeZone", _value(words[2:]), local)
    if words[0].upper in ("NAMES", "ROLE"):
        name = {"NAMES": "client_encoding", "ROLE": "role"}[words[0].upper]
        return PgSettingCommand("SET", name, _value(words[1:]), local)
    return _parse_assignment(words, local=local)


def _parse_assignment(words: list[SqlToken], *, local: bool) -> PgSettingCommand:
    width = 3 if len(words) > 2 and words[1].text == "." else 1
    name = "".join(word.name for word in words[:width])
    if len(words) <= width or words[width].upper not in ("TO", "="):
        raise SqlSyntaxError(f'SET {name} needs "TO" or "=" and a value')
    return PgSettingCommand("SET", name, _value(words[width + 1 :]), local)


def _value(words: list[SqlToken]) -> str | None:
    """Return the value; join several values as PostgreSQL does. None for DEFAULT or LOCAL."""
    if len(words) == 1 and words[0].upper in ("DEFAULT", "LOCAL"):
        return None
    if not words:
        raise SqlSyntaxError("SET needs a value")
    text = "".join(
        ", " if word.text == "," else word.value if word.kind == "string" else word.text.strip('"')
        for word in words
    )
    return text.strip()


def _parse_set_config(words: list[SqlToken]) -> PgSettingCommand | None:
    """Parse ``SELECT [pg_catalog.]set_config('name', 'value', is_local)``."""
    rest = words[1:]
    if len(rest) > 2 and rest[0].upper == "PG_CATALOG" and rest[1].text == ".":
        rest = rest[2:]
    if len(rest) < 8 or rest[0].upper != "SET_CONFIG" or rest[7].text != ")":
        return None
    if len(rest) > 8 or rest[2].kind != "string" or rest[4].kind != "string":
        return None
    local = rest[6].value.lower() in ("true", "t", "on", "1")
    return PgSettingCommand("SET_CONFIG", rest[2].value, rest[4].value, local)


SET_CONFIG_COLUMN: Final = (Column("set_config", "VARCHAR"),)
_PASSED_ON: Final = {"timezone": "current_setting('TimeZone')", "search_path": SEARCH_PATH}
_LOCKED: Final = "42501"


class SettingCommands:
    """The settings statements of one session."""

    def __init__(
        self,
        inner: SqlSession,
        settings: PgSettings,
        client: ClientInfo,
        transactions: Transactions,
        prep: Preparation,
    ) -> None:
        """Apply commands to ``settings``, and to the engine's session ``inner``."""
        self._inner = inner
        self._settings = settings
        self._user = client.user
        self._transactions = transactions
        self._prep = prep

    def _schema(self, name: str) -> str:
        return ENGINE_SCHEMA if self._prep.naming.public and name == PUBLIC else name

    def shows(self, command: PgSettingCommand) -> bool:
        return command.verb == "SHOW" and (
            self._settings.known(command.name) or command.name.lower() in ("all", *_PASSED_ON)
        )

    def columns(self, command: PgSettingCommand) -> tuple[Column, ...]:
        if command.name.lower() == "all":
            return tuple(Column(name, "VARCHAR") for name in ("name", "setting", "description"))
        return (Column(command.name, "VARCHAR"),)

    async def run(self, sql: str) -> StatementResult | None:
        command = parse_setting_command(sql)
        if command is None or command.name.lower().startswith("tierkv."):
            return None
        if command.verb == "SHOW":
            return await self._show(command)
        self._transactions.refuse_if_aborted()
        if command.verb == "RESET":
            return await self._reset(command)
        handled = await self.assign(command)
        if command.verb == "SET_CONFIG":
            return StatementResult("SELECT 1", SET_CONFIG_COLUMN, [(command.value,)])
        return handled

    async def _show(self, command: PgSettingCommand) -> StatementResult | None:
        if not self.shows(command):
            return None
        self._transactions.refuse_if_aborted()
        columns = self.columns(command)
        if command.name.lower() == "all":
            ours = (await self._inner.execute(OUR_SETTINGS)).rows
            return StatementResult(
                "SHOW", columns, [*self._settings.all(), *(row[:3] for row in ours)]
            )
        if command.name.lower() in _PASSED_ON:
            shown = _PASSED_ON[command.name.lower()]
            await self._prep.need_catalog(shown)
            rows = (await self._inner.execute(f"SELECT {shown}")).rows
            return StatementResult("SHOW", columns, [(str(rows[0][0]),)])
        return StatementResult("SHOW", columns, [(self._settings.get(command.name),)])

    async def _reset(self, command: PgSettingCommand) -> StatementResult:
        name = command.name.lower()
        if not self._settings.known(name) and name != "all":
            await self._inner.execute(f"RESET {command.name}")
        self._settings.reset(name)
        return StatementResult("RESET")

    async def assign(self, command: PgSettingCommand) -> StatementResult:
        """Change a setting here, or pass the setting on to the engine in the engine's spelling."""
        name = command.name.lower()
        notices: tuple[Notice, ...] = ()
        if command.local and self._inner.transaction_status == "I":
            notices = (
                Notice("WARNING", "SET LOCAL can only be used in transaction blocks", "25P01"),
            )
        if self._settings.known(name):
            if command.value is None:
                self._settings.reset(name)
            else:
                self._settings.set(name, command.value, local=command.local)
        elif name == "role":
            if command.value not in (None, "none", self._user):
                raise FeatureNotSupportedError(
                    "SET ROLE and SET SESSION AUTHORIZATION are not supported"
                )
        else:
            notices += await self._pass_on(command)
        return StatementResult("SET", notices=notices)

    async def _pass_on(self, command: PgSettingCommand) -> tuple[Notice, ...]:
        name = "TimeZone" if command.name.lower() == "timezone" else command.name.lower()
        if command.value is None:
            await self._inner.execute(f"RESET {name}")
            return ()
        value = command.value
        if name == "search_path":
            parts = [part.strip().strip('"') for part in value.split(",")]
            value = ",".join(self._schema(p) for p in parts if p and p != "$user")
        elif name == "schema":
            value = self._schema(value)
        if name == "TimeZone":
            return await self._set_time_zone(value)
        await self._inner.execute(f"SET {name} = {_setting_literal(value)}")
        return ()

    async def _set_time_zone(self, value: str) -> tuple[Notice, ...]:
        """Set the time zone, which JDBC always sends; locked engine settings keep the old zone."""
        if value.removeprefix("Etc/") == self._settings.time_zone.removeprefix("Etc/"):
            return ()
        if (
            self._inner.transaction_status == "T"
        ):  # an engine error would abort the client's transaction
            return (_zone_stays(self._settings.time_zone, "inside a transaction"),)
        try:
            await self._inner.execute(f"SET TimeZone = {literal(value)}")
        except SqlError as error:
            if error.sqlstate != _LOCKED:
                raise
            return (_zone_stays(self._settings.time_zone, "by this server"),)
        self._settings.time_zone = value
        return ()


def _zone_stays(zone: str, why: str) -> Notice:
    return Notice(
        "WARNING",
        f"TimeZone can't be changed {why}; times are shown in {zone}, with their offset",
        "01000",
    )


def _setting_literal(value: str) -> str:
    """Return a SET value: numbers and booleans bare, all others quoted."""
    bare = re.fullmatch(r"-?\d+(\.\d+)?|true|false", value, re.IGNORECASE)
    return value if bare else literal(value)
