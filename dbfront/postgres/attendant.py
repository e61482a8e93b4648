"""Handles the messages of AI calls, ``tierkv.*`` settings and admin views in a relayed session.

Each relayed session has one attendant. ``matters`` is called while bytes pass; all other methods
run in the relay's task for the attendant.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Final

from tierkv.dbfront.accounts.statistics import StatementProgress
from tierkv.dbfront.contracts import ClientInfo
from tierkv.dbfront.jobs.ai_tables import AiTables
from tierkv.dbfront.jobs.job_commands import JobCommands
from tierkv.dbfront.jobs.job_views import JOB_VIEWS, VIEW_QUERIES, view_rows_of
from tierkv.dbfront.jobs.kv_indexes import KvIndexes
from tierkv.dbfront.jobs.source_watch import TABLES_CHANGED, TriggerWatch
from tierkv.dbfront.pgwire.protocol import replies
from tierkv.dbfront.postgres.relay import Relay
from tierkv.dbfront.postgres.statements.ai_run import AiRun, AiServices
from tierkv.dbfront.postgres.statements.block import Block
from tierkv.dbfront.postgres.statements.extended import Batch, NamedStatements
from tierkv.dbfront.postgres.statements.relayed_jobs import (
    HAS_KEEPER,
    HELD_PARTS,
    RelayedJobs,
    notice_frame,
)
from tierkv.dbfront.postgres.statements.session_indexes import HAS_JOBS, SessionIndexes
from tierkv.dbfront.postgres.statements.simple import SimpleQuery
from tierkv.dbfront.postgres.statements.statement import (
    RESETS,
    Statement,
    StatementPlanner,
    may_matter,
)
from tierkv.dbfront.postgres.statements.windows import WindowCursors, may_fetch, touches
from tierkv.dbfront.postgres.wire import messages
from tierkv.dbfront.postgres.wire.exchange import RelayExchange
from tierkv.dbfront.postgres.wire.messages import decoded
from tierkv.dbfront.postgres_values.parameters import declared_types, without_void
from tierkv.dbfront.statement_results import StatementResult
from tierkv.dbfront.views.admin import joined_rows, refuse_reset, to_json, visible_rows
from tierkv.dbfront.views.statistics import Activity, activity_row
from tierkv.kvcore.errors import FeatureNotSupportedError, TierKVError
from tierkv.sql.cluster_command import in_transaction
from tierkv.sql.jobs.ai_table_command import AiTableCommand
from tierkv.sql.jobs.job_tables import CHANNEL
from tierkv.sql.jobs.kv_index_command import ON_CHANGE, KvIndexCommand
from tierkv.sql.views import Row


class AiAttendant:
    """The Attendant of one session; for the contract see dbfront/postgres/relay.py::Attendant.

    Attributes:
        activity: the running statement with AI calls.
    """

    def __init__(self, relay: Relay, services: AiServices) -> None:
        self.activity = Activity()
        self._relay = relay
        self._services = services
        services.sessions.add(self)
        self._exchange = RelayExchange(relay, self._reset if services.reset else None)
        self._planner = StatementPlanner()
        self._names = NamedStatements({}, {})
        self._indexes = SessionIndexes(services.clock, relay.books.parameters)
        self._run: AiRun | None = None
        self._job: RelayedJobs | None = None
        self._cursors = WindowCursors(self._exchange, relay.books.parameters, self._planner)
        self._fetching: dict[bytes, str] = {}
        login = relay.login
        self._client = ClientInfo(
            login.user, login.database, login.application_name, relay.client.peer
        )

    @property
    def names_matter(self) -> bool:
        """See Attendant."""
        return bool(self._names or self._cursors)

    def matters(self, message: bytes) -> bool:
        """See Attendant."""
        kind = message[:1]
        if self._cursors and self._relay.books.status == "I":
            self._cursors.clear()
        if kind == b"Q":
            # PostgreSQL drops its unnamed statement and portal, too.
            self._names.prepared.pop(b"", None)
            self._names.portals.pop(b"", None)
            fetches = bool(self._cursors and may_fetch(message))
            return fetches or b"" in self._cursors or may_matter(message)
        if kind == b"P":
            self._note_fetch(message)
            return may_matter(message) or messages.names(message)[0] in self._names.prepared
        if kind == b"B":
            portal, statement = messages.names(message)
            if self._cursors and (statement in self._fetching or portal in self._cursors):
                return True
            return statement in self._names.prepared or portal in self._names.portals
        if kind == b"E":
            return message[5:-5] in self._names.portals or message[5:-5] in self._cursors
        if message[:1] + message[5:6] == b"CP" and message[6:-1] in self._cursors:
            return True
        return kind == b"C" and message[6:-1] in (
            self._names.prepared if message[5:6] == b"S" else self._names.portals
        )

    async def attend(self, message: bytes) -> None:
        """See Attendant."""
        try:
            if message[:1] == b"Q":
                await self._query(message)
            else:
                await self._batch(message)
        finally:
            self._run = None
            self.activity = Activity()

    def cancel(self) -> bool:
        """See Attendant."""
        if self._job is not None:
            self._job.cancel()
        run = self._cursors.run or self._run
        return run is not None and run.cancel()

    def ended(self) -> None:
        """See Attendant."""
        self._cursors.clear()
        self._services.sessions.discard(self)

    async def _query(self, message: bytes) -> None:
        if self._relay.books.skipping:
            return  # PostgreSQL would not read the message either.
        await self._cursors.forget("", sync=True)
        parameters = self._relay.books.parameters
        query = SimpleQuery(
            self._exchange, parameters, self._make_run, self._refresh, self._cursors
        )
        try:
            statements = self._planner.statements(decoded(message[5:-1], parameters))
        except TierKVError as error:
            if self._exchange.status == "E":
                self._relay.pass_on(message)  # PostgreSQL would not have read the message.
                return
            await query.refuse(error)
            return
        if any(statement.command is not None for statement in statements):
            await self._change_cluster(query, statements)
            return
        if any(statement.job is not None for statement in statements):
            await self._run_job(query, statements)
            return
        fetches = self._cursors and any(touches(statement.text) for statement in statements)
        if not fetches and all(statement.plan is None for statement in statements):
            self._relay.pass_on(message)
            return
        await query.run(statements)

    async def _change_cluster(self, query: SimpleQuery, statements: list[Statement]) -> None:
        """Carry out a statement about the cluster, which PostgreSQL does not see."""
        command, change = statements[0].command, self._services.change_cluster
        try:
            if command is None or len(statements) > 1 or change is None:
                raise _stands_alone("cluster")
            if self._exchange.status != "I":
                raise in_transaction(command)
            await self._learn_roles(Block(self._exchange, sync=True))
            await change(self._client.user, command)
        except TierKVError as error:
            await query.refuse(error)
            return
        await self._exchange.send(
            [replies.command_complete(command.tag), replies.ready_for_query("I")]
        )

    async def _run_job(self, query: SimpleQuery, statements: list[Statement]) -> None:
        """Carry out a statement about a job, which PostgreSQL does not see."""
        command, services = statements[0].job, self._services
        self._job = job = RelayedJobs(
            self._relay,
            self._planner,
            self._make_run,
            self._refresh,
            self._cursors,
            services.job_holders,
            tenant=services.tenant_of(self._client),
        )
        try:
            if command is None or len(statements) > 1:
                raise _stands_alone("job")
            if isinstance(command, KvIndexCommand):
                watch = TriggerWatch(job, services.keeper_refusal)
                result = await KvIndexes(job, services.clock, watch).run(command)
            elif isinstance(command, AiTableCommand):
                result = await self._run_ai_table(job, command)
            else:
                commands = JobCommands(
                    job, services.clock, services.run_parts, queue=services.queue
                )
                result = await commands.run(command)
        except TierKVError as error:
            await query.refuse(error)
            return
        finally:
            self._job = None
        parameters = self._relay.books.parameters
        notices = [notice_frame(notice, parameters) for notice in result.notices]
        done = [replies.command_complete(result.command_tag), replies.ready_for_query("I")]
        await self._exchange.send([*notices, *done])

    async def _run_ai_table(self, job: RelayedJobs, command: AiTableCommand) -> StatementResult:
        services, client = self._services, self._client
        why_not = services.keeper_refusal(client.user, client.database)
        changed = None if why_not else asyncio.Event()
        watch = TriggerWatch(job, services.keeper_refusal)
        result = await AiTables(job, services.clock, watch, changed, why_not).run(command)
        if changed is not None and changed.is_set():
            await job.own(f"SELECT pg_catalog.pg_notify('{CHANNEL}', '{TABLES_CHANGED}')")
        return result

    async def _batch(self, message: bytes) -> None:
        batch = Batch(
            self._relay, self._exchange, self._names, self._make_run, self._refresh,
            self._cursors, self._fetching,
        )  # fmt: skip
        try:
            statement = self._parsed(message)
        except TierKVError as error:
            await batch.fail(error)
        else:
            if statement is None and message[:1] == b"P":
                self._names.prepared.pop(messages.names(message)[0], None)
                self._relay.pass_on(message)
                return
            await batch.take(message, statement)
        while (message := await self._relay.next_message())[:1] != b"S":
            if message[:1] in (b"Q", b"F") and not batch.failed:
                break
            if message[:1] == b"X":
                raise ConnectionResetError("the client said goodbye")
            try:
                statement = self._parsed(message)
            except TierKVError as error:
                await batch.fail(error)
            else:
                await batch.take(message, statement)
        await batch.sync(tell=message[:1] == b"S")
        if message[:1] == b"Q":
            await self._query(message)
        elif message[:1] == b"F":
            self._relay.pass_on(message)

    def _parsed(self, message: bytes) -> Statement | None:
        """Plan the statement of a Parse; return None for a plain statement or another message.

        Raises:
            UserError: AI calls that can't work.
        """
        if message[:1] == b"P":
            self._note_fetch(message)
        if message[:1] != b"P" or not may_matter(message):
            return None
        name, sent = messages.names(message)
        types = message[5 + len(name) + 1 + len(sent) + 1 :]
        sql = decoded(sent, self._relay.books.parameters)
        text = without_void(sql, declared_types(types))
        try:
            statements = self._planner.statements(text)
        except TierKVError:
            if self._exchange.status == "E":
                return None  # PostgreSQL would not have read the message.
            raise
        if statements and (statements[0].command or statements[0].job) is not None:
            raise FeatureNotSupportedError(
                "behind PostgreSQL, a statement about the cluster or a job can't be prepared",
                hint="Send it as a simple query, without parameters, as psql does.",
            )
        if len(statements) != 1 or statements[0].plan is None:
            return None
        return statements[0]

    def _note_fetch(self, message: bytes) -> None:
        """Store a prepared FETCH, perhaps for a cursor declared later."""
        name, text = messages.names(message)
        self._fetching.pop(name, None)
        if may_fetch(text):
            self._fetching[name] = decoded(text, self._relay.books.parameters)

    def _make_run(
        self, statement: Statement, block: Block, *, sync: bool, alone: bool = True
    ) -> AiRun:
        self._run = AiRun(
            statement,
            self._exchange,
            block,
            self._services,
            self._client,
            sync=sync,
            alone=alone,
            pid=self._relay.login.pid,
            on_progress=self._progress,
            indexes=self._indexes,
        )
        self.activity.state, self.activity.query = "active", statement.text
        self.activity.query_start_s = self._services.clock.wall()
        return self._run

    def _progress(self, progress: StatementProgress) -> None:
        self.activity.progress = progress
        if self._run is not None and self._run.account is not None:
            self.activity.query_id = self._run.account.query_id

    def activity_row(self, asking: str) -> Row:
        """Return the session's row of tierkv.stat_activity."""
        activity = self.activity
        if activity.state != "active":
            busy = self._relay.books.waits_for_ready
            state = "active" if busy else _STATES[self._relay.books.status]
            activity = replace(activity, state=state)
        return activity_row(self._relay.login.pid, self._client, activity, asking=asking)

    async def _learn_roles(self, block: Block) -> None:
        """Note the user's roles in PostgreSQL, for rights and for what views show."""
        self._services.generator.rights.outside[self._client.user] = await block.roles()

    async def _refresh(self, views: frozenset[str], block: Block) -> None:
        """Write the rows of admin views into the views' settings."""
        await self._learn_roles(block)
        for view in sorted(views):
            rows = to_json(await self._view_rows(view, block))
            await block.before(
                messages.own_statement(
                    f"SELECT pg_catalog.set_config('tierkv.view_{view}', "
                    "pg_catalog.convert_from($1, 'UTF8'), false)",
                    [rows.encode()],
                    [messages.BYTEA],
                )
            )

    async def _reset(self, what: str | None) -> None:
        """Reset counters; any user's function can send the message that asks for it."""
        assert self._services.reset is not None
        refuse_reset(self._services.owners(self._client))
        await self._services.reset(what)

    async def _view_rows(self, view: str, block: Block) -> list[Row]:
        services = self._services
        if view == RESETS:
            refuse_reset(services.owners(self._client))
            return []
        if view in JOB_VIEWS:
            return await self._job_rows(view, block)
        if view == "stat_activity":
            rows = await joined_rows(
                services.siblings, services.activity(self._client.user), user=self._client.user
            )
            return visible_rows(view, rows, services.owners(self._client))
        client = self._client
        rows = [] if services.view_rows is None else await services.view_rows(view, client)
        if view in _NOT_TOLD:
            return [row | dict.fromkeys(_NOT_TOLD[view]) for row in rows]
        if view != "settings":
            return rows
        own = (await block.values()).settings.rows()
        names = ("name", "setting", "source", "description")
        rows = [row for row in rows if not row["name"].startswith("tierkv.")]
        return rows + [dict(zip(names, row, strict=True)) for row in own]

    async def _job_rows(self, view: str, block: Block) -> list[Row]:
        """Return the rows of a view of jobs, as PostgreSQL shows them to the user."""

        async def texts(sql: str) -> list[tuple[str | None, ...]]:
            reply = await block.before(messages.own_statement(sql))
            parameters = self._relay.books.parameters
            return [
                tuple(None if value is None else decoded(value, parameters) for value in row)
                for row in reply.all_rows()
            ]

        if await texts(HAS_JOBS) != [("t",)]:
            return []
        held = {str(name) for (name,) in await texts(HELD_PARTS)}
        listens = view == "kv_indexes" and await texts(HAS_KEEPER) == [("t",)]

        def unseen(owner: str, name: str, refresh_s: float) -> int | None:
            """Triggers tell at once of writes, and the keeper records that they wait."""
            return 0 if listens and refresh_s == ON_CHANGE else None

        rows = view_rows_of(view, await texts(VIEW_QUERIES[view]), held.__contains__, unseen)
        if view != "kv_indexes":
            return rows
        return await self._services.index_rows(rows, texts, self._client)


_NOT_TOLD: Final = {
    "stat_statements": ("ai_calls", "ai_calls_deduped"),
    "stat_functions": ("rows",),
    "query_log": ("ai_calls",),
}
"""Columns counting rows: PostgreSQL reports questions, not the number of rows with a question."""

_STATES: Final = {"I": "idle", "T": "idle in transaction", "E": "idle in transaction (aborted)"}


def _stands_alone(what: str) -> FeatureNotSupportedError:
    return FeatureNotSupportedError(
        f"a statement about the {what} stands alone in its query string",
        hint="Send one statement per query.",
    )
