"""Enters a mapped segment's pages into this process's page table, before somebody copies.

The first copy into a page that is not entered pays for a fault, which makes it up to ten times
slower (measured in a virtual machine: 2 instead of 20 GB/s). Used by dmp/segment/segment_memory.py,
from its thread; both by the process that owns a segment and by those that map it.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Iterator
from typing import Final

import numpy as np

_MADV_POPULATE_WRITE: Final = 23  # <linux/mman.h>; the mmap module has no name for it.
_POPULATE_BYTES: Final = 1 << 20  # A third of a millisecond.

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_Pages = np.ndarray[tuple[int], np.dtype[np.bool_]]


class PageEntry:
    """The pages of one mapping.

    Attributes:
        closing: set to end what is going on early.
    """

    def __init__(self, mapped: mmap.mmap) -> None:
        self.closing = threading.Event()
        self._map = mapped

    def enter(self, start: int, stop: int) -> None:
        """Enter pages of [start, stop); those that have no memory get it."""
        # Kernels before 5.14 refuse; then pages come as they are touched.
        for at in range(start, stop, _POPULATE_BYTES):
            window = self._window(at, min(_POPULATE_BYTES, stop - at))
            if self.closing.is_set() or _libc.madvise(*window, _MADV_POPULATE_WRITE):
                return

    def enter_present(self, start: int, stop: int) -> bool:
        """Enter those pages of [start, stop) that have memory; whether all of them have."""
        whole = True
        for at in range(start, stop, _POPULATE_BYTES):
            present = self._present(at, min(_POPULATE_BYTES, stop - at))
            whole = whole and bool(present.all())
            for first, last in _runs(present):
                self.enter(at + first * mmap.PAGESIZE, at + last * mmap.PAGESIZE)
            if self.closing.is_set():
                return False
        return whole

    def _present(self, at: int, size: int) -> _Pages:
        """Return for each page whether the file has it in memory; none where that can't be told."""
        pages = np.zeros(-(-size // mmap.PAGESIZE), np.uint8)
        _libc.mincore(*self._window(at, size), pages.ctypes.data)
        return (pages & 1).astype(bool)

    def _window(self, at: int, size: int) -> tuple[int, int]:
        """Return address and size; ctypes, unlike the mmap module, lets other threads go on."""
        return np.frombuffer(self._map, np.uint8, size, at).ctypes.data, size


def _runs(flags: _Pages) -> Iterator[tuple[int, int]]:
    """Yield [first, last) of each stretch of true ones."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], flags, [False])).astype(np.int8)))
    yield from zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)
