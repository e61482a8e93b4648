"""Configuration of the HTTP server, and who a REST client is by its key.

The composition root builds the configuration, ``HttpServer`` checks it once. Without keys all
clients share one tenant, so only loopback addresses are allowed; if SQL clients need a password,
REST clients are refused. dbfront/http/app.py asks the key ring for every request: keys of the
configuration stay as long as the process runs, and keys of the meta server come and go within a
second (tierkv/parts/record_follower.py).
"""

from __future__ import annotations

import hmac
import ipaddress
import re
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Final

from tierkv.kvcore.access import ApiKey, digest_of
from tierkv.kvcore.errors import AuthenticationError, ConfigError

DEFAULT_TENANT = "default"

HASH_PREFIX: Final = "sha256:"
"""Prefix of a key that is stored as SHA-256 in hexadecimal, not in clear."""

ANY_HOST: Final = "*"
_LOOPBACK_NAMES: Final = frozenset({"localhost", "127.0.0.1", "::1"})
_HASHED = re.compile(HASH_PREFIX + "[0-9a-fA-F]{64}")


@dataclass(frozen=True, slots=True)
class HttpConfig:
    """Address, keys and times.

    Attributes:
        host: address to listen on.
        port: TCP port; 0 lets the system choose.
        sql_port: port of the same front for SQL clients, which GET / names; 0: none.
        api_keys: maps a Bearer key, or ``sha256:`` and the hash of a key, to a tenant. If empty,
            all clients are accepted as ``default``, unless ``has_users``.
        has_users: SQL clients need a password, so REST clients need a key.
        allowed_hosts: names of this front in Host headers, and hosts of web pages that may send
            requests. If empty: on loopback the front's own names, elsewhere any name. ``*``: any
            name.
        own_hosts: further names of this front, for example the announced name.
        max_connections: maximum number of connected clients; further connections are closed at
            once.
        max_statements: maximum number of running SQL statements; further statements are answered
            429.
        statement_timeout_s: maximum run time of a statement; 0: no limit.
        keep_alive_interval_s: interval of comments in a waiting stream; proxies cut silent streams.
        first_event_wait_s: an error within this time is answered with its own HTTP status, a later
            error inside the stream.
        drain_timeout_s: maximum time that ``stop`` waits for running requests.
        failed_login_delay_s: delay of the answer to a wrong key, against trying keys in bulk.
        default_temperature: temperature of requests without a temperature; OpenAI documents 1.0.
        reuse_port: other workers of the front listen on the port, too.
    """

    host: str = "127.0.0.1"
    port: int = 8_000
    sql_port: int = 0
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
    reuse_port: bool = False

    def check(self) -> None:
        """Refuse a public address without keys, and malformed values.

        Raises:
            ConfigError: a public address without keys, a port out of range, an empty key or tenant,
                or a malformed hash.
        """
        if not 0 <= self.port <= 65_535:
            raise ConfigError(f"http port {self.port} is not in [0, 65535]")
        if not self.api_keys and not is_loopback(self.host):
            raise ConfigError(
                f"refusing to serve HTTP on {self.host} without API keys",
                hint="Set front.api_keys, or listen on 127.0.0.1.",
            )
        if any(not key or not tenant for key, tenant in self.api_keys.items()):
            raise ConfigError("front.api_keys has an empty key or tenant")
        if any(key.startswith(HASH_PREFIX) and not _HASHED.fullmatch(key) for key in self.api_keys):
            raise ConfigError(
                "front.api_keys has a malformed hash",
                hint="Write sha256: and 64 hexadecimal digits: printf %s KEY | sha256sum.",
            )

    @property
    def served_hosts(self) -> frozenset[str]:
        """Return the accepted names in Host headers, in lower case; empty means any."""
        if ANY_HOST in self.allowed_hosts or not (self.allowed_hosts or is_loopback(self.host)):
            return frozenset()
        own = {self.host.strip("[]"), *self.own_hosts, *self.allowed_hosts, *_LOOPBACK_NAMES}
        return frozenset(name.lower() for name in own if name)


def is_loopback(host: str) -> bool:
    """Return True if only this machine can reach the address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True, slots=True)
class RestCaller:
    """Whoever sent a request.

    Attributes:
        tenant: on whose behalf.
        key: name of the key; empty for keys of the configuration, and without keys.
    """

    tenant: str = DEFAULT_TENANT
    key: str = ""


class KeyRing:
    """The keys that open this door.

    Attributes:
        config: has the keys of the configuration.
        stored: keys of the meta server by digest; replaced when they change.
        look: replaces ``stored`` by the keys of now; DirectoryUnavailableError if the meta server
            does not answer.
    """

    def __init__(self, config: HttpConfig) -> None:
        self.stored: Mapping[str, ApiKey] = {}
        self.config = config
        self.look: Callable[[], Awaitable[None]] | None = None

    async def has_key(self, caller: RestCaller) -> bool:
        """Return True if a caller's key is valid now; keys of the configuration always are.

        A key made later under a revoked key's name may be another tenant's.

        Raises:
            DirectoryUnavailableError: the key is not known here, and the meta server does not
                answer.
        """
        if not caller.key:
            return True
        if not self._has_stored(caller) and self.look is not None:
            await self.look()  # The key may be younger than the last look.
        return self._has_stored(caller)

    def _has_stored(self, caller: RestCaller) -> bool:
        return any(
            (key.name, key.tenant) == (caller.key, caller.tenant) for key in self.stored.values()
        )

    def caller(self, authorization: str | None) -> RestCaller:
        """Return who sends a header; without any key or user all clients are one tenant.

        Raises:
            AuthenticationError: the key is missing or unknown, or only SQL users are configured.
        """
        if not self.config.api_keys and not self.stored:
            if self.config.has_users:
                raise AuthenticationError(
                    "front.users requires passwords of SQL clients, but there is no REST key",
                    hint="Set front.api_keys to let REST clients in, or run `tierkv key create`.",
                )
            return RestCaller()
        scheme, _, given = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not given:
            raise AuthenticationError(
                "no API key was sent", hint="Send the header Authorization: Bearer KEY."
            )
        clear = given.strip()
        digest = digest_of(clear)
        kept = self.stored.get(digest)
        if kept is not None:
            return RestCaller(kept.tenant, kept.name)
        found = None
        for key, tenant in self.config.api_keys.items():
            hashed = key.startswith(HASH_PREFIX)
            wanted = key.removeprefix(HASH_PREFIX).lower() if hashed else key
            if hmac.compare_digest(wanted.encode(), (digest if hashed else clear).encode()):
                found = RestCaller(tenant)
        if found is None:
            raise AuthenticationError("the API key is not valid")
        return found
