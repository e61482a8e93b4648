"""Jobs in relayed sessions; implements JobSession over the client's connection to PostgreSQL.

dbfront/postgres/attendant.py makes a RelayedJobs per statement about a job. The statements
of a job run like simple queries of the client, but the answers stay here. A running part has an
advisory lock of the session; PostgreSQL frees the lock after any end of the session.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from tierkv.dbfront.accounts.statistics import AiStats
from tierkv.dbfront.jobs.job_errors import cancelled_by_client, pause_unless
from tierkv.dbfront.pgwire.protocol.replies import notice_fields
from tierkv.dbfront.postgres.relay import Relay
from tierkv.dbfront.postgres.statements.ai_rounds import PostgresError
from tierkv.dbfront.postgres.statements.ai_run import AiRun
from tierkv.dbfront.postgres.statements.block import Block
from tierkv.dbfront.postgres.statements.session_indexes import HAS_JOBS
from tierkv.dbfront.postgres.statements.simple import MakeRun, Refresh, SimpleQuery
from tierkv.dbfront.postgres.statements.statement import Statement, StatementPlanner
from tierkv.dbfront.postgres.statements.windows import WindowCursors
from tierkv.dbfront.postgres.wire import messages
from tierkv.dbfront.postgres.wire.exchange import RelayExchange, ServerReply
from tierkv.dbfront.postgres.wire.messages import decoded, encoded, shown
from tierkv.dbfront.statement_results import Notice, StatementResult
from tierkv.kvcore.errors import FeatureNotSupportedError, TierKVError
from tierkv.sql.jobs.job_statement import literal
from tierkv.sql.jobs.job_tables import KEEPERS_LOCK, SCHEMA

_LOCK_CLASS: Final = 0x746B766A
"""First number of the advisory locks of jobs; the second is a hash of the name."""

HELD_PARTS: Final = (
    f"SELECT p.owner || '/' || p.job || '/' || p.part FROM {SCHEMA}.parts p "
    "JOIN pg_catalog.pg_locks l ON l.locktype = 'advisory' "
    f"AND l.classid = {_LOCK_CLASS} AND l.objid = CAST(CAST(pg_catalog.hashtext(p.owner || '/' "
    "|| p.job || '/' || p.part) AS bigint) & 4294967295 AS oid)"
)
"""Names of the parts that sessions hold now, for the view of jobs."""

HAS_KEEPER: Final = (
    "SELECT EXISTS (SELECT FROM pg_catalog.pg_locks WHERE locktype = 'advisory' AND granted "
    f"AND classid = 0 AND objid = {KEEPERS_LOCK} AND database = (SELECT oid FROM "
    "pg_catalog.pg_database WHERE datname = pg_catalog.current_database()))"
)
"""Whether a front listens to the triggers of this database."""


class _QuietExchange(RelayExchange):
    """Keeps the results of a job's statements, which are not for the client."""

    def __init__(self, relay: Relay) -> None:
        super().__init__(relay)
        self._result: ServerReply | None = None
        self._unfinished: bytes | None = None

    async def send(self, pieces: Iterable[bytes]) -> None:
        """Drop frames."""

    async def deliver(self, reply: ServerReply, *, error: bytes | None = None) -> None:
        """Keep a result; ``error`` is set after a failed COMMIT."""
        self._result, self._unfinished = reply, error

    def take(self, failed: TierKVError | None) -> ServerReply:
        """Return the result of the ended statement.

        Raises:
            TierKVError: its error.
        """
        reply, self._result = self._result, None
        if failed is None and self._unfinished is not None:
            failed = PostgresError(self._unfinished)
        if failed is not None:
            raise _without_place(failed)
        assert reply is not None, "a statement has a result or an error"
        return reply


class _JobQuery(SimpleQuery):
    """A simple query of a job; keeps the error itself instead of its frame."""

    failed: TierKVError | None = None

    def _error(self, error: TierKVError, statement: Statement | None) -> bytes:
        self.failed = error
        return b""


