"""Configuration of the PostgreSQL server.

tierkv/parts/front_part.py creates the configuration; PgWireServer checks it once at start.
Passwords may be given in clear or as PostgreSQL's SCRAM verifier
(``SCRAM-SHA-256$4096:salt$StoredKey:ServerKey``).
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field

from tierkv.kvcore.errors import ConfigError


@dataclass(frozen=True, slots=True)
class PgWireConfig:
    """Settings of one listener.

    Attributes:
        bind: address to listen on; a non-loopback address needs ``users``.
        port: TCP port; 0 lets the system choose.
        tls_cert_file: PEM chain; turns TLS on, together with ``tls_key_file``.
        tls_key_file: PEM private key.
        require_tls: refuse clients without TLS.
        users: maps a user name to a password or SCRAM verifier; empty means trust, on loopback
            only.
        needs_users: REST clients need a key, so without ``users`` every login is refused.
        max_connections: maximum number of sessions; further sessions are refused with 53300.
        max_connections_per_user: the same for one user, if there are several; 0: four fifths of
            ``max_connections``.
        session_settings: defaults of PostgreSQL's settings, for example ``statement_timeout``.
        auth_timeout_s: maximum time until login; the connection is then closed (PostgreSQL's
            ``authentication_timeout`` is 60 s).
        failed_login_delay_s: delay of the answer to a wrong password, against trying passwords in
            bulk.
        shutdown_grace_s: maximum time that ``stop`` waits for connections to end.
        reuse_port: other workers of the front listen on the port, too.
    """

    bind: str = "127.0.0.1"
    port: int = 5433
    tls_cert_file: str = ""
    tls_key_file: str = ""
    require_tls: bool = False
    users: Mapping[str, str] = field(default_factory=dict, repr=False)
    needs_users: bool = False
    max_connections: int = 200
    max_connections_per_user: int = 0
    session_settings: Mapping[str, str] = field(default_factory=dict)
    auth_timeout_s: float = 60.0
    failed_login_delay_s: float = 0.5
    shutdown_grace_s: float = 5.0
    reuse_port: bool = False

    @property
    def tls(self) -> bool:
        """Return True if TLS is configured."""
        return bool(self.tls_cert_file)

    def share_of_user(self, *, several: bool) -> int:
        """Return the maximum number of sessions of one user; ``several`` users may log in."""
        if self.max_connections_per_user:
            return self.max_connections_per_user
        return max(1, self.max_connections * 4 // 5) if several else self.max_connections

    def check(self) -> None:
        """Refuse settings that could not work or would not be safe.

        Raises:
            ConfigError: names the setting and the cure.
        """
        if bool(self.tls_cert_file) != bool(self.tls_key_file):
            raise ConfigError("pgwire TLS needs both tls_cert_file and tls_key_file")
        if self.require_tls and not self.tls:
            raise ConfigError("pgwire require_tls is set but there is no tls_cert_file")
        if not 0 <= self.port <= 65_535:
            raise ConfigError(f"pgwire port {self.port} is not between 0 and 65535")
        if not self.users and not is_loopback(self.bind):
            raise ConfigError(
                f"pgwire would listen on {self.bind} without authentication",
                hint="Set front.users, or bind to 127.0.0.1.",
            )


def is_loopback(host: str) -> bool:
    """Return True if only this machine can reach ``host``; of names, only localhost counts."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
