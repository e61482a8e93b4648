"""``DialectSession``: a SqlSession with PostgreSQL's statements that DuckDB's dialect lacks.

``DialectServer`` opens a session for each client of the wire, of REST and of ``tierkv.connect()``.
The session answers settings, cursors, transaction modes and a few no-op commands itself, and
rewrites catalog queries for the engine's session below. All other statements pass unchanged.
"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Final

from tierkv.dbfront.contracts import ClientInfo
from tierkv.dbfront.postgres_dialect.catalog.install import SharedCatalog
from tierkv.dbfront.postgres_dialect.inference.column_names import with_names
from tierkv.dbfront.postgres_dialect.session import queries
from tierkv.dbfront.postgres_dialect.session.cursors import Cursors, parse_declare
from tierkv.dbfront.postgres_dialect.session.engine_statements import EngineStatements
from tierkv.dbfront.postgres_dialect.session.preparation import Preparation
from tierkv.dbfront.postgres_dialect.session.queries import NamedRows, StatementTimer, TimeLeft
from tierkv.dbfront.postgres_dialect.session.setting_commands import (
    SET_CONFIG_COLUMN,
    PgSettingCommand,
    SettingCommands,
    Transactions,
    parse_setting_command,
)
from tierkv.dbfront.postgres_dialect.session.settings import PgSettings
from tierkv.dbfront.postgres_values.sql_tokens import first_word, tokens
from tierkv.dbfront.sql_session import SqlSession
from tierkv.dbfront.statement_results import (
    Column,
    RowStream,
    StatementDescription,
    StatementResult,
)
from tierkv.kvcore.errors import FeatureNotSupportedError, SqlError, TierKVError, UserError
from tierkv.sql.jobs.ai_table_command import AiTableCommand, ai_table_command
from tierkv.sql.jobs.job_command import JobCommand, job_command
from tierkv.sql.jobs.kv_index_command import KvIndexCommand, kv_index_command
from tierkv.sql.text.lexer import name_value, tokenize

if TYPE_CHECKING:
    # Only sessions of the wire have table numbers; others should not wait for their import.
    from tierkv.dbfront.accounts.statistics import AiStats, StatementProgress
    from tierkv.dbfront.jobs.embedded_jobs import EmbeddedJobs, RunningJobs
    from tierkv.dbfront.postgres_dialect.catalog.table_numbers import TableNumbers

Params = Sequence[Any] | Mapping[str, Any] | None
Deallocator = Callable[[str], StatementResult | None]

_GIVES_UP: Final = frozenset({"ROLLBACK", "ABORT"})
_NO_ROWS: Final = frozenset(
    {"BEGIN", "START", "COMMIT", "END", "ROLLBACK", "ABORT", "SET", "RESET", "DISCARD"}
    | {"DEALLOCATE", "CLOSE", "LISTEN", "UNLISTEN", "NOTIFY", "LOCK", "MOVE", "SAVEPOINT"}
    | {"RELEASE", "CHECKPOINT", "VACUUM", "USE", "ATTACH", "DETACH", "LOAD", "INSTALL"}
)


@dataclass(frozen=True, slots=True)
class WireNeeds:
    """Extra needs of the sessions of PostgreSQL's wire protocol.

    Attributes:
        numbers: cached numbers of tables.
        defaults: PostgreSQL's settings, by name.
    """

    numbers: TableNumbers
    defaults: Mapping[str, str] = field(default_factory=dict)


class DialectSession:
    """One client's session; implements SqlSession.

    Attributes:
        settings: the PostgreSQL settings.
        cursors: the SQL cursors.
    """

    def __init__(
        self,
        inner: SqlSession,
        client: ClientInfo,
        catalog: SharedCatalog,
        wire: WireNeeds | None = None,
        jobs: RunningJobs | None = None,
    ) -> None:
        """Wrap the engine's session; nothing runs before the first statement.

        Args:
            inner: the engine's session.
            client: the client; without a database name the engine's name is used.
            catalog: PostgreSQL's catalog in the engine.
            wire: given for a client of the wire protocol, whose intervals are text.
            jobs: shared by the sessions of the database; None: the session runs no jobs.
        """
        defaults = wire.defaults if wire is not None else None
        self.settings = PgSettings(client.user, client.application_name, defaults)
        self.cursors = Cursors()
        self._timer = StatementTimer(self.cancel)
        self.split = inner.split
        self.close = inner.close
        self.execute_own = inner.execute_own
        self.catalogue_state = inner.catalogue_state
        self._transactions = Transactions(inner, self.cursors.close_streams)
        self._prep = Preparation(inner, client, catalog, self.settings)
        self._commands = SettingCommands(
            inner, self.settings, client, self._transactions, self._prep
        )
        self._engine = EngineStatements(inner, self._prep, text_intervals=wire is not None)
        self._inner = inner
        self._client = client
        self._wire = wire
        self._deallocate: Deallocator = lambda _sql: None
        self._jobs = jobs
        self._job: EmbeddedJobs | None = None
        self._wrote: dict[str, int | None] = {}

    @property
    def pid(self) -> int:
        return self._inner.pid

    @property
    def transaction_status(self) -> str:
        return self._inner.transaction_status

    @property
    def on_progress(self) -> Callable[[StatementProgress], None] | None:
        return self._inner.on_progress

    @on_progress.setter
    def on_progress(self, told: Callable[[StatementProgress], None] | None) -> None:
        self._inner.on_progress = told

    @property
    def last_ai_stats(self) -> AiStats:
        return self._inner.last_ai_stats

    async def cancel(self) -> None:
        """Cancel the running statement, if any, and a job that runs statements."""
        await (self._inner if self._job is None else self._job).cancel()

    def set_deallocator(self, deallocate: Deallocator) -> None:
        """Let DEALLOCATE reach the prepared statements of the wire protocol."""
        self._deallocate = deallocate

    async def start(self) -> None:
        """Look up the engine's facts and apply the settings of the startup message."""
        await self._prep.learn()
        for name, value in self._startup_settings():
            if name.lower() != "application_name":
                await self._commands.assign(PgSettingCommand("SET", name, value))
        self.settings.take_changes()

    def _startup_settings(self) -> list[tuple[str, str]]:
        found = [(k, v) for k, v in self._client.options.items() if k != "options"]
        words = iter(shlex.split(self._client.options.get("options", "")))
        for word in words:
            text = next(words, "") if word == "-c" else word.removeprefix("-c").removeprefix("--")
            name, _, value = text.partition("=")
            found.append((name.replace("-", "_"), value))
        return found

    async def learn_tables(self, sql: str) -> None:
        """Look up, before a statement runs, the numbers of its tables for ``numbered``."""
        if self._wire is not None:
            await self._wire.numbers.learn(sql, self._inner)

    def numbered(self, columns: tuple[Column, ...], sql: str) -> tuple[Column, ...]:
        """Add the numbers of their tables to the columns of a statement's result."""
        if self._wire is None:
            return columns
        return self._wire.numbers.numbered(columns, sql, self._inner, self._prep.naming)

    async def copy_in(
        self, table: str, columns: Sequence[str], rows: Sequence[Sequence[str | None]]
    ) -> int:
        await self._prep.learn_for(table, "")
        count = await self._engine.copy_in(table, columns, rows)
        self._note_write({name_value(token) for token in tokenize(table)}, count)
        if self.transaction_status == "I":
            self._tell_written(committed=True)
        return count

    async def fail_transaction(self) -> None:
        """Fail the open transaction, after an error that the engine never saw."""
        if self.transaction_status == "T":
            await self.cursors.close_streams()
            with contextlib.suppress(TierKVError):  # always refused, as intended
                await self._inner.execute("ROLLBACK TO SAVEPOINT own_nothing")

    async def own_rows(self, sql: str) -> Sequence[tuple[Any, ...]]:
        """Return the rows of an internal query, for the needs of the protocol."""
        return (await self._inner.execute(sql)).rows

    async def describe(self, sql: str) -> StatementDescription:
        word = first_word(sql)
        await self._prep.learn_for(sql, word)
        described = await self._describe(sql, word)
        if described.columns is None:
            return described
        return replace(described, columns=with_names(described.columns, sql))

    async def _describe(self, sql: str, word: str) -> StatementDescription:
        if word == "DECLARE":
            query = await self._prep.ready(parse_declare(sql).query)
            return replace(await self._inner.describe(query.text), columns=None)
        if word == "FETCH":
            return StatementDescription(self.cursors.fetch_columns(sql))
        command = parse_setting_command(sql) if word in ("SHOW", "SELECT") else None
        if command is not None and command.verb == "SET_CONFIG":
            return StatementDescription(SET_CONFIG_COLUMN)
        if command is not None and self._commands.shows(command):
            return StatementDescription(self._commands.columns(command))
        if word in _NO_ROWS or _job_command(sql, word) is not None:
            return StatementDescription(None)
        return await self._engine.describe(sql)

    def timed(self) -> contextlib.AbstractContextManager[None]:
        """Cancel the enclosed work after ``statement_timeout``; see StatementTimer."""
        return self._timer.running(TimeLeft(self.settings.statement_timeout_s))

    async def execute(self, sql: str, params: Params = None) -> StatementResult:
        async with self._client_names():
            with self.timed():
                return await self._execute(sql, params)

    @contextlib.asynccontextmanager
    async def _client_names(self) -> AsyncIterator[None]:
        """Use the client's names in a session's first error, too."""
        try:
            yield
        except UserError as error:
            if not self._prep.learned:
                await self._prep.learn()
                self._prep.naming.speak(error)
            raise

    async def _execute(self, sql: str, params: Params) -> StatementResult:
        word = first_word(sql)
        handler = _HANDLERS.get(word)
        failed = self.transaction_status == "E"
        await self._prep.learn_for(sql, word)
        try:
            result = await handler(self, sql, params) if handler is not None else None
            if result is None:
                result = await self._engine.run(sql, params)
            if word in _WRITES and self._jobs is not None and self._is_watched(self._jobs):
                self._note_write(written_names(sql), written_rows(result.command_tag))
        finally:
            if self.transaction_status == "I":
                self._tell_written(committed=word not in _GIVES_UP and not failed)
                self.settings.end_transaction()
                self.cursors.end_transaction(committed=word not in _GIVES_UP and not failed)
        if result.columns is None:
            return result
        return replace(result, columns=with_names(result.columns, sql))

    def _is_watched(self, jobs: RunningJobs) -> bool:
        """Tell whether the names of a write are kept; a table may be watched at COMMIT only."""
        is_open = self.transaction_status != "I"
        written = jobs.written
        return bool(written.watched or written.counts or jobs.sources.watched or is_open)

    def _note_write(self, names: set[str], rows: int | None) -> None:
        """Note what a statement wrote, until the transaction ends."""
        for name in names:
            before = self._wrote.get(name, 0)
            self._wrote[name] = None if rows is None or before is None else before + rows

    def _tell_written(self, *, committed: bool) -> None:
        """Tell the keepers which names committed writes had."""
        if self._wrote and committed and self._jobs is not None:
            self._jobs.written.count(self._wrote)
            self._jobs.written.note(self._wrote)
            self._jobs.sources.note(self._wrote)
        self._wrote.clear()

    async def execute_rows(self, sql: str, params: Params = None) -> StatementResult | RowStream:
        """Run a statement and stream its rows; only AI calls take long enough for a stream."""
        left = TimeLeft(self.settings.statement_timeout_s)
        async with self._client_names():
            with self._timer.running(left):
                return await self._execute_rows(sql, params, left)

    async def _execute_rows(
        self, sql: str, params: Params, left: TimeLeft
    ) -> StatementResult | RowStream:
        await self._prep.learn_for(sql, first_word(sql))
        opened = await self._engine.open_stream(sql, params)
        if opened is None:
            return await self._execute(sql, params)
        columns = with_names(opened.columns or (), sql)
        if isinstance(opened, StatementResult):
            return replace(opened, columns=columns)
        return NamedRows(opened, columns, self._timer, left)

    async def _on_setting(self, sql: str, params: Params) -> StatementResult | None:
        return await self._commands.run(sql)

    # Cursors, transactions and no-op commands

    async def _on_select(self, sql: str, params: Params) -> StatementResult | None:
        if "set_config" not in sql.lower():
            return None
        return await self._on_setting(sql, params)

    async def _on_create(self, sql: str, params: Params) -> StatementResult | None:
        done = await self._on_job(sql, params)
        return done or await self._engine.create(sql, params)

    async def _on_job(self, sql: str, params: Params) -> StatementResult | None:
        command = _job_command(sql, first_word(sql))
        if command is None:
            return None
        if self._jobs is None:
            raise FeatureNotSupportedError("jobs need a session of a front")
        from tierkv.dbfront.jobs.ai_tables import AiTables
        from tierkv.dbfront.jobs.embedded_jobs import EmbeddedJobs
        from tierkv.dbfront.jobs.job_commands import JobCommands
        from tierkv.dbfront.jobs.kv_indexes import KvIndexes
        from tierkv.dbfront.jobs.source_watch import EmbeddedWatch

        async def execute(text: str) -> StatementResult:
            return await self._execute(text, None)

        jobs = self._jobs
        self._job = EmbeddedJobs(self._inner, execute, self._client, jobs)
        try:
            if isinstance(command, KvIndexCommand):
                watch = EmbeddedWatch(self._job, jobs.written, keeps=jobs.keeps)
                return await KvIndexes(self._job, jobs.clock, watch).run(command)
            if isinstance(command, AiTableCommand):
                watch = EmbeddedWatch(self._job, jobs.sources, keeps=jobs.keeps)
                tables = AiTables(self._job, jobs.clock, watch, jobs.sources.changed)
                return await tables.run(command)
            wake = jobs.jobs_changed if jobs.keeps else None
            commands = JobCommands(self._job, jobs.clock, jobs.run_parts, wake, jobs.queue)
            return await commands.run(command)
        finally:
            self._job = None

    async def _on_alter(self, sql: str, params: Params) -> StatementResult | None:
        return await self._on_job(sql, params) or await self._engine.alter(sql, params)

    async def _on_insert(self, sql: str, params: Params) -> StatementResult | None:
        return await self._engine.insert(sql, params)

    async def _on_declare(self, sql: str, params: Params) -> StatementResult | None:
        declaration = parse_declare(sql)
        if not queries.is_query(declaration.query):
            queries.refuse_writing_cursor(declaration.query)
        if self.transaction_status == "I" and not declaration.hold:
            raise SqlError(
                "DECLARE CURSOR can only be used in transaction blocks", sqlstate="25P01"
            )
        self.cursors.refuse_taken(declaration.name)
        await self.learn_tables(declaration.query)
        opened = None
        if not declaration.needs_all_rows:
            opened = await self._engine.open_stream(declaration.query, params)
        if opened is None:
            opened = await self._engine.run(declaration.query, params)
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
            await self._on_deallocate(sql, params)
            await self.cursors.close(None)
            self.settings.reset("all")
        return StatementResult(" ".join(words))

    async def _on_deallocate(self, sql: str, params: Params) -> StatementResult | None:
        words = [token.upper for token in tokens(sql) if token.text != ";"]
        result = self._deallocate(sql)
        if words[-1] != "ALL" or self.transaction_status == "E":
            return result
        await self._engine.deallocate_all()
        return StatementResult("DEALLOCATE ALL")

    async def _on_listen(self, sql: str, params: Params) -> StatementResult | None:
        raise FeatureNotSupportedError("LISTEN and NOTIFY are not supported")

    async def _on_unlisten(self, sql: str, params: Params) -> StatementResult | None:
        return StatementResult("UNLISTEN")