class RelayedJobs:
    """A client's session, with the interface of a job.

    Attributes:
        owner: PostgreSQL's current user, once ``prepare`` has run.
        stats: counters of the calls of all statements.
    """

    type_function = "pg_typeof"

    def __init__(
        self,
        relay: Relay,
        planner: StatementPlanner,
        make_run: MakeRun,
        refresh: Refresh,
        cursors: WindowCursors,
        holders: dict[str, Callable[[], None]],
        *,
        tenant: str,
    ) -> None:
        """Use a session; nothing runs before ``prepare``.

        Args:
            relay: the session.
            planner: plans the statements of the session.
            make_run: creates the run of a statement with AI calls.
            refresh: fills admin views.
            cursors: the session's cursors.
            holders: how to cancel the jobs of this process, by held name.
            tenant: of the client's calls.
        """
        self.owner = ""
        self.user = relay.login.user
        self.tenant = tenant
        self.stats = AiStats()
        self._relay = relay
        self._exchange = _QuietExchange(relay)
        self._parameters = relay.books.parameters
        self._planner = planner
        self._make_run = make_run
        self._refresh = refresh
        self._cursors = cursors
        self._holders = holders
        self._cancelled = asyncio.Event()
        self._run: AiRun | None = None

    @property
    def in_transaction(self) -> bool:
        """See JobSession."""
        return self._exchange.status != "I"

    async def prepare(self) -> None:
        """See JobSession.

        Raises:
            FeatureNotSupportedError: the tables of jobs are missing in this database.
        """
        ((owner, has_jobs),) = await self.own(f"SELECT current_user, CAST(({HAS_JOBS}) AS text)")
        if has_jobs != "true":
            raise FeatureNotSupportedError(
                f"jobs need schema {SCHEMA} in this database",
                hint="Run what `tierkv postgres-sql` prints, as a user who may create schemas.",
            )
        self.owner = owner or ""

    async def execute(self, sql: str) -> StatementResult:
        """See JobSession."""
        if self._cancelled.is_set():
            raise cancelled_by_client()
        query = _JobQuery(
            self._exchange, self._parameters, self._counted_run, self._refresh, self._cursors
        )
        self._run = None
        try:
            await query.run(self._planner.statements(sql))
        finally:
            self._count()
        reply = self._exchange.take(query.failed)
        rows = self._decoded(reply)
        reply.output.close()
        return StatementResult(reply.tag.decode("ascii", "replace"), None, rows)

    def _count(self) -> None:
        """Count the calls of the ended statement."""
        run, self._run = self._run, None
        if run is not None:
            self.stats.add(run.stats)

    def _counted_run(
        self, statement: Statement, block: Block, *, sync: bool, alone: bool = True
    ) -> AiRun:
        self._run = self._make_run(statement, block, sync=sync, alone=alone)
        return self._run

    async def own(self, sql: str) -> Sequence[tuple[str | None, ...]]:
        """See JobSession."""
        reply = await self._exchange.ask(messages.query(encoded(sql, self._parameters)))
        if reply.error is not None:
            raise _without_place(PostgresError(reply.error))
        return self._decoded(reply)

    def _decoded(self, reply: ServerReply) -> list[tuple[str | None, ...]]:
        return [
            tuple(None if value is None else decoded(value, self._parameters) for value in row)
            for row in reply.all_rows()
        ]

    async def abandon(self) -> None:
        """See JobSession."""
        if self._exchange.status != "I":
            await self.own("ROLLBACK")

    async def search_path(self) -> str:
        """See JobSession."""
        ((path,),) = await self.own("SHOW search_path")
        return path or ""

    async def lock(self, name: str) -> bool:
        """See JobSession."""
        ((locked,),) = await self.own(_locking("pg_try_advisory_lock", name))
        if locked == "true":
            self._holders[name] = self.cancel
        return locked == "true"

    async def unlock(self, name: str) -> None:
        """See JobSession."""
        self._holders.pop(name, None)
        await self.own(_locking("pg_advisory_unlock", name))

    async def interrupt(self, name: str) -> None:
        """See JobSession."""
        cancel = self._holders.get(name)
        if cancel is not None:
            cancel()

    def cancel(self) -> None:
        """Cancel the job of this session, inside or between statements."""
        self._cancelled.set()
        if self._run is not None:
            self._run.cancel()

    async def pause(self, seconds: float) -> None:
        """See JobSession."""
        await pause_unless(self._cancelled, seconds)

    def tell(self, notice: Notice | None, done: int, total: int) -> None:
        """See JobSession; PostgreSQL's protocol has no message for progress alone."""
        if notice is not None:
            self._relay.client.write(notice_frame(notice, self._parameters))


def notice_frame(notice: Notice, parameters: dict[str, str]) -> bytes:
    """Encode a notice for the client."""
    fields = {k: shown(v, parameters) for k, v in notice_fields(notice).items() if v}
    return messages.with_fields(b"N", fields)


def _locking(function: str, name: str) -> str:
    hashed = f"pg_catalog.hashtext({literal(name)})"
    return f"SELECT CAST(pg_catalog.{function}({_LOCK_CLASS}, {hashed}) AS text)"


def _without_place(error: TierKVError) -> TierKVError:
    """Remove the position of an error: the client did not write the text."""
    if isinstance(error, PostgresError):
        fields = messages.fields(error.frame)
        fields.pop("P", None)
        return PostgresError(messages.with_fields(b"E", fields))
    if hasattr(error, "position"):
        error.position = 0
    return error
