"""SET, RESET, SHOW and set_config: PostgreSQL's settings here, other settings in the engine.

session.py passes the statements on; setting_syntax.py parses, and settings.py keeps values.
Settings named ``tierkv.*`` are not handled here, but in the session below.
"""

from __future__ import annotations

import re
from typing import Final

from tierkv.dbfront.contracts import ClientInfo, Column, Notice, StatementResult
from tierkv.dbfront.postgres_dialect.rewriting.naming import ENGINE_SCHEMA, PUBLIC
from tierkv.dbfront.postgres_dialect.session.preparation import (
    OUR_SETTINGS,
    SEARCH_PATH,
    Preparation,
    literal,
)
from tierkv.dbfront.postgres_dialect.session.setting_syntax import (
    PgSettingCommand,
    parse_setting_command,
)
from tierkv.dbfront.postgres_dialect.session.settings import PgSettings
from tierkv.dbfront.postgres_dialect.session.transactions import Transactions
from tierkv.dbfront.sql_session import SqlSession
from tierkv.kvcore.errors import FeatureNotSupportedError, SqlError

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
                raise FeatureNotSupportedError("SET ROLE and SET SESSION AUTHORIZATION")
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
