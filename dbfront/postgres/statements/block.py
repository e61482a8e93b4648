"""The transaction block and the settings of a statement with AI calls.

Outside a client's block, the relay opens a block for the rounds and commits the block before the
client learns the end of the statement; the block never outlives a batch. Settings are PostgreSQL's
own placeholders: transactions, SET LOCAL and RESET work as usual. The relay reads the settings when
the statement begins.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Final

from tierkv.dbfront.postgres.statements.ai_rounds import PostgresError
from tierkv.dbfront.postgres.statements.statement import Statement
from tierkv.dbfront.postgres.wire import messages
from tierkv.dbfront.postgres.wire.exchange import RelayExchange, ServerReply
from tierkv.dbfront.statement.settings import SessionSettings
from tierkv.kvcore.access import ADMIN_ROLE
from tierkv.kvcore.errors import FeatureNotSupportedError, SqlError
from tierkv.sql.plan.call_sites import MAX_FORMS
from tierkv.sql.settings import SETTINGS

_OTHERS: Final = (
    "default_transaction_isolation",
    "client_min_messages",
    "idle_in_transaction_session_timeout",
    "synchronize_seqscans",
    "max_parallel_workers_per_gather",
    "cursor_tuple_fraction",
    "plan_cache_mode",
)
_LEVELS: Final = ("debug5", "debug4", "debug3", "debug2", "debug1", "log", "notice", "warning")

READ_VALUES: Final = (
    "SELECT "
    + ", ".join(f"pg_catalog.current_setting('{name}', true)" for name in (*SETTINGS, *_OTHERS))
    + ", extract(epoch from pg_catalog.current_setting('statement_timeout')::interval)"
)


@dataclass(frozen=True, slots=True)
class SessionValues:
    """The current settings of a session.

    Attributes:
        settings: the ``tierkv.*`` settings.
        isolation: ``default_transaction_isolation``.
        min_messages: lowest level of messages for the client.
        put_back: earlier values, by name, of the settings that tierkv.begin_rounds changes.
        statement_timeout_s: 0.0 means no timeout.
    """

    settings: SessionSettings
    isolation: str
    min_messages: str
    put_back: dict[str, str]
    statement_timeout_s: float

    @classmethod
    def from_row(cls, row: list[str | None]) -> SessionValues:
        """Parse the row of READ_VALUES.

        Raises:
            UserError: a ``tierkv.*`` setting has an invalid value.
        """
        given = {
            name: value for name, value in zip(SETTINGS, row, strict=False) if value is not None
        }
        isolation, min_messages, *set_for_rounds, timeout = row[len(SETTINGS) :]
        return cls(
            SessionSettings(None, given),
            isolation or "",
            min_messages or "notice",
            {name: value for name, value in zip(_OTHERS[2:], set_for_rounds, strict=True) if value},
            float(timeout or 0),
        )

    def wants(self, severity: str) -> bool:
        """Return True if the client wants messages of the severity."""
        level = severity.lower()
        least = self.min_messages if self.min_messages in _LEVELS else "error"
        return least != "error" and _LEVELS.index(level) >= _LEVELS.index(least)


_COMMIT: Final = messages.own_statement("COMMIT")
_ROLLBACK: Final = messages.own_statement("ROLLBACK")
_BEGIN: Final = messages.own_statement("BEGIN")
_READ_VALUES: Final = messages.own_statement(READ_VALUES)
_READ_ROLES: Final = messages.own_statement(
    "SELECT pg_catalog.json_agg(rolname), pg_catalog.current_setting('is_superuser') = 'on' "
    "FROM pg_catalog.pg_roles WHERE pg_catalog.pg_has_role(oid, 'USAGE')"
)
_WARN: Final = messages.own_statement("SET LOCAL client_min_messages = warning")
_SET_BACK: Final = "SELECT pg_catalog.set_config('{name}', '{value}', true)"
_IN_BLOCK_ALREADY: Final = "25001"
_FOR_CURSORS: Final = ("synchronize_seqscans", "cursor_tuple_fraction")
_WITHOUT_WARNINGS: Final = frozenset({"error", "fatal", "panic"})


class Block:
    """The state of the transaction block: open or not, and owned by the client or by the relay.

    Attributes:
        own: the open block is the relay's, and the relay must end it.
        uncertain: a message of this batch may have begun or ended a block.
        forsaken: the relay began a block in this batch, and the client has not taken over the
            block.
        open_here: a block is known to be open in this batch, whatever the last ReadyForQuery said.
    """

    def __init__(self, exchange: RelayExchange, *, sync: bool) -> None:
        """Begin with the status of the last ReadyForQuery.

        Args:
            exchange: the session.
            sync: own statements end with a Sync; forbidden in a client's batch.
        """
        self.own = False
        self.uncertain = False
        self.forsaken = False
        self.open_here = False
        self._snapshot = False
        self._exchange = exchange
        self._sync = sync

    async def statement(self, *statements: bytes) -> ServerReply:
        """Run statements of the relay itself.

        Raises:
            PostgresError: a statement failed.
        """
        reply = await self._exchange.own(*statements, sync=self._sync)
        if reply.error is not None:
            raise PostgresError(reply.error)
        return reply

    async def before(self, *statements: bytes) -> ServerReply:
        """Run statements of the relay ahead of the block, if the block is not open yet.

        Raises:
            PostgresError: a statement failed.
        """
        # A Sync is harmless while no message of the batch has run, and the later block is fresh.
        fresh = self._exchange.status == "I" and not self.uncertain and not self.open_here
        reply = await self._exchange.own(*statements, sync=self._sync or fresh)
        if reply.error is not None:
            raise PostgresError(reply.error)
        return reply

    async def values(self) -> SessionValues:
        """Read the session's settings."""
        row = (await self.before(_READ_VALUES)).first_row()
        return SessionValues.from_row(
            [None if value is None else value.decode("utf-8", "replace") for value in row]
        )

    async def roles(self) -> frozenset[str]:
        """Return the roles of PostgreSQL with rights for the user; a superuser administers."""
        told, is_superuser = (await self.before(_READ_ROLES)).first_row()
        roles = json.loads(told or b"[]")
        return frozenset([*roles, ADMIN_ROLE] if is_superuser == b"t" else roles)

    async def open(self, values: SessionValues, *, reads: bool) -> None:
        """Open a block unless a block is open.

        Args:
            values: the session's settings.
            reads: the work in the block only reads; all rounds may see the same snapshot.
        """
        if self.uncertain:
            await self._probe(values)
        elif self._exchange.status == "I" and not self.open_here:
            await self.statement(messages.own_statement(_begin_text(values, reads=reads)))
            self.own = self.forsaken = True
            self._snapshot = reads
        self.uncertain = False
        self.open_here = not self._sync  # With a Sync after each statement the status is current.

    async def renew(self) -> None:
        """Renew the snapshot after a read in a batch, to let later statements see new rows.

        The snapshot was only for the rounds of the read. The relay's own block has no writes until
        then and may end.

        Raises:
            PostgresError: COMMIT failed.
        """
        if self.own and self._snapshot:
            self._snapshot = False
            await self.statement(_COMMIT, _BEGIN)

    def check_cursor(self, statement: Statement) -> None:
        """Refuse a cursor whose life would end with the relay's own block.

        Raises:
            SqlError: the same error as PostgreSQL's.
        """
        if statement.declare and self.own and not statement.holds:
            raise SqlError(
                "DECLARE CURSOR can only be used in transaction blocks", sqlstate="25P01"
            )

    async def begin_rounds(self, first_key: int) -> None:
        """Prepare the table of answers; from now on missing answers are reported, not refused.

        Raises:
            FeatureNotSupportedError: schema ``tierkv`` is missing in this database.
        """
        text = f"SELECT tierkv.begin_rounds({first_key}, {first_key + MAX_FORMS - 1})"
        try:
            await self.statement(messages.own_statement(text))
        except PostgresError as error:
            raise _explained(error) from None

    async def end_rounds(self, values: SessionValues, *, rows_to_come: bool = False) -> None:
        """Restore the settings changed by ``begin_rounds``, in a continuing block.

        Args:
            values: the session's settings before the rounds.
            rows_to_come: a cursor begins the scan later and must meet the same rows as the rounds;
                the settings with influence on the rows stay until the transaction ends.
        """
        before = {"tierkv.round": "", "tierkv.room": "", **values.put_back}
        if rows_to_come:
            for name in _FOR_CURSORS:
                before.pop(name, None)
        await self.statement(
            *(
                messages.own_statement(_SET_BACK.format(name=name, value=value))
                for name, value in before.items()
            )
        )

    async def end(self, *, failed: bool) -> bytes | None:
        """End the relay's own block, if open.

        Returns:
            error: ErrorResponse frame if COMMIT failed.
        """
        if not self.own:
            return None
        self.own = False
        ended = _ROLLBACK if failed else _COMMIT
        reply = await self._exchange.own(ended, sync=self._sync)
        return reply.error

    def ran(self, tag: bytes) -> None:
        """Note the end of a statement of the client in the same batch."""
        if tag in (b"BEGIN", b"START TRANSACTION"):
            self.own, self.open_here, self.uncertain = False, True, False
            self.forsaken = False
        elif tag in (b"COMMIT", b"ROLLBACK", b"PREPARE TRANSACTION"):
            self.own, self.open_here, self.uncertain = False, False, True

    async def _probe(self, values: SessionValues) -> None:
        """Begin a block; PostgreSQL's warning reveals an already open block."""
        silent = values.min_messages in _WITHOUT_WARNINGS
        if silent:
            await self.statement(_WARN)
        begun = await self.statement(_BEGIN)
        if silent:
            text = _SET_BACK.format(name="client_min_messages", value=values.min_messages)
            await self.statement(messages.own_statement(text))
        fresh = not begun.says(_IN_BLOCK_ALREADY)
        self.own, self.forsaken = self.own or fresh, self.forsaken or fresh


def _begin_text(values: SessionValues, *, reads: bool) -> str:
    text = "BEGIN"
    if reads and values.isolation == "read committed":
        # Rows that change between rounds would need more rounds. A write keeps its isolation level:
        # with a higher level the write could fail because of rows that other sessions write.
        text += " ISOLATION LEVEL REPEATABLE READ"
    return text


def _explained(error: PostgresError) -> Exception:
    if error.sqlstate in ("42501", "3F000", "42883"):
        return FeatureNotSupportedError(
            f"AI calls don't work in this database: {error.message}",
            hint="They need schema tierkv; `tierkv postgres-sql` prints the SQL that creates it.",
        )
    return error
