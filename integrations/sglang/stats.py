"""Values for SGLang's metrics: pages and speed of each transfer.

Used by integrations/sglang/hicache.py from several threads. SGLang takes all values periodically.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field
from typing import Final

_MOST: Final = 4_096
"""Limit of kept transfers, for servers without metrics."""


def _book() -> deque[tuple[int, float]]:
    return deque(maxlen=_MOST)


@dataclass(slots=True)
class TransferBook:
    """Transfers since the last ``take``: pages, and gigabytes per second."""

    reads: deque[tuple[int, float]] = field(default_factory=_book)
    writes: deque[tuple[int, float]] = field(default_factory=_book)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, *, is_read: bool, pages: int, size_bytes: int, seconds: float) -> None:
        """Record a transfer, unless no page was moved."""
        if pages:
            rate = size_bytes / 1e9 / max(seconds, 1e-9)
            with self._lock:
                (self.reads if is_read else self.writes).append((pages, rate))

    def take(self) -> tuple[list[tuple[int, float]], list[tuple[int, float]]]:
        """Return and forget all reads and writes."""
        with self._lock:
            taken = list(self.reads), list(self.writes)
            self.reads.clear()
            self.writes.clear()
        return taken
