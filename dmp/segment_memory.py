"""Which extents of a segment have memory: taken before the first block comes, given back at a stop.

A part of dmp/segment.py, used by the process that owns the segment. The file is sparse. An extent
gets its memory from ``back``, so that a full tmpfs is a refused put and not a SIGBUS; a thread does
it one extent ahead and enters the pages, because the first copy into a page that has no memory is
many times slower than the others.

No hole is punched while the node runs: pages that a network device or CUDA has pinned would go on
to be read where the file has others by then. At a stop the node's own registrations are gone, and
clients map the segment anew in its next life.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import mmap
import os
import queue
import threading
import time
from collections.abc import Sequence
from typing import Final

from dmp.geometry import Geometry

log = logging.getLogger(__name__)
_MADV_POPULATE_WRITE: Final = 23  # <linux/mman.h>; the mmap module has no name for it.
_POPULATE_BYTES: Final = 1 << 20  # madvise keeps the GIL; this is half a millisecond.
_PUNCH_HOLE: Final = 0x02 | 0x01  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, <linux/falloc.h>
_RETRY_S: Final = 1.0
"""After a refusal the system is not asked again for so long: asking takes milliseconds."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


class SegmentMemory:
    """The memory behind the extents of a mapped file.

    Attributes:
        refused: times that the system had no memory for an extent.
    """

    def __init__(self, mapped: mmap.mmap, fd: int, geometry: Geometry) -> None:
        self.refused = 0
        self._map = mapped
        self._fd = fd
        self._shape = geometry
        self._lock = threading.Lock()
        self._backed: set[int] = set()
        self._ask_again_at = 0.0
        self._wanted: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to enter pages in a thread of its own."""
        self._thread = threading.Thread(target=self._run, name="dmp-populate", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End that thread."""
        self._closing.set()
        self._wanted.put(None)
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def back(self, extent: int, following: int | None) -> bool:
        """Make sure that an extent has memory, before a slot of it is given out.

        Args:
            extent: which.
            following: the one that comes after it, to be made ready in the background.

        Returns:
            False when the system has none.
        """
        if extent in self._backed:
            return True
        if not self._back(extent):
            return False
        self._wanted.put(extent)
        self.prepare(following)
        return True

    def prepare(self, extent: int | None) -> None:
        """Give an extent its memory in the background."""
        if extent is not None:
            self._wanted.put(extent)

    def back_all(self) -> bool:
        """Give every extent its memory, for a device that pins all of it."""
        return all(self._back(extent) for extent in range(self._shape.extent_count))

    def keep_only(self, spans: Sequence[tuple[int, int]]) -> None:
        """Give the memory of all extents back but for spans (offset, size) of the file, sorted."""
        at = self._shape.payload_at
        for start, size in (*spans, (self._shape.file_bytes, 0)):
            if start > at and not self._punch(at, start - at):
                return
            at = start + size
        self._backed.clear()

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
            at = self._shape.payload_at + extent * self._shape.extent_bytes
            try:
                os.posix_fallocate(self._fd, at, self._shape.extent_bytes)
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

    def _run(self) -> None:
        done: set[int] = set()
        while (extent := self._wanted.get()) is not None and not self._closing.is_set():
            if extent not in done and self._back(extent):
                self._populate(extent)
                done.add(extent)

    def _populate(self, extent: int) -> None:
        first = self._shape.payload_at + extent * self._shape.extent_bytes
        last = first + self._shape.extent_bytes
        # Kernels before 5.14 refuse; then pages come as they are touched.
        with contextlib.suppress(OSError):
            for start in range(first, last, _POPULATE_BYTES):
                if self._closing.is_set():
                    return
                size = min(_POPULATE_BYTES, last - start)
                self._map.madvise(_MADV_POPULATE_WRITE, start, size)
