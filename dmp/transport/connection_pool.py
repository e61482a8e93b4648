"""Idle connections to one peer, and what happens when the peer is dead or silent.

Called by dmp/transport/tcp.py. Connections are made when needed and again after a failure; the
pool is one client in the eyes of the node, whose reservations end with its last connection.

A refused connection costs nothing and is tried each time. An operation that times out costs its
caller seconds, so only one does: calls that follow fail at once (SilentPath) until a probe in the
background has reached the peer again.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Final, TypeVar

from tierkv.dmp.transport.connection import (
    BrokenConnectionError,
    Peer,
    PeerConnection,
    SilentPeerError,
)
from tierkv.kvcore.errors import CacheError, TransportError

log = logging.getLogger(__name__)

FIRST_PAUSE_S: Final = 0.25
LONGEST_PAUSE_S: Final = 4.0
"""Before the first probe and, doubled after each that failed, between later ones."""


class SilentPath:
    """Closed while all is well; open (calls fail at once) from a time-out to an answered probe.

    Attributes:
        reason: why calls fail; empty while they don't.
    """

    def __init__(self, name: str, probe: Callable[[], bool]) -> None:
        """Begin closed.

        Args:
            name: of the peer, for the log.
            probe: tries to reach the peer, which may take a while; True: it answered.
        """
        self.reason = ""
        self._name = name
        self._probe = probe
        self._lock = threading.Lock()
        self._ended = threading.Event()

    def check(self) -> None:
        """Fail while the peer is left alone.

        Raises:
            TransportError: it is.
        """
        if self.reason:
            raise TransportError(f"left alone until it answers again: {self.reason}")

    def timed_out(self, reason: str) -> None:
        """Leave the peer alone and begin to probe it, unless that is so already."""
        with self._lock:
            if self.reason or self._ended.is_set():
                return
            self.reason = reason
        log.warning("dmp %s is left alone until it answers again: %s", self._name, reason)
        threading.Thread(target=self._keep_probing, name="dmp-probe", daemon=True).start()

    def answered(self) -> None:
        """Use the path again: the peer was reached."""
        with self._lock:
            was, self.reason = self.reason, ""
        if was:
            log.info("dmp %s answers again", self._name)

    def end(self) -> None:
        """Probe no more."""
        self._ended.set()

    def _keep_probing(self) -> None:
        pause_s = FIRST_PAUSE_S
        while self.reason and not self._ended.wait(pause_s):
            if self._probe():
                self.answered()
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


T = TypeVar("T")


class ConnectionPool:
    """Idle connections to one peer; thread-safe.

    Attributes:
        peer: the other end, and this client's id.
        silence: leaves the peer alone after a time-out, until it answers again.
    """

    def __init__(self, peer: Peer) -> None:
        self.peer = peer if peer.client_id else replace(peer, client_id=secrets.token_hex(16))
        self._lock = threading.Lock()
        self._idle: list[PeerConnection] = []
        self._closed = False
        self.silence = SilentPath(f"{peer.node_id} at {peer.address}", self._reach)

    def run(self, action: Callable[[PeerConnection], T]) -> T:
        """Do something with a connection of one's own.

        An idle connection may have died unseen (the node restarted): then all idle ones are
        dropped and the action is tried again on a new one. Asking twice is harmless: what the
        first time took is bound to the old incarnation or expires.

        Raises:
            CacheError: the action's, or TransportError when there is no connection, or the peer
                is left alone because it was silent.
        """
        self.silence.check()
        try:
            return self._run(action)
        except SilentPeerError as error:
            self._drop_idle()
            self.silence.timed_out(str(error))
            raise

    def _reach(self) -> bool:
        """Say HELLO to a peer that was silent."""
        try:
            connection = PeerConnection(self.peer)
        except TransportError:
            return False
        self._give_back(connection)
        return True

    def _run(self, action: Callable[[PeerConnection], T]) -> T:
        connection = self._take()
        if connection is not None:
            try:
                return self._use(connection, action)
            except BrokenConnectionError:
                self._drop_idle()
        return self._use(PeerConnection(self.peer), action)

    def close(self) -> None:
        """Close all; later calls raise TransportError."""
        with self._lock:
            self._closed = True
        self.silence.end()
        self._drop_idle()

    def _use(self, connection: PeerConnection, action: Callable[[PeerConnection], T]) -> T:
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

    def _take(self) -> PeerConnection | None:
        with self._lock:
            if self._closed:
                raise TransportError(f"the connection to {self.peer.node_id} is closed")
            return self._idle.pop() if self._idle else None

    def _give_back(self, connection: PeerConnection) -> None:
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
