"""The TCP server of a DMP node: one listener, one thread per connection.

Started by the composition root beside a DmpNode. The server uses threads, not asyncio: a transfer
is a blocking ``recv_into`` or ``sendmsg`` on segment memory with the GIL released, and peers are
few.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from typing import Final

from tierkv.dmp.node.node import DmpNode
from tierkv.dmp.server.client_connection import Clients, Session
from tierkv.dmp.server.rdma_door import RdmaDoor
from tierkv.dmp.wire.socket_io import TlsWire, Wire
from tierkv.kvcore.errors import ConfigError
from tierkv.kvwire.credentials import ServerTls

log = logging.getLogger(__name__)
HELLO_TIMEOUT_S: Final = 5.0
"""Timeout of the TLS handshake, and again of the HELLO."""

MAX_STRANGERS: Final = 64
"""Maximum number of connections without a token yet; further connections are closed at once."""

UNSENT_BYTES: Final = 128 << 10
"""Bytes of a connection that the kernel keeps unsent: what waits in the kernel is beyond the order
of turns."""

_ACCEPT_RETRY_S: Final = 0.1


class DmpServer:
    """Listens for clients of one node."""

    def __init__(
        self,
        node: DmpNode,
        *,
        hello_timeout_s: float = HELLO_TIMEOUT_S,
        max_strangers: int = MAX_STRANGERS,
    ) -> None:
        self._node = node
        self._hello_timeout_s = hello_timeout_s
        self._max_strangers = max_strangers
        self._listener: socket.socket | None = None
        self._acceptor: threading.Thread | None = None
        self._lock = threading.Lock()
        self._sessions: dict[socket.socket, threading.Thread] = {}
        self._strangers: set[socket.socket] = set()
        self._clients = Clients()
        self._tls: ServerTls | None = None
        self._rdma: RdmaDoor | None = None
        self._stopping = False

    @property
    def address(self) -> str:
        """``host:port`` for clients; valid after ``start``."""
        assert self._listener is not None, "the server is not started"
        port = self._listener.getsockname()[1]
        host = self._node.config.advertise_host or self._node.config.bind
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    @property
    def rdma(self) -> RdmaDoor | None:
        """The RDMA server; None before ``start``."""
        return self._rdma

    def start(self) -> None:
        """Bind the address and accept connections in a thread.

        Raises:
            ConfigError: the address can't be bound, or a certificate can't be used.
        """
        config = self._node.config
        self._tls = ServerTls(config.tls, setting="dmp") if config.tls.serves else None
        family = socket.AF_INET6 if ":" in config.bind else socket.AF_INET
        try:
            listener = socket.create_server((config.bind, config.port), family=family, backlog=128)
        except OSError as error:
            raise ConfigError(
                f"dmp can't listen on {config.bind}:{config.port}: {error.strerror}; choose "
                "another dmp.port (0 lets the system choose) or stop what uses it"
            ) from error
        self._stopping = False
        self._listener = listener
        self._rdma = RdmaDoor(self._node)
        self._acceptor = threading.Thread(target=self._accept, name="dmp-accept", daemon=True)
        self._acceptor.start()
        log.info("dmp %s: data plane on %s", config.node_id, self.address)

    def stop(self) -> None:
        """Close the listener and every connection; returns when their threads have ended."""
        self._stopping = True
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
        if self._acceptor is not None:
            self._acceptor.join()
        with self._lock:
            sessions = dict(self._sessions)
        for sock in sessions:  # All first: a session may wait for another session's pins.
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in sessions.values():
            thread.join()
        if self._rdma is not None:
            self._rdma.close()  # Before the node unmaps the segment.

    def _accept(self) -> None:
        assert self._listener is not None
        while not self._is_stopping():
            try:
                sock, _ = self._listener.accept()
            except OSError as error:
                if self._is_stopping():
                    return
                log.warning("dmp %s: accept failed: %s", self._node.node_id, error)
                # For example no file descriptors are left: an immediate retry would only waste
                # processor time.
                time.sleep(_ACCEPT_RETRY_S)
                continue
            self._admit(sock)

    def _is_stopping(self) -> bool:
        return self._stopping

    def _admit(self, sock: socket.socket) -> None:
        with self._lock:
            full = len(self._sessions) >= self._node.config.max_connections
            if self._stopping or full or len(self._strangers) >= self._max_strangers:
                sock.close()
                return
            thread = threading.Thread(target=self._run, args=(sock,), name="dmp-conn", daemon=True)
            self._sessions[sock] = thread
            self._strangers.add(sock)
        try:
            thread.start()
        except RuntimeError as error:  # No more threads; the server stays open.
            log.warning("dmp %s: a connection was refused: %s", self._node.node_id, error)
            self._forget(sock)

    def _run(self, sock: socket.socket) -> None:
        try:
            assert self._rdma is not None, "the server is not started"
            with (
                contextlib.closing(self._wire(sock)) as wire,
                contextlib.closing(self._rdma.guest()) as rdma,
            ):
                session = Session(
                    wire,
                    self._node,
                    self._clients,
                    rdma=rdma,
                    trusted=lambda: self._no_stranger(sock),
                )
                session.run()
        except OSError as error:
            log.debug("dmp %s: no TLS handshake: %s", self._node.node_id, error)
        except Exception:
            # The outermost loop of a connection: one failed session must not end the server.
            log.exception("dmp %s: session failed", self._node.node_id)
        finally:
            self._forget(sock)

    def _forget(self, sock: socket.socket) -> None:
        sock.close()
        with self._lock:
            self._sessions.pop(sock, None)
            self._strangers.discard(sock)

    def _wire(self, sock: socket.socket) -> Wire:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
        if self._tls is None:
            return Wire(sock, timeout_s=self._hello_timeout_s)
        sock.settimeout(self._hello_timeout_s)
        # Wrap a copy, because wrapping takes over the socket and ``stop`` must still shut down the
        # original.
        secured = self._tls.context.wrap_socket(sock.dup(), server_side=True)
        return TlsWire(secured, timeout_s=self._hello_timeout_s)

    def _no_stranger(self, sock: socket.socket) -> None:
        with self._lock:
            self._strangers.discard(sock)
