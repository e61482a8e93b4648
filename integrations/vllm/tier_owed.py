"""Chunks that the pool should have and could not take: it was away, full or slow.

vLLM offers a chunk only once, when it comes into its memory. What is used much stays there, so a
pool that was away for a minute would lack the most wanted chunks for ever. While there are such
chunks the tier asks vLLM to offer all chunks of new requests.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

MOST_CHUNKS: Final = 65_536
RETRY_S: Final = 5.0
"""How long after a failure chunks are not offered again."""


class OwedChunks:
    """Chunks by key; the oldest are forgotten beyond a limit."""

    def __init__(self) -> None:
        self._keys: dict[bytes, None] = {}
        self._failed_at = 0.0

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, keys: Iterable[bytes], now: float) -> None:
        """Note chunks that could not be stored."""
        self._failed_at = now
        self._keys.update(dict.fromkeys(keys))
        while len(self._keys) > MOST_CHUNKS:
            del self._keys[next(iter(self._keys))]

    def paid(self, keys: Iterable[bytes]) -> None:
        """Note chunks that the pool has now."""
        if self._keys:
            for key in keys:
                self._keys.pop(key, None)

    def due(self, now: float) -> bool:
        """Whether it is time to offer chunks again."""
        return bool(self._keys) and now - self._failed_at >= RETRY_S

    def clear(self) -> None:
        """Owe nothing."""
        self._keys.clear()
