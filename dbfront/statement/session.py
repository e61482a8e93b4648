"""A SQL session over the embedded engine: transactions, ``tierkv.*`` settings, and streams of rows.

dbfront/statement/server.py opens the sessions, which implement SqlSession. This module checks the
client's input and handles transactions and settings; every other statement goes to
dbfront/statement/executor.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, TypeVar

from tierkv.dbfront.accounts.statement_entry import StatementEntry
from tierkv.dbfront.accounts.statistics import AiStats, StatementProgress
from tierkv.dbfront.calls.answers import AnswerBook
from tierkv.dbfront.contracts import ClientInfo
from tierkv.dbfront.databases.duckdb_connection import DuckDbConnection
from tierkv.dbfront.databases.schema_owners import SessionSchemas
from tierkv.dbfront.statement.executor import StatementContext, run_statement
from tierkv.dbfront.statement.explain import EXPLAIN_COLUMNS
from tierkv.dbfront.statement.results import StatementRows, release
from tierkv.dbfront.statement.settings import SessionSettings
from tierkv.dbfront.statement.transaction import ClientTransaction, warned
from tierkv.dbfront.statement_results import (
    Column,
    RowStream,
    StatementDescription,
    StatementResult,
)
from tierkv.dbfront.views.admin import to_json
from tierkv.dbfront.views.statistics import Activity
from tierkv.kvcore import limits
from tierkv.kvcore.errors import (
    CancelledByUserError,
    SqlError,
    TierKVError,
    UserError,
)
from tierkv.sql.cluster_command import (
    OWNED_VERBS,
    cluster_command,
    in_transaction,
    without_password,
)
from tierkv.sql.plan.changes import may_change
from tierkv.sql.plan.kept_names import refuse_kept
from tierkv.sql.plan.parameters import parameter_types
from tierkv.sql.plan.plan import Explain, SqlStatement, StatementPlan
from tierkv.sql.settings import SettingCommand, setting_command, setting_spec
from tierkv.sql.text.lexer import Token, tokenize
from tierkv.sql.text.statement import StatementKind, classify, makes_function, split_statements
from tierkv.sql.views import view_variable

if TYPE_CHECKING:
    from tierkv.dbfront.statement.server import DuckDbSqlServer

T = TypeVar("T")
_STATES = {"I": "idle", "T": "idle in transaction", "E": "idle in transaction (aborted)"}
_NUL: Final = 'invalid byte sequence for encoding "UTF8": 0x00'


class DuckDbSession:
    """One client's session.

    Attributes:
        last_ai_stats: counters of the running statement with AI calls, or else of the last such
            statement.
        total_ai_stats: counters of the whole session.
        on_progress: progress callback, called on the event loop; may be set by the client.
        settings: the session's tierkv settings.
        activity: current activity, for the admin views.
        number: secret number, with which functions of the engine find the session.
    """

    def __init__(
        self,
        server: DuckDbSqlServer,
        connection: DuckDbConnection,
        client: ClientInfo,
        pid: int,
        settings: SessionSettings,
    ) -> None:
        self.last_ai_stats = AiStats()
        self.total_ai_stats = AiStats()
        self.on_progress: Callable[[StatementProgress], None] | None = None
        self.settings = settings
        self.activity = Activity()
        self.client = client
        self.number = connection.number
        self._server = server
        self._connection = connection
        self._transaction = ClientTransaction(connection, pid)
        self.catalogue_state = self._transaction.catalogue_state
        self._pid = pid
        self._running: asyncio.Task[Any] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._rows: StatementRows | None = None
        self._cancelling = False
        self._schemas = SessionSchemas(
            connection,
            client.user,
            lambda: server.table_access(client),
            lambda moved: server.move_tables(client, moved),
        )

    @property
    def pid(self) -> int:
        """Number of the session, as shown to clients."""
        return self._pid

    @property
    def transaction_status(self) -> str:
        """``I``, ``T`` or ``E``, as in ReadyForQuery."""
        return self._transaction.status

    def split(self, sql: str) -> list[str]:
        """Cut a string into statements."""
        _check_length(sql)
        return split_statements(SqlStatement.of(sql))

    async def describe(self, sql: str) -> StatementDescription:
        """Return columns and parameters of a statement without running the statement or a model."""
        _check_length(sql)
        statement = SqlStatement.of(sql)
        account = self._account(without_password(statement))
        try:
            async with statement.read_ahead():
                return await self._describe(statement)
        except TierKVError as error:
            account.ended(AiStats(), error)
            raise

    async def _describe(self, sql: SqlStatement) -> StatementDescription:
        types = parameter_types(sql)
        tokens = sql.tokens()
        refuse_kept(tokens, self._connection.kept_names)
        await self._check_tables(sql, tokens, runs=False)
        command = setting_command(tokens)
        if command is not None:
            shown = (Column(command.name, "VARCHAR"),) if command.verb == "SHOW" else None
            return StatementDescription(shown, types)
        if cluster_command(tokens) is not None:
            return StatementDescription(None, types)
        plan = sql.plan(self._connection.new_key_base)
        await self._keep_rows()
        self._transaction.check_usable()
        try:
            return StatementDescription(await self._columns(plan), types)
        except TierKVError:
            self._transaction.fail()
            raise

    async def execute(
        self, sql: str, params: Sequence[Any] | Mapping[str, Any] | None = None
    ) -> StatementResult:
        """Run one statement; see SqlSession."""
        _check_length(sql)
        return await self._exclusively(
            self._execute(SqlStatement.of(sql), _named_parameters(params))
        )

    async def execute_own(self, sql: str) -> Sequence[tuple[Any, ...]]:
        """Run a statement of the front itself; see SqlSession."""
        return (await self._exclusively(self._connection.command(sql))).rows

    async def execute_rows(
        self, sql: str, params: Sequence[Any] | Mapping[str, Any] | None = None
    ) -> StatementResult | RowStream:
        """Run one statement and stream its rows; see SqlSession."""
        _check_length(sql)
        rows = StatementRows()
        task = await self._start(
            self._execute(SqlStatement.of(sql), _named_parameters(params), rows)
        )
        result = await rows.started(task)
        if result is not None:
            return result
        self._rows = rows
        return rows

    async def copy_in(
        self, table: str, columns: Sequence[str], rows: Sequence[Sequence[str | None]]
    ) -> int:
        """Load rows of text into a table; ``table`` is quoted SQL, ``columns`` are plain names."""
        return await self._exclusively(self._copy_in(table, columns, rows))

    async def cancel(self) -> None:
        """Cancel the running statement, if any."""
        if self._running is not None and not self._running.done():
            self._cancelling = True
            self._running.cancel()

    async def close(self) -> None:
        """Cancel the running statement, roll back, and free the session; repeated calls wait."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        await self.cancel()
        if self._running is not None:
            await asyncio.wait([self._running])
        await self._connection.close()
        self._server.forget(self)

    async def _exclusively(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine as the session's only running task, so ``cancel`` can stop the task."""
        return await (await self._start(work))

    async def _start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        await self._keep_rows()
        if self._running is not None and not self._running.done():
            work.close()
            raise SqlError("the session is already running a statement", sqlstate="55000")
        self._cancelling = False
        self._running = task = asyncio.create_task(self._noting_failure(work))
        task.add_done_callback(lambda done: release(done, work))
        return task

    async def _keep_rows(self) -> None:
        """Run an open stream to its end, because another statement needs the engine."""
        if self._rows is not None:
            rows, self._rows = self._rows, None
            await rows.keep_rest()

    async def _noting_failure(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            return await work
        except asyncio.CancelledError:
            self._transaction.fail()
            if not self._cancelling:
                raise
            raise CancelledByUserError("canceling statement due to user request") from None
        except TierKVError:
            self._transaction.fail()
            raise
        finally:
            self.activity.state = _STATES[self._transaction.status]
            self.activity.progress = None

    async def _execute(
        self, sql: SqlStatement, params: Mapping[str, Any], sink: StatementRows | None = None
    ) -> StatementResult:
        shown = without_password(sql)
        account, stats = self._account(shown), AiStats()
        self.activity.state, self.activity.query = "active", shown
        self.activity.query_start_s = self._server.clock.wall()
        self.activity.query_id = account.query_id
        try:
            context = self._context(stats, account, sink)
            async with sql.read_ahead():
                result = await self._run(sql, params, account, context)
        except BaseException as error:
            account.ended(stats, error)
            raise
        account.ended(stats)
        return result

    def _account(self, sql: str) -> StatementEntry:
        tag = str(self.settings.get("tierkv.query_tag"))
        return self._server.statements.open(self.client, self._pid, sql, tag)

    async def _run(
        self,
        sql: SqlStatement,
        params: Mapping[str, Any],
        account: StatementEntry,
        context: StatementContext,
    ) -> StatementResult:
        tokens = sql.tokens()
        refuse_kept(tokens, self._connection.kept_names)
        await self._check_tables(sql, tokens)
        kind = classify(tokens)
        if kind in (StatementKind.BEGIN, StatementKind.COMMIT, StatementKind.ROLLBACK):
            account.planned(kind.value, holds_calls=False)
            return await self._end_block(kind, tokens)
        if kind is StatementKind.SAVEPOINT:
            account.planned(kind.value, holds_calls=False)
            await self._keep_rows()
            return await self._transaction.savepoint_statement(tokens, self._remember)
        self._transaction.check_usable()
        command = setting_command(tokens)
        if command is not None:
            account.planned(kind.value, holds_calls=False)
            return self._setting(command)
        change = cluster_command(tokens)
        if change is not None:
            account.planned(kind.value, holds_calls=False)
            if self._transaction.status == "T":
                raise in_transaction(change)
            owned = self._schemas.owned_change
            await self._server.change_cluster(self.client.user, change, owned)
            if change.verb in OWNED_VERBS:  # DuckDB leaves a schema that is dropped.
                await self.enter_own_schema()
            return StatementResult(change.tag)
        if kind is StatementKind.RESET and tokens[-1].upper == "ALL":
            self.settings.reset_all()
            return StatementResult("RESET")
        inside = self._transaction.status == "T"
        self._connection.own_functions |= makes_function(tokens, temporary=not inside)
        generator = self._server.generator
        async with self._schemas.following(tokens, lambda: generator.rights.rights):
            with self._transaction.running(sql, kind, changed=may_change(tokens)):
                result = await run_statement(sql, params, context)
        if self._transaction.status != "T" and (told := await self._schemas.settle()):
            result = replace(result, notices=(*result.notices, *told))
        if kind is StatementKind.RESET:  # As in PostgreSQL, the path begins with the own schema.
            await self.enter_own_schema()
        return result

    async def _end_block(self, kind: StatementKind, tokens: list[Token]) -> StatementResult:
        """Run BEGIN, COMMIT or ROLLBACK."""
        commits = kind is StatementKind.COMMIT and self._transaction.status == "T"
        async with self._schemas.ending(commits=commits):
            return await self._transaction.block_statement(kind, tokens, self.settings)

    def _remember(self) -> Callable[[], None]:
        """Return a function that goes back to the settings and rights of a savepoint."""
        restores = self.settings.remember(), self._schemas.remember()

        def restore() -> None:
            for each in restores:
                each()

        return restore

    def _context(
        self, stats: AiStats, account: StatementEntry, sink: StatementRows | None
    ) -> StatementContext:
        tenant = self._server.tenant_of(self.client)
        return StatementContext(
            connection=self._connection,
            generator=self._server.generator,
            transaction=self._transaction,
            defaults=self.settings.call_defaults(tenant, self.client),
            policy=self.settings.error_policy(),
            clock=self._server.clock,
            refresh_views=self._refresh_views,
            on_progress=self._progress,
            on_finished=self._finished,
            stats=stats,
            account=account,
            execution=str(self.settings.get("tierkv.execution")),
            sink=sink,
            kv_indexes=self._server.kv_indexes_of(self.client),
        )

    def _progress(self, progress: StatementProgress) -> None:
        self.last_ai_stats = progress.stats
        self.activity.progress = progress
        if self.on_progress is not None:
            self.on_progress(progress)

    def _finished(self, stats: AiStats) -> None:
        self.last_ai_stats = stats
        self.total_ai_stats.add(stats)

    def _setting(self, command: SettingCommand) -> StatementResult:
        if command.verb == "SHOW":
            value = self.settings.show(command.name)
            name = setting_spec(command.name).name
            return StatementResult("SHOW", (Column(name, "VARCHAR"),), [(value,)])
        local = command.local
        if local and self._transaction.status == "I":
            setting_spec(command.name)
            return warned("SET", "SET LOCAL can only be used in transaction blocks", "25P01")
        self.settings.set(command.name, command.value, local=local)
        return StatementResult(command.verb)

    async def _copy_in(
        self, table: str, columns: Sequence[str], rows: Sequence[Sequence[str | None]]
    ) -> int:
        self._transaction.check_usable()
        into = f"INSERT INTO {table} VALUES (1)"
        await self._check_tables(into, tokenize(into))
        async with self._transaction.for_statement():
            await self._transaction.copied(table, columns, rows)
            count = await self._connection.copy_in(table, columns, rows)
        self._transaction.ran(StatementKind.COPY, changed=True)
        return count

    async def enter_own_schema(self) -> None:
        """Where users log in: look names up in the schema of the user first, if it exists."""
        generator, user = self._server.generator, self.client.user
        if await self._schemas.enter_own(lambda name: generator.rights.owns_schema(user, name)):
            self._transaction.names_changed()

    async def _check_tables(self, sql: str, tokens: list[Token], *, runs: bool = True) -> None:
        """Refuse other users' tables, where users log in."""
        leaves = self._transaction.status != "E"
        await self._schemas.check(sql, tokens, runs=runs, leaves=leaves)

    async def _columns(self, plan: StatementPlan) -> tuple[Column, ...] | None:
        if plan.explain is not Explain.NO:
            await self._connection.check(plan.engine_sql)
            return EXPLAIN_COLUMNS
        book = AnswerBook(plan.forms)
        if plan.returning_sql is not None:
            return await self._connection.describe(plan.returning_sql, book)
        if plan.kind is StatementKind.QUERY:
            return await self._connection.describe(plan.engine_sql, book)
        if plan.kind is StatementKind.SHOW or plan.shows:
            # SHOW only reads the catalogue, and the engine cannot describe it without a run.
            return (await self._connection.run(plan.engine_sql)).columns
        await self._connection.check(plan.engine_sql)
        return None

    async def _refresh_views(self, views: frozenset[str]) -> None:
        for view in sorted(views):
            rows = await self._server.view_rows(view, self)
            text = await asyncio.to_thread(to_json, rows) if len(rows) > 100 else to_json(rows)
            await self._connection.set_variable(view_variable(view), text)


def _named_parameters(params: Sequence[Any] | Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the values by name; ``$1`` and the first ``?`` are "1".

    Raises:
        SqlError: 22021, a text value contains a NUL byte, which could not be sent to a client.
    """
    if params is None:
        return {}
    pairs = params.items() if isinstance(params, Mapping) else enumerate(params, 1)
    named = {str(name): value for name, value in pairs}
    for name, value in named.items():
        if _holds_nul(value):
            raise SqlError(f"{_NUL} (parameter ${name})", sqlstate="22021")
    return named


def _holds_nul(value: Any) -> bool:
    """Return True if a text value, or any text inside a container, contains a NUL byte."""
    left = [value]
    while left:
        one = left.pop()
        if isinstance(one, str):
            if "\0" in one:
                return True
        elif isinstance(one, Mapping):
            left += [*one.keys(), *one.values()]
        elif isinstance(one, list | tuple):
            left += one
    return False


def _check_length(sql: str) -> None:
    """Refuse SQL that is too long or is not valid text.

    Raises:
        UserError: too long.
        SqlError: 22021.
    """
    if len(sql) > limits.MAX_SQL_BYTES:
        raise UserError(
            f"the SQL text has more than {limits.MAX_SQL_BYTES} characters",
            hint="Load data with COPY.",
        )
    if "\0" in sql:
        raise SqlError(_NUL, sqlstate="22021", position=sql.index("\0") + 1)
    try:
        sql.encode()
    except UnicodeEncodeError:
        # Python reads bytes it can't decode as lone surrogates; the engine takes text only.
        raise SqlError("the SQL text is not valid UTF-8", sqlstate="22021") from None
