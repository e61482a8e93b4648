"""What the HTTP door may be told.

Built by the composition root, checked once by ``HttpServer``. Without keys everybody is one
tenant, so then only this machine may connect, and nobody where SQL clients need a password.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Final

from tierkv.kvcore.errors import ConfigError

DEFAULT_TENANT = "default"

HASH_PREFIX: Final = "sha256:"
"""Begins a key that is stored as its SHA-256 in hexadecimal, not in clear."""

ANY_HOST: Final = "*"
_LOOPBACK_NAMES: Final = frozenset({"localhost", "127.0.0.1", "::1"})
_HASHED = re.compile(HASH_PREFIX + "[0-9a-fA-F]{64}")


@dataclass(frozen=True, slots=True)
class HttpConfig:
    """Address, keys and times.

    Attributes:
        host: address to listen on.
        port: 0 lets the system choose.
        api_keys: Bearer key, or ``sha256:`` and its hash, to tenant; empty lets everybody in as
            ``default``, unless ``has_users``.
        has_users: SQL clients need a password, so REST clients need a key.
        allowed_hosts: names of this front in Host headers, and hosts of web pages that may send
            requests; empty: on loopback its own names, elsewhere any; ``*``: any.
        own_hosts: further names of this front, such as the one it announces.
        max_connections: clients connected at a time; more are closed at once.
        max_statements: SQL statements at a time; more are answered 429.
        statement_timeout_s: how long one may run; 0: any time.
        keep_alive_interval_s: how often a waiting stream gets a comment; proxies cut silent ones.
        first_event_wait_s: an error within this time answers with its own HTTP status, a later
            one inside the stream.
        drain_timeout_s: how long ``stop`` waits for running requests.
        failed_login_delay_s: how long a client waits for the answer to a wrong key, so that keys
            can't be tried by the hundred.
        default_temperature: of requests that name none; 1.0 is what OpenAI documents.
    """

    host: str = "127.0.0.1"
    port: int = 8_000
    api_keys: Mapping[str, str] = field(default_factory=dict, repr=False)
    has_users: bool = False
    allowed_hosts: Collection[str] = ()
    own_hosts: Collection[str] = ()
    max_connections: int = 1_000
    max_statements: int = 64
    statement_timeout_s: float = 0.0
    keep_alive_interval_s: float = 10.0
    first_event_wait_s: float = 2.0
    drain_timeout_s: float = 5.0
    failed_login_delay_s: float = 0.5
    default_temperature: float = 1.0

    def check(self) -> None:
        """Refuse to serve strangers without keys.

        Raises:
            ConfigError: a public address without keys, or a port that is none.
        """
        if not 0 <= self.port <= 65_535:
            raise ConfigError(f"http port {self.port} is not in [0, 65535]")
        if not self.api_keys and not is_loopback(self.host):
            raise ConfigError(
                f"refusing to serve HTTP on {self.host} without API keys",
                hint="set front.api_keys, or listen on 127.0.0.1",
            )
        if any(not key or not tenant for key, tenant in self.api_keys.items()):
            raise ConfigError("front.api_keys has an empty key or tenant")
        if any(key.startswith(HASH_PREFIX) and not _HASHED.fullmatch(key) for key in self.api_keys):
            raise ConfigError(
                "front.api_keys has a malformed hash",
                hint="write sha256: and 64 hexadecimal digits: printf %s KEY | sha256sum",
            )

    @property
    def served_hosts(self) -> frozenset[str]:
        """Names in Host headers that are answered, in lower case; empty means any."""
        if ANY_HOST in self.allowed_hosts or not (self.allowed_hosts or is_loopback(self.host)):
            return frozenset()
        own = {self.host.strip("[]"), *self.own_hosts, *self.allowed_hosts, *_LOOPBACK_NAMES}
        return frozenset(name.lower() for name in own if name)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
