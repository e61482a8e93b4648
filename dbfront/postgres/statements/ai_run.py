"""A statement with AI calls, from the session's settings to the notices.

Both protocols call ``open`` before any part of the statement runs, ``answer`` to run the statement,
and ``notices`` for the messages to the client beside the rows.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol, TypeVar
from weakref import WeakSet

from tierkv.dbfront.accounts.statement_entry import StatementEntry
from tierkv.dbfront.accounts.statement_log import StatementLog
from tierkv.dbfront.accounts.statistics import AiStats, StatementProgress
from tierkv.dbfront.contracts import CallDefaults, ClientInfo, TextGenerator
from tierkv.dbfront.explain.estimate import Estimate
from tierkv.dbfront.explain.plan import Analysis, Explanation
from tierkv.dbfront.jobs.job_commands import RunParts
from tierkv.dbfront.jobs.job_views import with_uses
from tierkv.dbfront.jobs.queued_job import JobQueue
from tierkv.dbfront.pgwire.protocol.replies import notice_fields
from tierkv.dbfront.postgres.relay import hinted
from tierkv.dbfront.postgres.statements.ai_rounds import (
    PostgresError,
    RelayRounds,
    add_ai_plan,
)
from tierkv.dbfront.postgres.statements.block import Block, SessionValues
from tierkv.dbfront.postgres.statements.session_indexes import SessionIndexes
from tierkv.dbfront.postgres.statements.statement import Statement
from tierkv.dbfront.postgres.wire import messages
from tierkv.dbfront.postgres.wire.exchange import OnReset, RelayExchange, ServerReply
from tierkv.dbfront.postgres.wire.messages import shown
from tierkv.dbfront.siblings import Siblings
from tierkv.dbfront.statement.ai_statement import AiStatement, refuse_replay
from tierkv.dbfront.views.index_places import ReadTexts, unlocated
from tierkv.kvcore.clock import Clock
from tierkv.kvcore.errors import CancelledByUserError, SqlError, TierKVError
from tierkv.sql.cluster_command import ClusterCommand
from tierkv.sql.jobs.kv_index_command import IndexedText, indexed_forms
from tierkv.sql.plan.plan import Explain, StatementPlan
from tierkv.sql.text.statement import StatementKind
from tierkv.sql.views import Row


async def without_uses(rows: list[Row], read: ReadTexts, client: ClientInfo) -> list[Row]:
    """Return rows of ``kv_indexes`` where no statistics are kept."""
    return unlocated(with_uses(rows, (), ()))


NO_QUEUE_DOOR: Final = "the front can't log in as you: front.queue_door is not set"
RunOnce = Callable[[], Awaitable[ServerReply]]


class Watched(Protocol):
    """A session that can report its activity."""

    def activity_row(self, asking: str) -> Row: ...


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class AiServices:
    """Services shared by all sessions of a relay.

    Attributes:
        generator: the way to the models.
        clock: for statistics.
        tenant_of: returns the tenant with the KV namespace of a client's calls.
        statements: counts and logs statements with AI calls.
        view_rows: returns the rows of an admin view for a client, except stat_activity.
        owners: returns the names in the visible rows of a client; None: all rows are visible.
        reset: resets counters, of one group or all.
        change_cluster: carries out a user's statement about the cluster.
        sessions: the live sessions, for stat_activity; a weak set.
        siblings: the other workers of the front.
        run_parts: hands the parts of jobs to a cluster; None: no cluster is known.
        queue: takes queued jobs; None: this front has no queue.
        job_holders: how to cancel the running jobs, by the names of their parts.
        index_rows: adds this front's counters, and bytes by tier, to rows of ``kv_indexes``.
        keeper_refusal: returns why no front refreshes what a user keeps in a database; empty if a
            front does.
    """

    generator: TextGenerator
    clock: Clock
    tenant_of: Callable[[ClientInfo], str] = lambda client: client.user
    statements: StatementLog | None = None
    view_rows: Callable[[str, ClientInfo], Awaitable[list[Row]]] | None = None
    owners: Callable[[ClientInfo], tuple[str, str] | None] = lambda client: None
    reset: OnReset | None = None
    change_cluster: Callable[[str, ClusterCommand], Awaitable[None]] | None = None
    sessions: WeakSet[Watched] = field(default_factory=WeakSet)
    siblings: Siblings = field(default_factory=Siblings)
    run_parts: RunParts | None = None
    queue: JobQueue | None = None
    job_holders: dict[str, Callable[[], None]] = field(default_factory=dict)
    index_rows: Callable[[list[Row], ReadTexts, ClientInfo], Awaitable[list[Row]]] = without_uses
    keeper_refusal: Callable[[str, str], str] = lambda user, database: NO_QUEUE_DOOR

    def activity(self, user: str) -> list[Row]:
        """Return the sessions' rows of stat_activity, as visible to a user."""
        return [session.activity_row(user) for session in self.sessions]


