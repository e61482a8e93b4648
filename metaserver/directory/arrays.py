"""Arrays that grow in place: address space is reserved once, memory is used as it is touched.

Used by the directory's tables: growth copies nothing, and the directory of a small cluster stays
small. If the system reserves less, a table holds less.
"""

from __future__ import annotations

import mmap
import sys
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

U8 = NDArray[np.uint64]
U4 = NDArray[np.uint32]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

_Number = TypeVar("_Number", bound=np.integer)

_NO_RESERVE: Final = 0x4000 if sys.platform == "linux" else 0
"""MAP_NORESERVE: the system need not promise memory for pages that may never be touched."""


def reserve(rows: int, width: int = 1) -> U8:
    """Return ``rows`` rows of ``width`` uint64, all zero, with no page in memory yet.

    Huge pages are not requested: huge pages did not speed up reading, and clearing huge pages when
    a table grew blocked all callers for a second (10 M blocks).

    Raises:
        OSError: even the address space is not available.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
    flat = np.frombuffer(mmap.mmap(-1, rows * width * 8, flags=flags), np.uint64)
    return flat.reshape(rows, width) if width > 1 else flat


def distinct(numbers: NDArray[_Number]) -> NDArray[_Number]:
    """Return the distinct numbers, ascending. NumPy's ``unique`` hashes, which is slower."""
    ordered = np.sort(numbers)
    is_new = np.ones(len(ordered), bool)
    np.not_equal(ordered[1:], ordered[:-1], out=is_new[1:])
    return ordered[is_new]


class FreeList:
    """Free numbers, reused newest first, and a counter of numbers never used before.

    Attributes:
        used: numbers in ``[first, used)`` were given out at some time.
    """

    def __init__(self, *, first: int, limit: int) -> None:
        self.used = first
        self._limit = limit
        self._free: U4 = np.empty(64, np.uint32)
        self._count = 0

    @property
    def free(self) -> U4:
        """Numbers given back and not given out again."""
        return self._free[: self._count]

    @property
    def room(self) -> int:
        """Count of numbers available to be given out."""
        return self._limit - self.used + self._count

    @property
    def nbytes(self) -> int:
        """Memory size in bytes."""
        return self._free.nbytes

    def take(self, count: int) -> Ints:
        """Give out ``count`` numbers; there must be room."""
        assert count <= self.room
        again = min(count, self._count)
        self._count -= again
        fresh = np.arange(self.used, self.used + count - again, dtype=np.int64)
        self.used += count - again
        if not again:
            return fresh
        return np.concatenate((self._free[self._count : self._count + again], fresh))

    def give_back(self, numbers: Ints) -> None:
        """Take numbers back."""
        end = self._count + len(numbers)
        if end > len(self._free):
            bigger = np.empty(max(end, 2 * len(self._free)), np.uint32)
            bigger[: self._count] = self._free[: self._count]
            self._free = bigger
        self._free[self._count : end] = numbers
        self._count = end
