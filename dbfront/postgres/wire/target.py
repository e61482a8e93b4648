"""The PostgreSQL server behind the relay: where it is, and how it is reached.

A Target is made from a DSN once; every client connection gets a connection of its own through
``connect``. Users and passwords of clients are never ours: they log in at PostgreSQL themselves.
"""

from __future__ import annotations

import asyncio
import ssl
from dataclasses import dataclass, field
from typing import Final

from tierkv.dbfront.postgres.wire import messages
from tierkv.dbfront.postgres.wire.endpoint import Endpoint
from tierkv.kvcore.errors import ConfigError, NoNodeError

_CONNECT_S: Final = 10.0
_ENCRYPTED: Final = frozenset({"require", "verify-ca", "verify-full"})
_SSL_MODES: Final = frozenset({"disable", "allow", "prefer"}) | _ENCRYPTED


@dataclass(frozen=True, slots=True)
class Target:
    """Address and manners.

    Attributes:
        host, port: of the server.
        dsn: as given; the installer logs in with it.
        sslmode: libpq's word.
        tls: None where the mode is ``disable`` or ``allow``.
    """

    host: str
    port: int
    dsn: str = field(repr=False)
    sslmode: str = "prefer"
    tls: ssl.SSLContext | None = field(default=None, repr=False)

    @property
    def address(self) -> str:
        """For messages."""
        return f"{self.host}:{self.port}"


def parse_dsn(dsn: str) -> Target:
    """Read a libpq connection string or URI.

    Raises:
        ConfigError: it can't be read or used, or psycopg is not installed.
    """
    try:
        from psycopg import ProgrammingError  # only with a PostgreSQL behind
        from psycopg.conninfo import conninfo_to_dict
    except ImportError:
        raise ConfigError(
            "front.postgres needs psycopg", hint="pip install 'tierkv[postgres]'"
        ) from None
    try:
        given = {name: str(value) for name, value in conninfo_to_dict(dsn).items()}
    except ProgrammingError as error:
        raise ConfigError(f"front.postgres can't be read: {str(error).strip()}") from None
    host = given.get("host") or "localhost"
    if host.startswith(("/", "@")) or "," in host:
        raise ConfigError(
            f"front.postgres names {host!r}; the relay needs one host and a TCP port",
            hint="such as postgresql://tierkv@127.0.0.1:5432/app",
        )
    mode = given.get("sslmode", "prefer")
    if mode not in _SSL_MODES:
        raise ConfigError(f"front.postgres: sslmode {mode!r} is unknown")
    return Target(host, int(given.get("port") or 5432), dsn, mode, _context(mode, given))


def _context(mode: str, given: dict[str, str]) -> ssl.SSLContext | None:
    if mode in ("disable", "allow"):
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = mode == "verify-full"
    roots = given.get("sslrootcert", "")
    # As in libpq: with a root certificate "require" verifies like verify-ca.
    checked = mode in ("verify-ca", "verify-full") or (mode == "require" and bool(roots))
    context.verify_mode = ssl.CERT_REQUIRED if checked else ssl.CERT_NONE
    try:
        if checked and roots in ("", "system"):
            context.load_default_certs()
        elif checked:
            context.load_verify_locations(roots)
        if given.get("sslcert"):
            context.load_cert_chain(given["sslcert"], given.get("sslkey"))
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"front.postgres: a certificate can't be loaded: {error}") from None
    return context


async def connect(target: Target) -> tuple[Endpoint, bool]:
    """Open a connection, encrypted where the mode wants it.

    Returns:
        endpoint, encrypted: nothing was said on it yet.

    Raises:
        NoNodeError: it can't be reached, or refuses the encryption that is wanted.
    """
    try:
        async with asyncio.timeout(_CONNECT_S):
            _, endpoint = await asyncio.get_running_loop().create_connection(
                Endpoint, target.host, target.port
            )
            try:
                return endpoint, await _encrypt(target, endpoint)
            except BaseException:
                endpoint.abort()
                raise
    except (OSError, TimeoutError) as error:
        raise NoNodeError(
            f"could not connect to PostgreSQL at {target.address}: {error or 'no answer'}",
            hint="The front runs; see front.postgres and whether that server does.",
        ) from None


async def _encrypt(target: Target, endpoint: Endpoint) -> bool:
    if target.tls is None:
        return False
    endpoint.write(messages.SSL_REQUEST)
    answer = await endpoint.read()
    if answer == b"S":
        await endpoint.start_tls(target.tls, server_side=False, hostname=target.host)
        return True
    if target.sslmode in _ENCRYPTED:
        raise NoNodeError(
            f"PostgreSQL at {target.address} does not speak TLS, and sslmode={target.sslmode} "
            "wants it"
        )
    return False
