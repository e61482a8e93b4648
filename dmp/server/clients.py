"""Clients of a DMP server: connections per client, and a bound on pinned bytes.

Used by dmp/server/server.py and dmp/server/client_connection.py from the connections' threads. No
sockets here. The reservations and holds of a dead client are freed when its last connection closes.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable


class Clients:
    """Connections per client id; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._connections: Counter[str] = Counter()

    def joined(self, client_id: str) -> None:
        """Count a new connection of a client."""
        with self._lock:
            self._connections[client_id] += 1

    def left(self, client_id: str, free: Callable[[str], None]) -> None:
        """Count a closed connection; after the client's last connection, call ``free``.

        The client may be connecting again; the lock makes ``joined`` wait until ``free`` has
        returned.
        """
        with self._lock:
            self._connections[client_id] -= 1
            if not self._connections[client_id]:
                del self._connections[client_id]
                free(client_id)


class ByteBudget:
    """A bound on bytes pinned by concurrent transfers; further transfers wait for room."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._used = 0
        self._waiting = 0
        self._freed = threading.Condition(threading.Lock())

    def take(self, size: int, *, timeout_s: float) -> bool:
        """Wait for room for ``size`` bytes; return False if no room was found in time.

        A transfer may be larger than the whole budget; then the transfer runs alone.
        """
        with self._freed:
            if not self._fits(size) and not self._wait_for(size, timeout_s):
                return False
            self._used += size
            return True

    def _wait_for(self, size: int, timeout_s: float) -> bool:
        self._waiting += 1
        try:
            return self._freed.wait_for(lambda: self._fits(size), timeout_s)
        finally:
            self._waiting -= 1

    def give_back(self, size: int) -> None:
        """End a transfer."""
        with self._freed:
            self._used -= size
            if self._waiting:
                self._freed.notify_all()

    def _fits(self, size: int) -> bool:
        return self._used + size <= self._limit or not self._used