Handler = Callable[..., Any]


def written_names(sql: str) -> set[str]:
    """Return names, among them all tables written by a statement; pure.

    The query of an INSERT reads only; its tables are left out.
    """
    tokens = tokenize(sql)
    if tokens and tokens[0].upper == "INSERT":
        tokens = list(takewhile(lambda token: token.upper not in _QUERIES, tokens))
    return {name_value(token) for token in tokens}


def written_rows(tag: str) -> int | None:
    """Return how many rows a statement wrote, from its command tag; None: not known; pure."""
    word, _, rest = tag.partition(" ")
    if word in _COUNTED:
        number = rest.rpartition(" ")[2]
        return int(number) if number.isdecimal() else None
    changes_table = word == "TRUNCATE" or (word in _DEFINES and rest.startswith("TABLE"))
    return None if changes_table or word not in _DEFINES else 0


_COUNTED: Final = frozenset({"INSERT", "UPDATE", "DELETE", "MERGE", "COPY"})
_DEFINES: Final = frozenset({"CREATE", "ALTER", "DROP", "SELECT"})
_QUERIES: Final = frozenset({"SELECT", "VALUES", "WITH", "FROM", "TABLE", "DEFAULT"})

_WRITES: Final = frozenset(
    {"INSERT", "UPDATE", "DELETE", "MERGE", "COPY", "TRUNCATE", "WITH", "ALTER", "DROP", "CREATE",
     "EXECUTE"}
)  # fmt: skip
"""First words of statements that may write to a table."""

