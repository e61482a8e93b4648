"""The SQL door of a front with PostgreSQL behind it (``front.postgres``).

The front installs its schema there and relays clients; ``tierkv postgres-sql`` prints what it
would install.
"""

from __future__ import annotations

from dbfront.contracts import TextGenerator
from dbfront.postgres.ai_run import AiServices
from dbfront.postgres.attendant import AiAttendant
from dbfront.postgres.config import RelayConfig
from dbfront.postgres.install import install
from dbfront.postgres.relay import Relay
from dbfront.postgres.server import RelayServer
from kvcore.clock import SystemClock
from tierkv.settings import FrontSettings


async def relay_door(settings: FrontSettings, generator: TextGenerator) -> RelayServer:
    """Install schema ``tierkv`` and make the door; it does not listen yet.

    Raises:
        ConfigError: the server can't be reached, or its user may not install.
    """
    services = AiServices(generator, SystemClock())

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
            session_defaults={"tierkv.max_calls": str(settings.max_calls)},
        ),
        attendant,
    )
    await install(settings.postgres)
    return server
