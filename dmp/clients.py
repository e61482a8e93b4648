"""Who is connected to a DMP server, and how much they may pin: the door's bookkeeping.

Mutated by dmp/server.py and dmp/session.py from the connections' threads. Pure of sockets; what a
dead client leaves behind is freed by whoever is told that its last connection closed.
"""

from __future__ import annotations

import threading
from collections import Counter


class Clients:
    """Connections per client id; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._connections: Counter[str] = Counter()

    def joined(self, client_id: str) -> None:
        """Count one more connection of a client."""
        with self._lock:
            self._connections[client_id] += 1

    def left(self, client_id: str) -> bool:
        """Count one fewer; True when it was the client's last."""
        with self._lock:
            self._connections[client_id] -= 1
            if self._connections[client_id] > 0:
                return False
            del self._connections[client_id]
            return True


class ByteBudget:
    """A bound on bytes pinned by transfers at one time; those beyond it wait for others to end."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._used = 0
        self._waiting = 0
        self._freed = threading.Condition(threading.Lock())

    def take(self, size: int, *, timeout_s: float) -> bool:
        """Wait for room for ``size`` bytes; False when there was none in time.

        One transfer may be larger than the whole budget; it then runs alone.
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
