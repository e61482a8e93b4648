"""The TCP door of a DMP node: one listener, one thread per connection.

Started by the composition root beside a DmpNode. Threads, not asyncio: a transfer is one blocking
``recv_into`` or ``sendmsg`` on segment memory with the GIL released, and peers are few.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading

from dmp.node import DmpNode
from dmp.session import Session
from dmp.socket_io import tune
from kvcore.errors import ConfigError

log = logging.getLogger(__name__)


class DmpServer:
    """Listens for clients of one node."""

    def __init__(self, node: DmpNode) -> None:
        self._node = node
        self._listener: socket.socket | None = None
        self._acceptor: threading.Thread | None = None
        self._lock = threading.Lock()
        self._sessions: dict[socket.socket, threading.Thread] = {}
        self._stopping = False

    @property
    def address(self) -> str:
        """``host:port`` for clients; valid after ``start``."""
        assert self._listener is not None, "the server is not started"
        port = self._listener.getsockname()[1]
        host = self._node.config.advertise_host or self._node.config.bind
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def start(self) -> None:
        """Bind and accept in a thread.

        Raises:
            ConfigError: the address can't be bound.
        """
        config = self._node.config
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
        for sock, thread in sessions.items():
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            thread.join()

    def _accept(self) -> None:
        assert self._listener is not None
        while not self._is_stopping():
            try:
                sock, _ = self._listener.accept()
            except OSError as error:
                if self._is_stopping():
                    return
                log.warning("dmp %s: accept failed: %s", self._node.node_id, error)
                continue
            self._admit(sock)

    def _is_stopping(self) -> bool:
        return self._stopping

    def _admit(self, sock: socket.socket) -> None:
        with self._lock:
            if self._stopping or len(self._sessions) >= self._node.config.max_connections:
                sock.close()
                return
            thread = threading.Thread(target=self._run, args=(sock,), name="dmp-conn", daemon=True)
            self._sessions[sock] = thread
        thread.start()

    def _run(self, sock: socket.socket) -> None:
        try:
            with sock:
                tune(sock)
                Session(sock, self._node).run()
        except Exception:
            # The outermost loop of a peer: one of them must not end the server.
            log.exception("dmp %s: session failed", self._node.node_id)
        finally:
            with self._lock:
                self._sessions.pop(sock, None)
