"""The front as a part of a process: scheduler, generation, statistics, SQL engine, two doors.

``tierkv serve front`` opens both doors over a cluster known to the meta server. The embedded
cluster uses the same part with a compute node in the process and opens no door.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tierkv.compute.client import ComputeClient, connect_compute
from tierkv.config import LoadedConfig, name_list
from tierkv.dbfront.accounts.statement_entry import LoggedStatements
from tierkv.dbfront.accounts.statement_log import StatementLog
from tierkv.dbfront.accounts.statistic_store import StatisticStore
from tierkv.dbfront.accounts.statistic_tables import MEMORY
from tierkv.dbfront.answer_cache.answer_cache import AnswerCache
from tierkv.dbfront.answer_cache.answer_file import AnswerFile
from tierkv.dbfront.answer_cache.kept_answer import AnswerStore, StoreLimits
from tierkv.dbfront.databases.duckdb_engine import DuckDbConfig
from tierkv.dbfront.generation.generation import Generation
from tierkv.dbfront.postgres_dialect.server import DialectServer
from tierkv.dbfront.sessions.conversations import Conversations
from tierkv.dbfront.sessions.session_file import SessionFile
from tierkv.dbfront.sessions.session_store import SessionStore
from tierkv.dbfront.siblings import Siblings
from tierkv.dbfront.statement.server import DuckDbSqlServer
from tierkv.kvcore.clock import SystemClock
from tierkv.kvcore.errors import ConfigError, DirectoryUnavailableError
from tierkv.kvcore.node import NodeInfo
from tierkv.metaserver.client import MetaClient
from tierkv.parts.access import cluster_access
from tierkv.parts.front_source import MetaSource, front_checks
from tierkv.parts.job_queue import FrontQueue, ray_runner
from tierkv.parts.record_follower import RecordFollower
from tierkv.scheduler.config import SchedulerConfig
from tierkv.scheduler.dispatcher import Dispatcher
from tierkv.scheduler.limits.embedded_meter import EmbeddedMeter
from tierkv.scheduler.limits.gate import CallGate
from tierkv.scheduler.nodes.cluster_view import ClusterView, NodeMemory, StartNodes
from tierkv.settings import IN_MEMORY, FrontSettings

if TYPE_CHECKING:
    from tierkv.dbfront.http.server import HttpServer
    from tierkv.dbfront.pgwire.config import PgWireConfig
    from tierkv.dbfront.pgwire.server import PgWireServer
    from tierkv.dbfront.postgres.server import RelayServer
    from tierkv.parts.postgres_keepers import PostgresKeepers
    from tierkv.scheduler.shared_state.contract import SharedState


_ENGINE_SHARE: Final = 80
"""DuckDB's own limit, in percent of the machine's memory."""


def _sql_server(database: DuckDbSqlServer, settings: FrontSettings) -> DialectServer:
    """Return the sessions of every door over the embedded database."""
    database.jobs.run_parts = ray_runner(settings)
    return DialectServer(database, keeps_tables=bool(_database(settings)), jobs=database.jobs)


def answer_cache(settings: FrontSettings) -> AnswerCache:
    """Open the answer cache; a place that can't be used costs the answers there, never the front.

    Raises:
        ConfigError: the place is PostgreSQL, and its driver is not installed.
    """
    keep_s = 86_400.0 * settings.answer_cache_days
    limits = StoreLimits(int(settings.answer_cache_size), keep_s)
    place = settings.answer_cache
    if not place and settings.stats_path:
        place = f"{settings.stats_path}.answers"
    store: AnswerStore | None = None
    if place.startswith(("postgresql://", "postgres://")):
        try:
            from tierkv.dbfront.answer_cache.answer_database import AnswerDatabase  # psycopg
        except ImportError:
            raise ConfigError(
                "front.answer_cache in PostgreSQL needs psycopg",
                hint="Run `pip install 'tierkv[postgres]'`.",
            ) from None
        store = AnswerDatabase(place, limits)
    elif place:
        store = AnswerFile(str(Path(place).expanduser()), limits)
    return AnswerCache(SystemClock(), keep_s=keep_s, store=store)


_VALKEY_SCHEMES: Final = ("redis://", "rediss://", "valkey://", "valkeys://", "unix://")


def kept_conversations(settings: FrontSettings, siblings: Siblings) -> Conversations:
    """Return the conversations of a front; workers share a file, which is opened at its first use.

    Raises:
        ConfigError: the place is a server whose client is not installed.
    """
    place = settings.sessions
    if not place and settings.stats_path:
        place = f"{settings.stats_path}.sessions"
    elif not place and siblings.folder is not None:
        place = str(siblings.folder / "sessions")
    store: SessionStore = SessionFile(str(Path(place).expanduser()) if place else MEMORY)
    if place.startswith(("postgresql://", "postgres://")):
        try:
            from tierkv.dbfront.sessions.session_database import SessionDatabase  # psycopg
        except ImportError:
            raise ConfigError(
                "front.sessions in PostgreSQL needs psycopg",
                hint="Run `pip install 'tierkv[postgres]'`.",
            ) from None
        store = SessionDatabase(place)
    elif place.startswith(_VALKEY_SCHEMES):
        from tierkv.dbfront.sessions.session_valkey import SessionValkey  # optional client

        store = SessionValkey(place)
    return Conversations(store, SystemClock(), ttl_s=86_400.0 * settings.session_days)


def statement_log(settings: FrontSettings) -> StatementLog:
    """Open the statistics; an unusable file never stops the front."""
    clock = SystemClock()
    path = settings.stats_path
    store = StatisticStore(
        str(Path(path).expanduser()) if path else "",
        now_s=clock.wall(),
        keep_s=86_400.0 * settings.stats_days,
    )
    return StatementLog(
        store,
        clock,
        logged=LoggedStatements(settings.query_log),
        flush_s=settings.stats_interval_s,
    )


class FrontPart:
    """Scheduler, generation, SQL; and the doors after ``open_doors``.

    Attributes:
        dispatcher: sends calls to nodes.
        generation: from text to text.
        database: the engine that runs statements.
        sql: opens SQL sessions over ``database``, for every door.
        source: content of the admin views.
        statements: statistics of statements; closed with ``sql``.
        siblings: the other workers of this front.
        queue: the queue of jobs, and its worker once the doors are open.
        records: keeps the limits of calls and the REST keys up to date.
    """

    def __init__(
        self,
        config: LoadedConfig,
        meta: MetaClient,
        *,
        start_nodes: StartNodes | None = None,
        memory: NodeMemory | None = None,
        external_access: bool,
        siblings: Siblings | None = None,
    ) -> None:
        """Create the parts; nothing runs before ``start``.

        Args:
            config: the process's configuration.
            meta: the directory.
            start_nodes: starts the compute nodes in this process on demand; None: use the nodes in
                the directory.
            memory: the nodes of the last run, for a start without a meta server.
            external_access: the meaning of ``front.external_access = auto`` here.
            siblings: the other workers of this front; none by default.

        Raises:
            ConfigError: the database can't be opened.
        """
        settings, self._meta, self._config = config.settings.front, meta, config
        self.siblings = siblings or Siblings()
        access = cluster_access(config.settings.cluster)

        def connect(info: NodeInfo) -> ComputeClient:
            return connect_compute(info.control_address, token=access.token, tls=access.tls)

        view = ClusterView(meta=meta, connect=connect, start_nodes=start_nodes, memory=memory)
        self.dispatcher = Dispatcher(
            view, meta=meta, config=_scheduler_config(settings), shared=_shared_state(settings)
        )
        self.generation = _generation(self.dispatcher, settings, self.siblings, meta)
        self.dispatcher.weight_of = self.generation.gate.weight
        self.statements = statement_log(settings)
        self.statements.scheduler_counts = self.dispatcher.affinity.counts
        self.generation.reducers.append(self.statements.take)
        self.generation.rights.admins = frozenset(name_list(settings.admins))
        self.generation.rights.users = frozenset(settings.users)
        self.records = RecordFollower(
            meta,
            self.generation.gate,
            self.generation.rights,
            self.dispatcher.directory,
            self.generation.answers,
        )
        self.generation.answers.tell_fronts = self.records.tell_forgotten
        self.source = MetaSource(
            meta, self.generation, self.dispatcher, config, records=self.records
        )
        self.database = DuckDbSqlServer(
            _duckdb_config(
                settings, self.siblings, sandbox=not _is_open(settings, external_access)
            ),
            self.generation,
            cluster=self.source,
            session_defaults={"tierkv.max_calls": str(settings.max_calls)},
            statements=self.statements,
            siblings=self.siblings,
        )
        self.sql = _sql_server(self.database, settings)
        self.queue = FrontQueue(settings, self.sql)
        self.database.queue = self.queue.log
        self._pg: PgWireServer | RelayServer | None = None
        self._http: HttpServer | None = None
        self._keepers: PostgresKeepers | None = None

    async def start(self) -> None:
        """Find the nodes and keep watching them."""
        await self.dispatcher.start()
        await self.statements.start()
        await self.generation.answers.start()
        await self.records.start()
        self.generation.steering.pins.start()
        self.generation.conversations.start()

    async def open_doors(self) -> dict[str, str]:
        """Listen for SQL and REST clients.

        Returns:
            addresses: ``pg`` and ``http`` as ``host:port``.

        Raises:
            ConfigError: a port is taken, or a public address has no authentication.
        """
        settings = self._config.settings.front
        self._pg = await self._sql_door(settings)
        pg_port = await self._pg.start()
        if not settings.postgres:
            self.sql.start_keepers()
            self.database.jobs.queue = self.queue.jobs
        http_port = await self.open_http(sql_port=pg_port)
        await self.siblings.start()
        self.queue.start()
        if self._keepers is not None:
            self._keepers.start()
        return {"pg": f"{settings.bind}:{pg_port}", "http": f"{settings.bind}:{http_port}"}

    async def _sql_door(self, settings: FrontSettings) -> PgWireServer | RelayServer:
        # `tierkv sql` opens no door and should not wait for the imports.
        if settings.postgres:
            from tierkv.parts.postgres_door import relay_door

            if self.queue.postgres_door is not None:
                from tierkv.parts.postgres_keepers import PostgresKeepers

                self._keepers = PostgresKeepers(settings.postgres, self.queue.postgres_door)
            return await relay_door(
                settings, self.generation, self.database, self.queue, self._keepers
            )
        from tierkv.dbfront.pgwire.server import PgWireServer

        door = PgWireServer(
            _pg_config(settings, self.siblings), self.sql, SystemClock(), self.siblings
        )
        self.records.logins = door.logins
        with suppress(DirectoryUnavailableError):
            await self.records.look()
        return door

    async def open_http(self, *, sql_port: int = 0) -> int:
        """Listen for REST clients only; return the port.

        Args:
            sql_port: the port for SQL clients, if there is one.
        """
        from tierkv.dbfront.http.config import HttpConfig
        from tierkv.dbfront.http.endpoints.metrics import Metrics
        from tierkv.dbfront.http.responses.background import ResponseQueue
        from tierkv.dbfront.http.server import HttpServer  # as above: FastAPI

        metrics = Metrics(self.dispatcher.snapshot, self.dispatcher.scale)
        self.generation.reducers.append(metrics.take)
        settings = self._config.settings.front
        self._http = HttpServer(
            HttpConfig(
                host=settings.bind,
                port=settings.http_port,
                sql_port=sql_port,
                api_keys=settings.api_keys,
                max_connections=settings.max_http_connections,
                max_statements=settings.max_http_statements,
                statement_timeout_s=settings.statement_timeout_s,
                has_users=bool(settings.users),
                allowed_hosts=name_list(settings.allowed_hosts.lower()),
                own_hosts=[self._config.settings.cluster.advertise],
                reuse_port=self.siblings.shared,
            ),
            self.generation,
            metrics=metrics,
            checks=front_checks(self._meta, self.dispatcher, folder=_folder(settings)),
            # With a PostgreSQL server behind, SQL over REST would show another database's tables.
            sql=None if settings.postgres else self.sql,
            siblings=self.siblings,
            cluster=self.source,
            conversations=self.generation.conversations,
            queue=ResponseQueue(
                self.queue.log,
                self.queue.front,
                settings.queue_claim_s,
                alone=not (settings.postgres or self.siblings.shared),
                lasts=self.queue.lasts,
            ),
        )
        self.records.keys = self._http.keys
        self._http.keys.look = self.records.look
        with suppress(DirectoryUnavailableError):
            await self.records.look()
        return await self._http.start()

    async def drain(self) -> None:
        """Take nothing new, and let what runs end, for at most ``front.drain_s``."""
        most_s = self._config.settings.front.drain_s
        doors = [door for door in (self._pg, self._http) if door is not None]
        await asyncio.gather(*(door.drain(most_s) for door in doors))

    async def stop(self) -> None:
        """Close the doors, the sessions and the connections, in that order."""
        if self._keepers is not None:
            await self._keepers.stop()
        await self.queue.stop()
        if self._pg is not None:
            await self._pg.stop()
        if self._http is not None:
            await self._http.stop()
        await self.queue.log.close()
        await self.siblings.stop()
        await self.sql.close()
        await self.records.stop()
        await self.generation.steering.pins.stop()
        await self.generation.answers.stop()
        await self.generation.conversations.stop()
        await self.generation.gate.meter.close()
        await self.dispatcher.stop()


def _generation(
    dispatcher: Dispatcher, settings: FrontSettings, siblings: Siblings, meta: MetaClient
) -> Generation:
    return Generation(
        dispatcher,
        default_model=settings.default_model or None,
        gate=_gate(settings, siblings),
        answers=answer_cache(settings),
        meta=meta,
        conversations=kept_conversations(settings, siblings),
    )


def _gate(settings: FrontSettings, siblings: Siblings) -> CallGate:
    """Return the gate of this process: with shared buckets, or with its share of each limit."""
    if settings.shared_state:
        from tierkv.scheduler.limits.valkey_meter import ValkeyMeter  # optional client

        return CallGate(ValkeyMeter(settings.shared_state), when_lost=settings.limits_when_lost)
    name = "limits.json" if siblings.count == 1 else f"limits-{siblings.index}.json"
    stats = Path(settings.stats_path).expanduser().absolute() if settings.stats_path else None
    path = stats.with_name(f"{stats.name}.{name}") if stats is not None else None
    return CallGate(EmbeddedMeter(SystemClock(), path), shares=siblings.count)


def _shared_state(settings: FrontSettings) -> SharedState | None:
    if not settings.shared_state:
        return None
    from tierkv.scheduler.shared_state.valkey import ValkeyState  # optional client

    return ValkeyState(settings.shared_state)


def _folder(settings: FrontSettings) -> Path | None:
    """Return the folder of this front's tables or statistics; None if both are in memory."""
    path = _database(settings) or settings.stats_path
    return Path(path).expanduser().absolute().parent if path else None


