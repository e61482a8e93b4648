"""Idle connections to one peer, and what happens when one of them turns out dead.

Called by dmp/transport/tcp.py. Connections are made when needed and again after a failure; the
pool is one client in the eyes of the node, whose reservations end with its last connection. A peer
that was silent once is left alone until it answers a probe (dmp/transport/silent_path.py).
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from tierkv.dmp.transport.connection import BrokenConnectionError, Connection, Peer, SilentPeerError
from tierkv.dmp.transport.silent_path import SilentPath
from tierkv.kvcore.errors import CacheError, TransportError

T = TypeVar("T")


class ConnectionPool:
    """Idle connections to one peer; thread-safe."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer if peer.client_id else replace(peer, client_id=secrets.token_hex(16))
        self._lock = threading.Lock()
        self._idle: list[Connection] = []
        self._closed = False
        self._silence = SilentPath(f"{peer.node_id} at {peer.address}", self._reach)

    def run(self, action: Callable[[Connection], T]) -> T:
        """Do something with a connection of one's own.

        An idle connection may have died unseen (the node restarted): then all idle ones are
        dropped and the action is tried again on a new one. Asking twice is harmless: what the
        first time took is bound to the old incarnation or expires.

        Raises:
            CacheError: the action's, or TransportError when there is no connection, or the peer
                is left alone because it was silent.
        """
        self._silence.check()
        try:
            return self._run(action)
        except SilentPeerError as error:
            self._drop_idle()
            self._silence.timed_out(str(error))
            raise

    def answered(self) -> None:
        """Use the peer again: someone else has reached it."""
        self._silence.answered()

    def _reach(self) -> bool:
        """Say HELLO to a peer that was silent."""
        try:
            connection = Connection(self.peer)
        except TransportError:
            return False
        self._give_back(connection)
        return True

    def _run(self, action: Callable[[Connection], T]) -> T:
        connection = self._take()
        if connection is not None:
            try:
                return self._use(connection, action)
            except BrokenConnectionError:
                self._drop_idle()
        return self._use(Connection(self.peer), action)

    def close(self) -> None:
        """Close all; later calls raise TransportError."""
        with self._lock:
            self._closed = True
        self._silence.end()
        self._drop_idle()

    def _use(self, connection: Connection, action: Callable[[Connection], T]) -> T:
        try:
            result = action(connection)
        except TransportError:
            connection.close()
            raise
        except CacheError:
            self._give_back(connection)
            raise
        except BaseException:
            connection.close()
            raise
        self._give_back(connection)
        return result

    def _take(self) -> Connection | None:
        with self._lock:
            if self._closed:
                raise TransportError(f"the connection to {self.peer.node_id} is closed")
            return self._idle.pop() if self._idle else None

    def _give_back(self, connection: Connection) -> None:
        with self._lock:
            if not self._closed and len(self._idle) < self.peer.connections:
                self._idle.append(connection)
                return
        connection.close()

    def _drop_idle(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()
