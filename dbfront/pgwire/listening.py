"""Functions shared by both listeners of the SQL port: TLS, ports in use, and the end."""

from __future__ import annotations

import asyncio
import errno
import ssl
from collections.abc import Callable, Iterable

from tierkv.dbfront.accepting import Acceptor, bound_sockets
from tierkv.kvcore.errors import ConfigError


def client_tls(certificate: str, key: str) -> ssl.SSLContext | None:
    """Load certificate and key from PEM files; return None without a certificate.

    Raises:
        ConfigError: a file is missing or not PEM.
    """
    if not certificate:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"the SQL port can't load TLS certificate {certificate} and key {key}: {error}"
        ) from None
    return context


def cannot_listen(bind: str, port: int, error: OSError) -> ConfigError:
    """Return the error that explains a failure to listen on the port."""
    if error.errno == errno.EADDRINUSE:
        return ConfigError(
            f"SQL port {port} on {bind} is in use",
            hint="choose another with --pg-port, or --pg-port 0 for any free one",
        )
    return ConfigError(f"can't listen for SQL on {bind}:{port}: {error.strerror or error}")


async def accept_clients(
    bind: str,
    port: int,
    make_protocol: Callable[[], asyncio.Protocol],
    *,
    has_room: Callable[[], bool],
) -> Acceptor:
    """Listen for SQL clients.

    Raises:
        ConfigError: the port is not available.
    """
    try:
        listeners = await bound_sockets(bind, port)
        acceptor = Acceptor(listeners, make_protocol, door="SQL", has_room=has_room)
        acceptor.start()
    except OSError as error:
        raise cannot_listen(bind, port, error) from None
    return acceptor


def most_sockets(max_connections: int) -> int:
    """Return the limit of open sockets: sessions, and as many logins, cancels and refusals."""
    return 2 * max_connections + 16


async def wait_for_clients(tasks: Iterable[asyncio.Task[None]], grace_s: float) -> None:
    """Wait until the notified clients have left; disconnect late clients after ``grace_s``."""
    pending = set(tasks)
    if not pending:
        return
    _, late = await asyncio.wait(pending, timeout=grace_s)
    for task in late:
        task.cancel()
    await asyncio.gather(*late, return_exceptions=True)