_JOB_VERBS: Final = frozenset(
    {"CREATE", "RESUME", "RUN", "CANCEL", "DROP", "CALL", "REFRESH", "ALTER"}
)
_HANDLERS: Final[dict[str, Handler]] = {
    "SET": DialectSession._on_setting,
    "RESET": DialectSession._on_setting,
    "SHOW": DialectSession._on_setting,
    "SELECT": DialectSession._on_select,
    "CREATE": DialectSession._on_create,
    "ALTER": DialectSession._on_alter,
    "INSERT": DialectSession._on_insert,
    "DECLARE": DialectSession._on_declare,
    "FETCH": DialectSession._on_fetch,
    "MOVE": DialectSession._on_fetch,
    "CLOSE": DialectSession._on_close,
    "BEGIN": DialectSession._on_begin,
    "START": DialectSession._on_begin,
    "COMMIT": DialectSession._on_end,
    "END": DialectSession._on_end,
    "ROLLBACK": DialectSession._on_end,
    "ABORT": DialectSession._on_end,
    "DISCARD": DialectSession._on_discard,
    "DEALLOCATE": DialectSession._on_deallocate,
    "LISTEN": DialectSession._on_listen,
    "NOTIFY": DialectSession._on_listen,
    "UNLISTEN": DialectSession._on_unlisten,
    "SAVEPOINT": DialectSession._on_savepoint,
    "RELEASE": DialectSession._on_savepoint,
    "RESUME": DialectSession._on_job,
    "RUN": DialectSession._on_job,
    "CANCEL": DialectSession._on_job,
    "DROP": DialectSession._on_job,
    "CALL": DialectSession._on_job,
    "REFRESH": DialectSession._on_job,
}


def _job_command(sql: str, word: str) -> JobCommand | AiTableCommand | KvIndexCommand | None:
    lowered = sql.lower() if word in _JOB_VERBS else ""
    if "job" not in lowered and "table" not in lowered and "index" not in lowered:
        return None
    found = tokenize(sql)
    return job_command(found, sql) or ai_table_command(found, sql) or kv_index_command(found, sql)
