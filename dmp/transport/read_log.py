"""Reads the node could not see, kept until it is told: by them it knows which blocks are in use.

Used by the transports whose readers do not ask the node. The order of use it learns is a little
late.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from tierkv.kvcore.location import Location

MAX_UNREPORTED: Final = 1_024
"""Distinct slots read before the node is told."""


@dataclass(frozen=True, slots=True)
class Reads:
    """Slots that were read, in order of their first read, and how many bytes altogether."""

    locations: list[Location]
    read_bytes: int


class ReadLog:
    """Collects reads; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._touched: dict[Location, None] = {}
        self._bytes = 0

    def note(self, locations: Iterable[Location], read_bytes: int) -> bool:
        """Remember reads; answers whether it is time to tell."""
        with self._lock:
            self._touched.update(dict.fromkeys(locations))
            self._bytes += read_bytes
            return len(self._touched) >= MAX_UNREPORTED

    def take(self) -> Reads:
        """Return and forget what was noted."""
        with self._lock:
            reads = Reads(list(self._touched), self._bytes)
            self._touched, self._bytes = {}, 0
        return reads
