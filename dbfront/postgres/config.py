"""Settings of the relay, as plain values; the keyring (``tierkv/``) makes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tierkv.dbfront.pgwire.config import is_loopback
from tierkv.kvcore.errors import ConfigError


@dataclass(frozen=True, slots=True)
class RelayConfig:
    """Where to listen, and what stands behind.

    Users are PostgreSQL's business: clients log in there, through the relay.

    Attributes:
        dsn: the server behind, as libpq reads it; its user installs schema ``tierkv``.
        bind: address to listen on.
        port: TCP port; 0 lets the system choose, ``RelayServer.start`` returns it.
        tls_cert_file: PEM certificate chain; empty: no TLS towards clients.
        tls_key_file: PEM private key.
        require_tls: refuse clients that do not ask for TLS.
        max_connections: clients at a time; one more is told 53300.
        login_timeout_s: a client that has not logged in by then is closed.
        shutdown_grace_s: how long ``stop`` waits for connections to end.
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
        """Refuse what could not work.

        Raises:
            ConfigError: names the setting and the cure.
        """
        if bool(self.tls_cert_file) != bool(self.tls_key_file):
            raise ConfigError("TLS needs both front.tls_cert and front.tls_key")
        if self.require_tls and not self.tls_cert_file:
            raise ConfigError("front.require_tls is set but there is no front.tls_cert")

    @property
    def public(self) -> bool:
        """Whether others than this machine can connect."""
        return not is_loopback(self.bind)
