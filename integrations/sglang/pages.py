"""Pages of SGLang: how much of a prefix can be restored, and what was transferred. Pure.

Used by integrations/sglang/hicache.py; transfers are added from several threads. SGLang asks for
leading pages. Models with further pools (state of Mamba layers, sliding windows, indexers) need
pages of these pools too: all pages, or only the last ones.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final


@dataclass(frozen=True, slots=True)
class SidePool:
    """A host pool beside the keys and values.

    Attributes:
        name: SGLang's name of the pool.
        there: presence of each page of the prefix.
        trailing: number of pages needed at the end of a prefix; None: all pages.
    """

    name: str
    there: Sequence[bool]
    trailing: int | None


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """The restorable prefixes.

    Attributes:
        pages: longest restorable prefix, in pages.
        by_pool: longest prefix of each pool alone; pools without any pages are missing.
        lengths: all restorable prefixes, in pages.
    """

    pages: int
    by_pool: dict[str, int]
    lengths: list[int]


def leading(there: Sequence[bool]) -> int:
    """Count the true values at the beginning."""
    return next((i for i, is_there in enumerate(there) if not is_there), len(there))


def prefix_hit(kv_name: str, kv: Sequence[bool], sides: Sequence[SidePool]) -> PrefixHit:
    """Intersect the prefixes that each pool allows."""
    pages = leading(kv)
    by_pool = {kv_name: pages} if pages else {}
    lengths = list(range(1, pages + 1))
    for side in sides:
        allowed = _allowed(side, pages)
        if allowed:
            by_pool[side.name] = max(allowed)
        lengths = [length for length in lengths if length in allowed]
    return PrefixHit(lengths[-1] if lengths else 0, by_pool, lengths)


def _allowed(side: SidePool, pages: int) -> set[int]:
    """Return the lengths up to ``pages`` that one pool allows."""
    if side.trailing is None:
        return set(range(1, min(leading(side.there), pages) + 1))
    window = max(side.trailing, 1)
    return {n for n in range(1, pages + 1) if all(side.there[max(0, n - window) : n])}


_MOST: Final = 4_096
"""Limit of kept transfers, for servers without metrics."""


def _book() -> deque[tuple[int, float]]:
    return deque(maxlen=_MOST)


@dataclass(slots=True)
class TransferBook:
    """Transfers since the last ``take``: pages, and gigabytes per second, for SGLang's metrics."""

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
