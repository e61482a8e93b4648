"""``DuckDbSqlServer``: opens SQL sessions over the embedded engine, and answers their admin views.

tierkv/parts/front_part.py creates one server per database; the server implements SqlServer. The
dialect of PostgreSQL (dbfront/postgres_dialect/) wraps its sessions (dbfront/statement/session.py).
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping
from typing import Any

from tierkv.dbfront.accounts.statement_log import StatementLog
from tierkv.dbfront.accounts.statistic_store import StatisticStore
from tierkv.dbfront.contracts import (
    ClientInfo,
    TableAccess,
    TextGenerator,
)
from tierkv.dbfront.databases.duckdb_engine import DuckDbConfig, DuckDbEngine
from tierkv.dbfront.jobs.embedded_jobs import RunningJobs
from tierkv.dbfront.jobs.job_views import (
    INDEX_USES,
    JOB_VIEWS,
    VIEW_QUERIES,
    view_rows_of,
    with_uses,
)
from tierkv.dbfront.jobs.source_watch import source_digest
from tierkv.dbfront.queue.work_log import WorkLog
from tierkv.dbfront.siblings import Siblings
from tierkv.dbfront.statement.session import DuckDbSession
from tierkv.dbfront.statement.settings import SessionSettings
from tierkv.dbfront.views.admin import (
    ClusterSource,
    OwnedChange,
    cluster_rows,
    joined_rows,
    of_worker,
    refuse_reset,
    visible_rows,
)
from tierkv.dbfront.views.index_places import IndexPlaces, ReadTexts
from tierkv.dbfront.views.kvcache import baseline_of
from tierkv.dbfront.views.queue_views import QUEUE_VIEWS, queue_rows
from tierkv.dbfront.views.statistics import VIEWS as STATISTIC_VIEWS
from tierkv.dbfront.views.statistics import activity_row, statistic_rows
from tierkv.dbfront.views.worker_views import WORKER_VIEWS
from tierkv.kvcore.clock import Clock, SystemClock
from tierkv.kvcore.errors import FeatureNotSupportedError, RightMissingError
from tierkv.sql.cluster_command import ClusterCommand
from tierkv.sql.jobs.job_tables import MAKE_TABLES, SCHEMA
from tierkv.sql.jobs.kv_index_command import IndexedText
from tierkv.sql.view_columns import VIEW_COLUMNS
from tierkv.sql.views import Row, timestamp


class DuckDbSqlServer:
    """Opens sessions on one embedded database.

    Attributes:
        generator: access to the models.
        clock: clock for statistics and views.
        statements: statement statistics; stopped when the server closes.
        tenant_of: maps a client to the owner of its KV namespace.
        siblings: the other workers of the front.
        jobs: what runs in the sessions; each user owns jobs where users log in.
        queue: the queue of the views; set by the front.
    """

    def __init__(
        self,
        config: DuckDbConfig,
        generator: TextGenerator,
        *,
        cluster: ClusterSource | None = None,
        session_defaults: Mapping[str, str] | None = None,
        clock: Clock | None = None,
        statements: StatementLog | None = None,
        tenant_of: Callable[[ClientInfo], str] = lambda client: client.user,
        siblings: Siblings | None = None,
    ) -> None:
        """Open the database.

        Args:
            config: location and options of the database.
            generator: answers AI calls.
            cluster: data source of the admin views; None shows only the front's own data.
            session_defaults: defaults of ``tierkv.*`` settings, by full name.
            clock: the system clock by default.
            statements: statement statistics; in memory by default.
            tenant_of: maps a client to its tenant; by default the user name is the tenant.
            siblings: the other workers of the front; none by default.

        Raises:
            ConfigError: the database cannot be opened.
            UserError: an invalid session default.
        """
        self.generator = generator
        self.clock = clock or SystemClock()
        self._places = IndexPlaces(generator, self.clock)
        self.statements = statements or StatementLog(
            StatisticStore(now_s=self.clock.wall()), self.clock
        )
        self.tenant_of = tenant_of
        self._defaults = dict(session_defaults or {})
        SessionSettings(self._defaults)
        self._cluster = cluster
        self.jobs = RunningJobs(
            lambda client: "" if self.table_access(client) is None else client.user,
            self.clock,
            tenant_of=tenant_of,
        )
        self.queue: WorkLog | None = None
        self._engine = DuckDbEngine(config)
        self._engine.cancel_session = self._cancel_session
        self._engine.reset_statistics = self._reset_statistics
        self._loop: asyncio.AbstractEventLoop | None = None
        self._sessions: dict[int, DuckDbSession] = {}
        self.jobs.read = self._engine.rows
        if self._engine.rows(f"SELECT 1 FROM duckdb_schemas() WHERE schema_name = '{SCHEMA}'"):
            for text in MAKE_TABLES:  # The file may be of an older release.
                self._engine.rows(text)
        self.siblings = siblings or Siblings()
        # Each worker of a front counts in steps, so that a pid is unique.
        self._pids = itertools.count(1 + self.siblings.index, self.siblings.count)
        self.siblings.answers |= {
            "activity": self._tell_activity,
            "rows": self._tell_rows,
            "cancel_backend": self._tell_cancelled,
            "flush": self._flush,
        }

    def kv_indexes_of(self, client: ClientInfo) -> tuple[IndexedText, ...]:
        """Return the KV indexes of a client."""
        owner = self.jobs.owner_of(client)
        return tuple(index for index in self.jobs.written.indexes if index.owner == owner)

    async def open_session(self, client: ClientInfo) -> DuckDbSession:
        """Open a session; ``client.options`` may contain ``tierkv.*`` settings.

        Raises:
            UserError: an unknown or invalid setting.
        """
        options = {
            name: text for name, text in client.options.items() if name.startswith("tierkv.")
        }
        settings = SessionSettings(self._defaults, options)
        self._loop = asyncio.get_running_loop()
        pid = next(self._pids)
        session = DuckDbSession(self, self._engine.connect(), client, pid, settings)
        self._sessions[pid] = session
        try:
            await session.enter_own_schema()
        except BaseException:
            await session.close()
            raise
        return session

    def table_access(self, client: ClientInfo) -> TableAccess | None:
        """Return which schemas a client may use; None: nobody logs in."""
        return None if self._cluster is None else self._cluster.table_access(client)

    async def move_tables(self, client: ClientInfo, moved: Mapping[str, str | None]) -> None:
        """Give tables' rights to their new names, or take the rights if the tables were dropped.

        Raises:
            NoNodeError: the meta server does not answer; the rights stay.
        """
        if self._cluster is not None and moved:
            await self._cluster.move_tables(client.user, moved)

    def _cancel_session(self, number: int, pid: int) -> bool:
        """Cancel a session's statement, from an engine thread; False for an unknown session.

        Args:
            number: secret number of the session that asks.
            pid: the session whose statement is cancelled.

        Raises:
            RightMissingError: the session is another user's, and the asking user no administrator.
        """
        assert self._loop is not None, "a session asks"
        asking = self._asking(number)
        session = self._sessions.get(pid)
        if session is None:
            user = "" if self.owners(asking) is None else asking.user
            asked = self.siblings.any_does("cancel_backend", pid=pid, user=user)
            return asyncio.run_coroutine_threadsafe(asked, self._loop).result()
        if session.client.user != asking.user and self.owners(asking) is not None:
            raise RightMissingError(
                "permission denied to cancel query",
                detail="Only administrators may cancel the queries of other users.",
            )
        asyncio.run_coroutine_threadsafe(session.cancel(), self._loop)
        return True

    def _asking(self, number: int) -> ClientInfo:
        """Return the client of a session by the session's secret number."""
        for session in list(self._sessions.values()):
            if session.number == number:
                return session.client
        return ClientInfo()

    async def _tell_cancelled(self, details: Mapping[str, Any]) -> bool:
        session = self._sessions.get(details["pid"])
        if session is None or details.get("user", "") not in ("", session.client.user):
            return False
        await session.cancel()
        return True

    async def change_cluster(
        self, user: str, command: ClusterCommand, owned: OwnedChange | None = None
    ) -> None:
        """Carry out a statement about the cluster; see ClusterSource.

        Raises:
            FeatureNotSupportedError: this front has no cluster.
        """
        if self._cluster is None:
            raise FeatureNotSupportedError(
                "this front has no meta server to keep namespaces and limits"
            )
        await self._cluster.change_cluster(user, command, owned)

    def _reset_statistics(self, number: int, what: str | None) -> str:
        """Reset statistics, from an engine thread; return the time of the reset.

        Args:
            number: secret number of the session that asks.
            what: the group; None for all.

        Raises:
            RightMissingError: the user is no administrator.
        """
        assert self._loop is not None, "a session asks"
        refuse_reset(self.owners(self._asking(number)))
        resetting = asyncio.run_coroutine_threadsafe(self.reset(what), self._loop)
        return resetting.result()

    async def reset(self, what: str | None) -> str:
        """Reset all statistics or one group; return the time of the reset.

        Raises:
            UserError: unknown group.
        """
        await self.siblings.ask_all("flush")
        nodes = None
        if self._cluster is not None and what in (None, "kvcache"):
            nodes = baseline_of(await self._cluster.nodes())
        return timestamp(await self.statements.reset(what, nodes))

    def forget(self, session: DuckDbSession) -> None:
        """Remove a closed session."""
        self._sessions.pop(session.pid, None)

    async def close(self) -> None:
        """Close every session and the database."""
        for session in list(self._sessions.values()):
            await session.close()
        self._engine.close()
        await self.statements.stop()

    async def view_rows(
        self, view: str, asking: DuckDbSession, client: ClientInfo | None = None
    ) -> list[Row]:
        """Return an admin view's rows with their time, as visible to the session ``asking``.

        Args:
            view: the view.
            asking: the session.
            client: who asks, if the session is not the client's own.
        """
        now = timestamp(self.clock.wall())
        rows = await self._view_rows(view, asking, client)
        seen = visible_rows(view, rows, self.owners(client or asking.client))
        return [{"as_of": now} | row for row in seen]

    def owners(self, client: ClientInfo) -> tuple[str, str] | None:
        """Return the names in the visible rows of a client; None: all rows are visible."""
        return None if self._cluster is None else self._cluster.owners(client)

    async def _view_rows(
        self, view: str, asking: DuckDbSession, client: ClientInfo | None
    ) -> list[Row]:
        if view == "stat_activity":
            return await joined_rows(
                self.siblings, self._activity(asking.client.user), user=asking.client.user
            )
        if view in JOB_VIEWS:
            found = await asyncio.to_thread(self._engine.rows, VIEW_QUERIES[view])
            jobs = view_rows_of(view, found, self.jobs.holders.__contains__, self._unseen)
            if view != "kv_indexes":
                return jobs
            return await self.index_rows(jobs, self._read_texts, client or asking.client)
        if view in QUEUE_VIEWS:
            return [] if self.queue is None else await queue_rows(view, self.queue)
        if view in STATISTIC_VIEWS:
            await self.siblings.ask_all("flush")
            return await statistic_rows(view, self.statements)
        rows: list[Row] = []
        if self._cluster is not None:
            rows = await self._cluster_rows(view, self._cluster, client or asking.client)
        if view in WORKER_VIEWS:
            rows = await joined_rows(self.siblings, rows, view=view)
        if view == "settings":
            names = ("name", "setting", "source", "description")
            rows += [dict(zip(names, row, strict=True)) for row in asking.settings.rows()]
        return rows

    async def index_rows(self, rows: list[Row], read: ReadTexts, client: ClientInfo) -> list[Row]:
        """Add the counters of this front, and bytes by tier, to rows of ``kv_indexes``.

        Args:
            rows: of the view.
            read: runs a query where the indexes are.
            client: who looks at the view.
        """
        await self.siblings.ask_all("flush")
        uses = await self.statements.select(INDEX_USES)
        costs: list[Row] = []
        if self._cluster is not None:
            costs = await self._cluster_rows("node_costs", self._cluster)
        tenant = None if self.owners(client) is None else self.tenant_of(client)
        return await self._places.add_to(with_uses(rows, uses, costs), read, tenant)

    def _unseen(self, owner: str, name: str, _: float) -> int | None:
        return self.jobs.written.unseen(source_digest(owner, name))

    async def _read_texts(self, query: str) -> list[tuple[str | None, ...]]:
        rows = await asyncio.to_thread(self._engine.rows, query)
        return [tuple(None if value is None else str(value) for value in row) for row in rows]

    def _activity(self, user: str) -> list[Row]:
        """Return the rows of this process's sessions, as visible to a user."""
        return [
            activity_row(session.pid, session.client, session.activity, asking=user)
            for session in self._sessions.values()
        ]

    async def _tell_activity(self, details: Mapping[str, Any]) -> list[Row]:
        return of_worker(self.siblings, self._activity(details["user"]))

    async def _tell_rows(self, details: Mapping[str, Any]) -> list[Row]:
        if self._cluster is None:
            return []
        return of_worker(self.siblings, await self._cluster_rows(details["view"], self._cluster))

    async def _flush(self, _: Mapping[str, Any]) -> None:
        await self.statements.flush()

    async def _cluster_rows(
        self, view: str, cluster: ClusterSource, client: ClientInfo | None = None
    ) -> list[Row]:
        now_s = self.clock.wall()
        if "stats_reset" not in VIEW_COLUMNS[view]:
            return await cluster_rows(view, cluster, now_s=now_s, client=client)
        baseline, reset_s = await self.statements.kvcache_baseline()
        rows = await cluster_rows(view, cluster, now_s=now_s, baseline=baseline)
        reset = None if reset_s is None else timestamp(reset_s)
        return [row | {"stats_reset": reset} for row in rows]
