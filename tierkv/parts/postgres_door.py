"""The SQL door of a front with a PostgreSQL server behind it (``front.postgres``).

The front installs the schema in PostgreSQL and relays clients. ``tierkv postgres-sql`` prints the
SQL for the schema.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tierkv.dbfront.contracts import ClientInfo, TextGenerator
from tierkv.dbfront.postgres.attendant import AiAttendant
from tierkv.dbfront.postgres.install import install
from tierkv.dbfront.postgres.relay import Relay
from tierkv.dbfront.postgres.server import RelayConfig, RelayServer
from tierkv.dbfront.postgres.statements.ai_run import AiServices
from tierkv.dbfront.statement.server import DuckDbSqlServer
from tierkv.dbfront.views.admin import of_worker
from tierkv.kvcore.clock import SystemClock
from tierkv.parts.job_queue import FrontQueue, ray_runner
from tierkv.settings import FrontSettings
from tierkv.sql.views import Row

if TYPE_CHECKING:
    from tierkv.parts.postgres_keepers import PostgresKeepers


async def relay_door(
    settings: FrontSettings,
    generator: TextGenerator,
    sql: DuckDbSqlServer,
    queue: FrontQueue | None = None,
    keepers: PostgresKeepers | None = None,
) -> RelayServer:
    """Install schema ``tierkv`` and create the door, which does not listen yet.

    Args:
        settings: settings of the front.
        generator: answers AI calls.
        sql: provides the rows of the admin views; clients do not reach it.
        queue: takes queued jobs; None: this front has none.
        keepers: refresh AI tables and KV indexes; None: this front has no way to log in.

    Raises:
        ConfigError: the server can't be reached, or the user may not install.
    """
    viewer = await sql.open_session(ClientInfo())

    async def view_rows(view: str, client: ClientInfo) -> list[Row]:
        return await sql.view_rows(view, viewer, client)

    services = AiServices(
        generator,
        SystemClock(),
        statements=sql.statements,
        view_rows=view_rows,
        owners=sql.owners,
        reset=sql.reset,
        change_cluster=sql.change_cluster,
        siblings=sql.siblings,
        run_parts=ray_runner(settings),
        queue=None if queue is None else queue.jobs,
        index_rows=sql.index_rows,
    )
    if keepers is not None:
        services = replace(services, keeper_refusal=keepers.refusal)

    async def tell_activity(details: dict[str, Any]) -> list[Row]:
        return of_worker(sql.siblings, services.activity(details["user"]))

    sql.siblings.answers["activity"] = tell_activity

    def attendant(relay: Relay) -> AiAttendant:
        return AiAttendant(relay, services)

    server = RelayServer(
        RelayConfig(
            dsn=settings.postgres,
            bind=settings.bind,
            port=settings.pg_port,
            tls_cert_file=settings.tls_cert,
            tls_key_file=settings.tls_key,
            require_tls=settings.require_tls,
            max_connections=settings.max_connections,
            session_defaults={"tierkv.max_calls": str(settings.max_calls)},
            reuse_port=sql.siblings.shared,
        ),
        attendant,
        sql.siblings,
    )
    await install(settings.postgres)
    return server
