"""Idle connections to a peer, and the handling of a dead or silent peer.

Called by dmp/transport/control.py. Connections are made on demand, and again after a failure. To
the node all connections of a pool are one client, whose reservations end with the last connection.

A refused connection costs nothing, so each call tries to connect. A time-out costs seconds, so only
one caller pays: later calls fail at once (SilentPath) until a probe in the background has reached
the peer again.
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
"""Pauses before the first probe and, doubled after each failed probe, between later probes."""


class SilentPath:
    """Circuit breaker: open (calls fail at once) from a time-out until an answered probe.

    Attributes:
        reason: why calls fail; empty while the breaker is closed.
        ended: set to stop probing.
    """

    def __init__(self, name: str, probe: Callable[[], bool]) -> None:
        """Begin closed.

        Args:
            name: name of the peer, for the log.
            probe: tries to reach the peer, which may take a while; returns True if the peer
                answered.
        """
        self.reason = ""
        self._name = name
        self._probe = probe
        self._lock = threading.Lock()
        self.ended = threading.Event()

    def check(self) -> None:
        """Fail while the breaker is open.

        Raises:
            TransportError: the breaker is open.
        """
        if self.reason:
            raise TransportError(f"left alone until it answers again: {self.reason}")

    def timed_out(self, reason: str) -> None:
        """Open the breaker and start to probe the peer, unless the breaker is open already."""
        with self._lock:
            if self.reason or self.ended.is_set():
                return
            self.reason = reason
        log.warning("dmp %s is left alone until it answers again: %s", self._name, reason)
        threading.Thread(target=self._keep_probing, name="dmp-probe", daemon=True).start()

    def answered(self) -> None:
        """Close the breaker: the peer was reached."""
        with self._lock:
            was, self.reason = self.reason, ""
        if was:
            log.info("dmp %s answers again", self._name)

    def _keep_probing(self) -> None:
        pause_s = FIRST_PAUSE_S
        while self.reason and not self.ended.wait(pause_s):
            if self._probe():
                self.answered()
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


T = TypeVar("T")


class ConnectionPool:
    """Idle connections to one peer; thread-safe.

    Attributes:
        peer: the peer, and this client's id.
        silence: circuit breaker, open after a time-out until the peer answers again.
    """

    def __init__(self, peer: Peer) -> None:
        self.peer = peer if peer.client_id else replace(peer, client_id=secrets.token_hex(16))
        self._lock = threading.Lock()
        self._idle: list[PeerConnection] = []
        self._closed = False
        self.silence = SilentPath(f"{peer.node_id} at {peer.address}", self._reach)

    def run(self, action: Callable[[PeerConnection], T]) -> T:
        """Run an action with an exclusive connection.

        An idle connection may have died unseen (the node restarted). Then all idle connections are
        dropped and the action runs again on a new connection. The repetition is harmless:
        reservations of the first run belong to the old incarnation or expire.

        Raises:
            CacheError: the action's error, or TransportError without a connection or with an open
                circuit breaker.
        """
        self.silence.check()
        try:
            return self._run(action)
        except SilentPeerError as error:
            self._drop_idle()
            self.silence.timed_out(str(error))
            raise

    def _reach(self) -> bool:
        """Say HELLO to a silent peer."""
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
        """Close all connections; later calls raise TransportError."""
        with self._lock:
            self._closed = True
        self.silence.ended.set()
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