class AiRun:
    """A running statement.

    Attributes:
        values: the session's settings at the beginning of the statement.
        stats: counters of the statement.
        account: the statement's entry in the statistics; set by ``open``.
    """

    def __init__(
        self,
        statement: Statement,
        exchange: RelayExchange,
        block: Block,
        services: AiServices,
        client: ClientInfo,
        *,
        sync: bool,
        alone: bool = True,
        pid: int = 0,
        on_progress: Callable[[StatementProgress], None] | None = None,
        indexes: SessionIndexes | None = None,
    ) -> None:
        assert statement.plan is not None
        self.stats = AiStats()
        self._statement = statement
        self._plan: StatementPlan = statement.plan
        self._exchange = exchange
        self._block = block
        self._services = services
        self._client = client
        self._sync = sync
        self._alone = alone
        self._pid = pid
        self.account: StatementEntry | None = None
        self._on_progress = on_progress
        self._indexes = indexes
        self._kv_indexes: tuple[IndexedText, ...] = ()
        self._ai: AiStatement | None = None
        self._rounds: RelayRounds | None = None
        self._task: asyncio.Task[Any] | None = None
        self._cancelled: TierKVError | None = None
        self._values: SessionValues | None = None
        self._estimate: Estimate | None = None
        self._over = False
        self._told: set[bytes] = set()

    @property
    def values(self) -> SessionValues:
        """Return the session's settings; valid after ``open``."""
        assert self._values is not None
        return self._values

    @property
    def defaults(self) -> CallDefaults:
        """Return the defaults of calls from the session's settings."""
        tenant = self._services.tenant_of(self._client)
        return self.values.settings.call_defaults(tenant, self._client)

    @property
    def _only_reads(self) -> bool:
        is_query = self._plan.kind is StatementKind.QUERY and not self._plan.query_writes
        return self._alone and is_query and not self._statement.locks_rows

    async def open(self) -> None:
        """Read the settings, check constant arguments, open a block, prepare the answers' table.

        Raises:
            TierKVError: no part of the statement ran.
        """
        self._values = await self._block.values()
        self.account = self._account()
        try:
            await self._open()
        except TierKVError as error:
            self._ended(error)
            raise

    async def _open(self) -> None:
        rights = self._services.generator.rights
        if rights.rights.restrict:
            rights.outside[self.defaults.tenant] = await self._block.roles()
        refuse_replay(str(self.values.settings.get("tierkv.execution")), self._plan.why_not_stream)
        self._ai = AiStatement(
            self._plan,
            self._services.generator,
            self.defaults,
            self.values.settings.error_policy(),
            self._services.clock,
            self.stats,
            self._on_progress,
            self.account,
        )
        await self._ai.check_constants()
        if self._indexes is not None:
            explains = self._plan.explain is not Explain.NO
            self._kv_indexes = await self._indexes.read(self._block, afresh=explains)
            if self.account is not None:
                self.account.indexed = indexed_forms(self._plan, self._kv_indexes)
        await self._block.open(self.values, reads=self._only_reads)
        first_key = min(form.key for form in self._plan.forms)
        await self._block.begin_rounds(first_key)

    async def answer(
        self, run_once: RunOnce, *, keep: bool = True, collect_once: RunOnce | None = None
    ) -> ServerReply:
        """Run the statement until no answer is missing.

        Args:
            run_once: runs the statement once.
            collect_once: for a statement that writes, runs a SELECT with the same calls; the
                statement itself then needs only its last round.
            keep: True if the last run counts. Otherwise the last run is undone, but the answers
                stay: the caller runs the statement another way.

        Raises:
            PostgresError: PostgreSQL's own error.
            TierKVError: an error of TierKV.
        """
        assert self._ai is not None
        collects = collect_once is not None and self._plan.explain is Explain.NO
        stop_after = self._plan.stop_after_rows if keep and not self._plan.writes else None
        self._rounds = rounds = RelayRounds(
            self._exchange, self._ai, run_once, sync=self._sync, stop_after=stop_after
        )
        started = self._services.clock.now()
        timer = self._timer(self.values.statement_timeout_s)
        failure: BaseException | None = None
        try:
            if self._plan.explain in (Explain.PLAN, Explain.ESTIMATE):
                reply = await self._explained()
            else:
                if self.account is not None:
                    await self.account.began()
                if collects and collect_once is not None:
                    await self._collect(collect_once)
                self._rounds = rounds
                may_stop = self._plan.stops_early and not self._plan.writes
                if may_stop:
                    rounds.ask_few()
                reply = await self._stoppable(
                    self._ai.until_answered(self._rounds, may_stop=may_stop)
                )
                await (self._rounds.release() if keep else self._rounds.undo())
        except BaseException as error:
            failure = error
            raise
        finally:
            if timer is not None:
                timer.cancel()
            self.stats.wall_s += self._services.clock.now() - started
            self._ended(failure)
        self._ai.report("done")
        self._add_plan(reply)
        return reply

    async def begin_windows(self) -> RelayRounds:
        """Begin to answer a cursor's calls while the cursor's rows are fetched."""
        assert self._ai is not None

        async def never() -> ServerReply:
            raise AssertionError("a cursor's query is not run in rounds")

        self._rounds = RelayRounds(self._exchange, self._ai, never, sync=self._sync)
        if self.account is not None:
            await self.account.began()
        return self._rounds

    async def in_windows(
        self, work: Coroutine[Any, Any, None], timeout_s: float, last: Callable[[], bool]
    ) -> None:
        """Answer calls of a cursor; ``last`` returns True if no calls remain.

        Raises:
            TierKVError: PostgreSQL's own error, or an error of TierKV.
        """
        assert self._rounds is not None
        self._cancelled = self._rounds.cancelled = None
        timer = self._timer(timeout_s)
        try:
            await self._stoppable(work)
        except TierKVError as error:
            self._ended(error)
            raise
        finally:
            if timer is not None:
                timer.cancel()
        if last():
            self.close_windows()

    async def ask_missed(self) -> None:
        """Have models answer the questions missed by the book."""
        assert self._ai is not None
        batch = self._ai.book.next_batch()
        if self._ai.book.fatal is not None:
            raise self._ai.book.fatal
        if batch:
            await self._ai.evaluate(batch, partly=True)

    def close_windows(self) -> None:
        """End the cursor's statement; no more rows will be fetched."""
        self._ended(None)

    async def _collect(self, collect_once: RunOnce) -> None:
        """Learn the answers for a write, which then writes once: no dead rows, no lost numbers.

        Raises:
            TierKVError: an error of the statement itself.
        """
        assert self._ai is not None
        self._rounds = rounds = RelayRounds(self._exchange, self._ai, collect_once, sync=self._sync)
        try:
            reply = await self._stoppable(self._ai.until_answered(rounds))
            reply.output.close()
            await rounds.undo()
        except PostgresError as error:
            # The SELECT only collects questions. An error of the SELECT may not hold for the
            # statement itself; the statement will report its own errors.
            if error is not rounds.error or error.sqlstate.startswith(("53", "57")):
                raise
            await rounds.recover()
        self.stats.calls = 0  # The statement itself makes the calls again.

    def _account(self) -> StatementEntry | None:
        if self._services.statements is None:
            return None
        tag = str(self.values.settings.get("tierkv.query_tag"))
        account = self._services.statements.open(self._client, self._pid, self._statement.text, tag)
        account.planned(self._plan.kind.value, holds_calls=True)
        return account

    def _ended(self, error: BaseException | None) -> None:
        if self.account is not None and not self._over:
            self._over = True
            self.account.ended(self.stats, error)

    async def _explained(self) -> ServerReply:
        """Run EXPLAIN once and undo the run, without asking models whatever answer is missing.

        For an estimate, PostgreSQL gets EXPLAIN ANALYZE and thus meets the statement's calls.
        """
        assert self._ai is not None and self._rounds is not None
        rounds = self._rounds
        if self._plan.explain is Explain.ESTIMATE:
            self._estimate = await self._stoppable(self._ai.estimate(rounds))
        else:
            await rounds.run()
        reply = rounds.reply
        if reply is None:
            assert rounds.error is not None
            raise rounds.error
        await rounds.undo()
        return reply

    async def _stoppable(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a lengthy operation as a task for ``cancel`` to stop."""
        self._task = task = asyncio.create_task(work)
        try:
            return await task
        except asyncio.CancelledError:
            if self._cancelled is None:
                task.cancel()
                raise
            raise self._cancelled from None
        finally:
            self._task = None

    def cancel(self, error: TierKVError | None = None) -> bool:
        """Stop the calls; return False while PostgreSQL works and needs a separate cancel."""
        rounds = self._rounds
        if self._task is None or rounds is None:
            return False
        self._cancelled = rounds.cancelled = error or CancelledByUserError(
            "canceling statement due to user request"
        )
        if rounds.asking:
            return False
        self._task.cancel()
        return True

    def _timer(self, timeout_s: float) -> asyncio.TimerHandle | None:
        if not timeout_s:
            return None
        late = SqlError("canceling statement due to statement timeout", sqlstate="57014")
        return asyncio.get_running_loop().call_later(timeout_s, self.cancel, late)

    def _add_plan(self, reply: ServerReply) -> None:
        """Add the AI part of the plan to PostgreSQL's plan."""
        if self._plan.explain is Explain.NO:
            return
        assert self._ai is not None
        told = Explanation(
            self._plan,
            self.defaults,
            why_not_stream=self._plan.why_not_stream,
            max_calls=self.values.settings.error_policy().max_calls,
            estimate=self._estimate,
            indexes=self._kv_indexes,
        )
        if self._plan.explain is Explain.ANALYZE:
            told = replace(told, analysis=Analysis(self.stats, self._ai.trace))
        add_ai_plan(reply, told, as_json=self._plan.explain_json)

    def notices(self, parameters: dict[str, str]) -> list[bytes]:
        """Return the notice frames that the client wants."""
        if self._ai is None:
            return []
        return [
            messages.with_fields(
                b"N", {k: shown(v, parameters) for k, v in notice_fields(notice).items() if v}
            )
            for notice in self._ai.notices()
            if self.values.wants(notice.severity)
        ]

    def news(self, parameters: dict[str, str]) -> list[bytes]:
        """Return the frames of ``notices`` not yet returned by this method."""
        frames = [frame for frame in self.notices(parameters) if frame not in self._told]
        self._told.update(frames)
        return frames


_NO_TYPE: Final = re.compile(rb'type "vector" does not exist')
_NO_OPERATOR: Final = re.compile(rb"operator does not exist: [^\0]*(<=>|<->|<#>|<\+>)")
_NAMED_TYPE: Final = re.compile(r"(::|\bas)\s*vector\b", re.IGNORECASE)
_CREATE: Final = b"Run CREATE EXTENSION vector in this database, with its schema in search_path."
_CAST: Final = (
    b"pgvector's operators compare vectors (CREATE EXTENSION vector): write embedding::vector for "
    b"a real[], and keep embeddings as ai_embed(body)::vector(n)."
)


def _vector_cure(frame: bytes, text: str) -> dict[str, bytes]:
    """Return fields for an error about embeddings: PostgreSQL only knows the rewritten text."""
    message = messages.fields(frame).get("M", b"")
    if _NO_TYPE.search(message) is None:
        return {"H": _CAST} if _NO_OPERATOR.search(message) else {}
    if _NAMED_TYPE.search(text):
        return {"H": _CREATE}
    return {
        "C": b"42883",
        "M": b"the vector operator beside ai_embed does not exist: pgvector is not installed here",
        "H": _CREATE,
    }


def error_frame(
    error: BaseException, statement: Statement | None, fields: dict[str, bytes]
) -> bytes:
    """Encode the ErrorResponse for a client.

    Args:
        error: an error of PostgreSQL or TierKV.
        statement: the statement that PostgreSQL ran; error positions are translated.
        fields: fields of an ``error`` of TierKV, with the position in the statement's query.
    """
    if not isinstance(error, PostgresError):
        if statement is not None and "P" in fields:
            before = statement.offset + statement.declare
            fields = fields | {"P": str(int(fields["P"]) + before).encode()}
        return messages.with_fields(b"E", fields)
    frame = hinted(error.frame)
    if statement is None:
        return frame
    values = messages.fields(frame) | _vector_cure(frame, statement.text)
    if "P" in values:
        values["P"] = str(statement.position(int(values["P"]))).encode()
    return messages.with_fields(b"E", values)
