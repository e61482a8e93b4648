"""Settings of the relay, as plain values; the composition room (``tierkv/``) creates them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tierkv.dbfront.pgwire.config import is_loopback
from tierkv.kvcore.errors import ConfigError


@dataclass(frozen=True, slots=True)
class RelayConfig:
    """The listening address, and the PostgreSQL server behind the relay.

    PostgreSQL manages the users: clients log in to PostgreSQL through the relay.

    Attributes:
        dsn: the PostgreSQL server, in libpq's format; its user installs schema ``tierkv``.
        bind: address to listen on.
        port: TCP port; 0 lets the system choose, and ``RelayServer.start`` returns the port.
        tls_cert_file: PEM certificate chain; empty: no TLS towards clients.
        tls_key_file: PEM private key.
        require_tls: refuse clients without TLS.
        max_connections: maximum number of sessions; further clients are refused with 53300.
        login_timeout_s: maximum time until login; the connection is then closed.
        shutdown_grace_s: maximum wait of ``stop`` for the end of connections.
        session_defaults: defaults of ``tierkv.*`` settings, by full name.
    """

    dsn: str = field(repr=False)
    bind: str = "127.0.0.1"
    port: int = 5433
    tls_cert_file: str = ""
    tls_key_file: str = ""
    require_tls: bool = False
    max_connections: int = 200
    login_timeout_s: float = 60.0
    shutdown_grace_s: float = 5.0
    session_defaults: Mapping[str, str] = field(default_factory=dict)

    def check(self) -> None:
        """Refuse settings that could not work.

        Raises:
            ConfigError: names the setting and the cure.
        """
        if bool(self.tls_cert_file) != bool(self.tls_key_file):
            raise ConfigError("TLS needs both front.tls_cert and front.tls_key")
        if self.require_tls and not self.tls_cert_file:
            raise ConfigError("front.require_tls is set but there is no front.tls_cert")

    @property
    def public(self) -> bool:
        """Return True if other machines can connect."""
        return not is_loopback(self.bind)
