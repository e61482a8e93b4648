"""Accepts TCP clients for the REST port and the SQL port of a front, within bounds.

asyncio's accept loop has no limit on clients. When file descriptors run out, the loop logs once per
slot of the backlog and retries at once, so idle connections could exhaust the descriptors, CPU and
disk of a process. The Acceptor closes clients above a limit, keeps a reserve of descriptors for
files and nodes, pauses after each refusal, and logs at most one refusal a minute.

The kernel always assigns the lowest free descriptor number. The number of a new socket therefore
approximates the number of descriptors in use, without counting.

The other functions are shared by both listeners of the SQL port (dbfront/pgwire/server.py and
dbfront/postgres/server.py): TLS, a port in use, and the end.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import resource
import socket
import sys
from collections.abc import Callable, Iterable
from typing import Final

from tierkv.kvcore.errors import ConfigError
from tierkv.kvwire.credentials import ServerTls, TlsFiles

log = logging.getLogger("tierkv.accept")

BACKLOG: Final = 128
_REST_S: Final = 0.2
"""Pause after a refusal, during which no client is accepted."""

_LOG_EVERY_S: Final = 60.0
_OPTIONS: Final = (
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)
"""No delay: otherwise the body of an HTTP answer, written after its head, waits 40 ms until the
client acknowledges the head. asyncio sets this only for listening sockets of its own making.

A vanished machine is detected after one minute of silence. TCP_USER_TIMEOUT would also detect a
vanished machine while an answer is in transit, but would disconnect slow readers; in that case the
kernel gives up after 15 minutes.
"""


class Acceptor:
    """Hands accepted sockets to protocols until ``close``.

    Attributes:
        refused: number of clients closed right after accept.
    """

    def __init__(
        self,
        listeners: list[socket.socket],
        make_protocol: Callable[[], asyncio.Protocol],
        *,
        door: str,
        has_room: Callable[[], bool],
    ) -> None:
        """Take ownership of bound sockets; accept no client before ``start``.

        Args:
            listeners: bound sockets; ``close`` closes the sockets.
            make_protocol: creates the protocol of one client.
            door: name of the server in log lines.
            has_room: returns False when the server has reached its connection limit.
        """
        self.refused = 0
        self._listeners = listeners
        self._make_protocol = make_protocol
        self._door = door
        self._has_room = has_room
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[object]] = set()
        self._rest: asyncio.TimerHandle | None = None
        self._logged_s = float("-inf")

    @property
    def port(self) -> int:
        """The port of the first listener."""
        return int(self._listeners[0].getsockname()[1])

    def start(self) -> None:
        """Start accepting clients."""
        for listener in self._listeners:
            listener.setblocking(False)
            listener.listen(BACKLOG)
        self._resume()

    def close(self) -> None:
        """Stop accepting clients; accepted connections stay open."""
        self._pause()
        if self._rest is not None:
            self._rest.cancel()
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()

    async def wait_closed(self) -> None:
        """Wait for sockets that are being handed over. asyncio servers have the same method."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _resume(self) -> None:
        self._rest = None
        for listener in self._listeners:
            self._loop.add_reader(listener, self._accept, listener)

    def _pause(self) -> None:
        for listener in self._listeners:
            self._loop.remove_reader(listener)

    def _accept(self, listener: socket.socket) -> None:
        """Accept pending clients, at most a backlog, to leave time for connected clients."""
        for _ in range(BACKLOG):
            try:
                client, _ = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # EMFILE, ENFILE, ENOBUFS, ENOMEM
                self._refuse(os.strerror(error.errno or 0))
                return
            if not self._has_room():
                client.close()
                self._refuse("it has as many connections as it may have")
                return
            if client.fileno() >= _descriptor_limit():
                client.close()
                self._refuse("the process is short of file descriptors")
                return
            self._hand_over(client)

    def _refuse(self, why: str) -> None:
        self.refused += 1
        self._pause()
        self._rest = self._loop.call_later(_REST_S, self._resume)
        if self._loop.time() - self._logged_s >= _LOG_EVERY_S:
            self._logged_s = self._loop.time()
            log.warning(
                "the %s port refuses clients: %s (%d so far)", self._door, why, self.refused
            )

    def _hand_over(self, client: socket.socket) -> None:
        client.setblocking(False)
        try:
            for level, option, value in _OPTIONS:
                client.setsockopt(level, option, value)
        except OSError:
            log.debug("a client left before its socket was set up")
        connecting = self._loop.connect_accepted_socket(self._make_protocol, client)
        task: asyncio.Task[object] = self._loop.create_task(connecting)
        self._tasks.add(task)
        task.add_done_callback(self._handed_over)

    def _handed_over(self, task: asyncio.Task[object]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.debug("a client left while it was accepted", exc_info=task.exception())


def _descriptor_limit() -> int:
    """Return the limit for client descriptors; higher numbers are reserved for files and nodes."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return sys.maxsize
    return soft - min(max(32, soft // 8), soft // 2)


async def bound_sockets(host: str, port: int, *, reuse_port: bool = False) -> list[socket.socket]:
    """Bind every address of a host, as asyncio's servers do; nothing listens yet.

    Args:
        host: name or address.
        port: 0 lets the system choose.
        reuse_port: other processes of the same user may bind the port, too; the kernel gives each
            connection to one listening process.

    Raises:
        OSError: the port is in use, or the host does not belong to this machine.
    """
    loop = asyncio.get_running_loop()
    server = await loop.create_server(
        asyncio.Protocol, host, port, start_serving=False, reuse_port=reuse_port
    )
    try:
        return [socket.socket(fileno=os.dup(each.fileno())) for each in server.sockets]
    finally:
        server.close()


def client_tls(certificate: str, key: str) -> ServerTls | None:
    """Load certificate and key from PEM files, which may be replaced; None without a certificate.

    Raises:
        ConfigError: a file is missing or not PEM.
    """
    if not certificate:
        return None
    return ServerTls(TlsFiles(certificate, key), setting="front", clients=True)


def _cannot_listen(bind: str, port: int, error: OSError) -> ConfigError:
    """Return the error that explains a failure to listen on the port."""
    if error.errno == errno.EADDRINUSE:
        return ConfigError(
            f"SQL port {port} on {bind} is in use",
            hint="Choose another with --pg-port, or --pg-port 0 for any free one.",
        )
    return ConfigError(f"can't listen for SQL on {bind}:{port}: {error.strerror or error}")


async def accept_clients(
    bind: str,
    port: int,
    make_protocol: Callable[[], asyncio.Protocol],
    *,
    has_room: Callable[[], bool],
    reuse_port: bool = False,
) -> Acceptor:
    """Listen for SQL clients; ``reuse_port`` as in ``bound_sockets``.

    Raises:
        ConfigError: the port is not available.
    """
    try:
        listeners = await bound_sockets(bind, port, reuse_port=reuse_port)
        acceptor = Acceptor(listeners, make_protocol, door="SQL", has_room=has_room)
        acceptor.start()
    except OSError as error:
        raise _cannot_listen(bind, port, error) from None
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
