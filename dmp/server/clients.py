"""Who is connected to a DMP server, and how much they may pin: the door's bookkeeping.

Mutated by dmp/server/server.py and dmp/server/client_connection.py from the connections' threads.
Pure of sockets; what a dead client leaves behind is freed when its last connection closed.
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
        """Count one more connection of a client."""
        with self._lock:
            self._connections[client_id] += 1

    def left(self, client_id: str, free: Callable[[str], None]) -> None:
        """Count one fewer; ``free`` what the client has when it was its last.

        The client may be connecting again: until all is freed, it waits to be counted.
        """
        with self._lock:
            self._connections[client_id] -= 1
            if not self._connections[client_id]:
                del self._connections[client_id]
                free(client_id)


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
