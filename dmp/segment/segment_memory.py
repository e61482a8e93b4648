"""Which extents of a segment have memory: allocated before the first block, given back at a stop.

A part of dmp/segment/segment.py. The file is sparse. In the owner's process ``back`` allocates an
extent's memory, so a full tmpfs causes a refused put and not a SIGBUS. A thread allocates some
extents ahead and populates the page table. In a process that only maps the file, the thread
populates the pages that have memory.

The first copy into a page that is missing from the process's page table causes a page fault, which
makes the copy up to ten times slower (measured in a virtual machine: 2 instead of 20 GB/s).

No hole is punched while the node runs: a network device or CUDA would go on reading pinned pages
that the file has replaced by then. At a stop the node's own registrations are gone, and clients map
the segment anew after the next start.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

import numpy as np

from tierkv.dmp.segment.geometry import Geometry

_MADV_POPULATE_WRITE: Final = 23  # <linux/mman.h>; the mmap module has no name for this value.
_POPULATE_BYTES: Final = 1 << 20  # A third of a millisecond.

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_Pages = np.ndarray[tuple[int], np.dtype[np.bool_]]


class PageEntry:
    """Populates the page table of one mapping.

    Attributes:
        closing: set to end the current operation early.
    """

    def __init__(self, mapped: mmap.mmap) -> None:
        self.closing = threading.Event()
        self._map = mapped

    def enter(self, start: int, stop: int) -> None:
        """Populate the pages of [start, stop), and allocate memory for pages without."""
        # Kernels before 5.14 refuse; then the first access populates each page.
        for at in range(start, stop, _POPULATE_BYTES):
            window = self._window(at, min(_POPULATE_BYTES, stop - at))
            if self.closing.is_set() or _libc.madvise(*window, _MADV_POPULATE_WRITE):
                return

    def enter_present(self, start: int, stop: int) -> bool:
        """Populate the pages of [start, stop) with memory; True if all pages have memory."""
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
        """Return for each page whether the file has the page in memory; all False if unknown."""
        pages = np.zeros(-(-size // mmap.PAGESIZE), np.uint8)
        _libc.mincore(*self._window(at, size), pages.ctypes.data)
        return (pages & 1).astype(bool)

    def _window(self, at: int, size: int) -> tuple[int, int]:
        """Return address and size; ctypes, unlike the mmap module, lets other threads continue."""
        return np.frombuffer(self._map, np.uint8, size, at).ctypes.data, size


def _runs(flags: _Pages) -> Iterator[tuple[int, int]]:
    """Yield [first, last) of each run of True."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], flags, [False])).astype(np.int8)))
    yield from zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)


log = logging.getLogger(__name__)
_PUNCH_HOLE: Final = 0x02 | 0x01  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, <linux/falloc.h>
_RETRY_S: Final = 1.0
"""Pause after a refusal by the system: a system call for memory takes milliseconds."""


class SegmentMemory:
    """The memory behind the extents of a mapped file.

    Attributes:
        refused: how often the system had no memory for an extent.
    """

    def __init__(self, mapped: mmap.mmap, fd: int, geometry: Geometry) -> None:
        self.refused = 0
        self._fd = fd
        self._shape = geometry
        self._lock = threading.Lock()
        self._backed: set[int] = set()
        self._ask_again_at = 0.0
        self._entry = PageEntry(mapped)
        self._entered: set[int] = set()
        self._queued: set[int] = set()
        self._wanted: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self, *, owns: bool) -> None:
        """Start a thread that populates pages, first the pages with memory.

        Args:
            owns: True to allocate memory for prepared extents; False to populate only existing
                memory.
        """
        make_ready = self._take if owns else self._follow
        self._thread = threading.Thread(
            target=self._run, args=(make_ready,), name="dmp-populate", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._entry.closing.set()
        self._wanted.put(None)
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def has(self, extent: int) -> bool:
        """Return True if an extent has memory."""
        return extent in self._backed

    def back(self, extent: int) -> bool:
        """Allocate an extent's memory if missing, before a slot of the extent is given out.

        Returns:
            False if the system has no memory.
        """
        return extent in self._backed or self._back(extent)

    def prepare(self, extents: Iterable[int]) -> None:
        """Make extents ready in the background; extents that are ready cost nothing."""
        for extent in extents:
            if extent not in self._entered and extent not in self._queued:
                self._queued.add(extent)
                self._wanted.put(extent)

    def back_all(self) -> bool:
        """Allocate the memory of every extent, for a device that pins the whole segment."""
        return all(self._back(extent) for extent in range(self._shape.extent_count))

    def keep_only(self, spans: Sequence[tuple[int, int]]) -> None:
        """Give back the memory of all extents except spans (offset, size) of the file, sorted.

        The thread ends first: a page that the thread populates after its hole was punched would
        take memory again.
        """
        self.close()
        at = self._shape.payload_at
        for start, size in (*spans, (self._shape.file_bytes, 0)):
            if start > at and not self._punch(at, start - at):
                return
            at = start + size
        self._backed.clear()
        self._entered.clear()

    def _punch(self, at: int, size: int) -> bool:
        if _libc.fallocate(self._fd, _PUNCH_HOLE, at, size) == 0:
            return True
        code = ctypes.get_errno()
        log.warning("the segment keeps memory it does not need: %s", os.strerror(code))
        return False

    def _back(self, extent: int) -> bool:
        with self._lock:
            if extent in self._backed:
                return True
            now = time.monotonic()
            if now < self._ask_again_at:
                return False
            start, _ = self._span(extent)
            try:
                os.posix_fallocate(self._fd, start, self._shape.extent_bytes)
            except OSError as error:
                self._refuse(error, now)
                return False
            self._backed.add(extent)
            return True

    def _refuse(self, error: OSError, now: float) -> None:
        self.refused += 1
        self._ask_again_at = now + _RETRY_S
        if self.refused == 1:
            name = errno.errorcode.get(error.errno or 0, "?")
            log.warning("no memory for more blocks: %s (%s)", error.strerror, name)

    def _run(self, make_ready: Callable[[int], None]) -> None:
        for extent in range(self._shape.extent_count):
            while not self._wanted.empty() and self._ready_next(make_ready):
                pass
            if not self._closes:
                self._enter_present(extent)
        while not self._closes and self._ready_next(make_ready):
            pass

    def _ready_next(self, make_ready: Callable[[int], None]) -> bool:
        """Wait for the next wanted extent and make it ready; False at the end."""
        extent = self._wanted.get()
        if extent is None or self._closes:
            return False
        self._queued.discard(extent)
        make_ready(extent)
        return True

    @property
    def _closes(self) -> bool:
        return self._entry.closing.is_set()

    def _take(self, extent: int) -> None:
        if extent not in self._entered and self._back(extent):
            self._entry.enter(*self._span(extent))
            self._entered.add(extent)

    def _follow(self, extent: int) -> None:
        """Populate the extents that the owner has made ready, which happens in ascending order."""
        for other in range(extent, self._shape.extent_count):
            if not self._enter_present(other):
                return

    def _enter_present(self, extent: int) -> bool:
        if extent not in self._entered and self._entry.enter_present(*self._span(extent)):
            self._entered.add(extent)
        return extent in self._entered

    def _span(self, extent: int) -> tuple[int, int]:
        at = self._shape.payload_at + extent * self._shape.extent_bytes
        return at, at + self._shape.extent_bytes