def _duckdb_config(settings: FrontSettings, siblings: Siblings, *, sandbox: bool) -> DuckDbConfig:
    return DuckDbConfig(
        path=_database(settings),
        sandbox=sandbox,
        trace_dir=settings.trace_dir,
        threads=settings.threads,
        memory_limit=_memory_limit(settings, siblings.count),
    )


def _database(settings: FrontSettings) -> str:
    """Return the file of DuckDB's tables; empty for memory."""
    in_memory = settings.postgres or settings.database == IN_MEMORY
    return "" if in_memory else settings.database


def _memory_limit(settings: FrontSettings, workers: int) -> str:
    """Return the limit of this process's engine: its share of the front's."""
    if settings.memory_limit:
        return f"{int(settings.memory_limit) // workers}B"
    return f"{_ENGINE_SHARE // workers}%" if workers > 1 else ""


def _is_open(settings: FrontSettings, auto: bool) -> bool:
    return auto if settings.external_access == "auto" else settings.external_access == "on"


def _scheduler_config(settings: FrontSettings) -> SchedulerConfig:
    return SchedulerConfig(
        max_requests=settings.max_requests,
        max_waiting=settings.max_waiting,
        max_in_flight_per_node=settings.max_in_flight_per_node,
        ttft_slo_s=settings.ttft_slo_s,
        lease_s=settings.lease_s,
    )


def _pg_config(settings: FrontSettings, siblings: Siblings) -> PgWireConfig:
    from tierkv.dbfront.pgwire.config import PgWireConfig

    return PgWireConfig(
        bind=settings.bind,
        port=settings.pg_port,
        tls_cert_file=settings.tls_cert,
        tls_key_file=settings.tls_key,
        require_tls=settings.require_tls,
        users=settings.users,
        needs_users=bool(settings.api_keys),
        max_connections=settings.max_connections,
        max_connections_per_user=settings.max_connections_per_user,
        session_settings={
            "statement_timeout": f"{settings.statement_timeout_s}s",
            "idle_session_timeout": f"{settings.idle_session_timeout_s}s",
            "idle_in_transaction_session_timeout": f"{settings.idle_in_transaction_timeout_s}s",
        },
        reuse_port=siblings.shared,
    )
