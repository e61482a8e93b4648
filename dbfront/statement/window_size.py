"""How many rows of a stream are worked on at once: few at first, so that the first row comes early.

Pure. Windows double up to a size at which prompts are worth sorting; with a LIMIT they aim at
the rows that are still wanted, so that few calls are made for nothing.
"""

from __future__ import annotations

import math
from typing import Final

_FIRST_LIMITED: Final = 16
_FIRST: Final = 64
_MOST: Final = 4096
_MOST_REPEATING: Final = 65_536
"""Rows of a window while its rows hardly ask anything new."""


class WindowSize:
    """Chooses the size of each window of one statement."""

    def __init__(self, max_concurrency: int, *, limited: bool) -> None:
        self._size = _FIRST_LIMITED if limited else min(max_concurrency, _FIRST)
        self._most = _MOST
        self._seen = self._given = 0

    def next(self, remaining: int | None) -> int:
        """Return the rows of the next window; ``remaining`` rows are still wanted."""
        if remaining is None or not self._given:
            return self._size
        share = self._given / self._seen
        return max(1, min(self._size, math.ceil(1.25 * remaining / share)))

    def ran(self, *, rows: int, given: int, calls: int) -> None:
        """Note a window: its rows, those it gave, and the distinct calls it made."""
        self._seen += rows
        self._given += given
        self._most = _MOST_REPEATING if 8 * calls < rows else _MOST
        self._size = max(1, min(2 * self._size, self._most))
