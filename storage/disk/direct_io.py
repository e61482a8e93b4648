"""File I/O past the page cache (O_DIRECT), and the aligned buffers that O_DIRECT needs.

Called by the segment store. The kernel moves whole pages between disk and page-aligned memory.
Aligned memory of the caller is used directly, other memory goes through a pooled buffer. If the
file system refuses O_DIRECT (older tmpfs, some network file systems), the same calls use the page
cache.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import numpy as np

from tierkv.storage.disk.segment_format import PAGE, padded

_SMALLEST_BUFFER: Final = 1 << 16
_KEPT_BYTES: Final = 128 << 20
"""Maximum of idle buffer bytes in one pool; further buffers are freed."""


def is_aligned(view: memoryview) -> bool:
    """Whether the disk can move bytes to or from this memory directly (start on a page)."""
    address: int = np.frombuffer(view, dtype=np.uint8).__array_interface__["data"][0]
    return address % PAGE == 0


class AlignedBuffers:
    """Page-aligned memory, lent by size and reused."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: dict[int, list[mmap.mmap]] = {}
        self._idle_bytes = 0

    @contextmanager
    def lend(self, size_bytes: int) -> Iterator[memoryview]:
        """Lend at least ``size_bytes``, cut to whole pages; the content is whatever it was."""
        size = max(_SMALLEST_BUFFER, 1 << (size_bytes - 1).bit_length())
        buffer = self._take(size)
        view = memoryview(buffer)
        try:
            with view[: padded(size_bytes)] as lent:
                yield lent
        finally:
            view.release()
            self._give_back(buffer)

    def _take(self, size: int) -> mmap.mmap:
        with self._lock:
            idle = self._idle.get(size)
            if idle:
                self._idle_bytes -= size
                return idle.pop()
        return mmap.mmap(-1, size)

    def _give_back(self, buffer: mmap.mmap) -> None:
        with self._lock:
            if self._idle_bytes + len(buffer) <= _KEPT_BYTES:
                self._idle.setdefault(len(buffer), []).append(buffer)
                self._idle_bytes += len(buffer)
                return
        with contextlib.suppress(BufferError):  # An error's traceback may hold a view yet.
            buffer.close()

    def close(self) -> None:
        """Give idle memory back."""
        with self._lock:
            for buffers in self._idle.values():
                for buffer in buffers:
                    with contextlib.suppress(BufferError):
                        buffer.close()
            self._idle.clear()
            self._idle_bytes = 0


class DirectFile:
    """An open file of fixed size; offsets and lengths are whole pages.

    Attributes:
        path: the file.
        direct: whether I/O bypasses the page cache.
    """

    def __init__(self, path: Path) -> None:
        """Open an existing file for reading and writing.

        Raises:
            OSError: it can't be opened.
        """
        self.path = path
        self._fd, self.direct = _open(path)

    def size(self) -> int:
        """Return the file's size in bytes."""
        return os.fstat(self._fd).st_size

    @property
    def is_deleted(self) -> bool:
        """Whether the file has been unlinked, so its content ends with this process."""
        try:
            return os.fstat(self._fd).st_nlink == 0
        except OSError:  # It is closed.
            return False

    def read(self, views: Sequence[memoryview], offset: int) -> int:
        """Fill page-aligned memory; return how many bytes there were.

        Raises:
            OSError: the disk could not.
        """
        total = sum(view.nbytes for view in views)
        done = os.preadv(self._fd, views, offset)
        while 0 < done < total and done % PAGE == 0:
            count = os.preadv(self._fd, _rest(views, done), offset + done)
            if count == 0:
                break
            done += count
        return done

    def write(self, views: Sequence[memoryview], offset: int) -> None:
        """Write all bytes of page-aligned memory.

        Raises:
            OSError: the disk failed or wrote only a part.
        """
        total = sum(view.nbytes for view in views)
        done = os.pwritev(self._fd, views, offset)
        while done < total:
            count = os.pwritev(self._fd, _rest(views, done), offset + done) if done else 0
            if count == 0 or done % PAGE:
                raise OSError(errno.EIO, "the disk took only a part of a write")
            done += count

    def sync(self) -> None:
        """Ask the disk to make everything written last.

        Raises:
            OSError: it could not; what was written since the last sync may be lost, and asking
                again would wrongly succeed.
        """
        os.fdatasync(self._fd)

    def close(self) -> None:
        """Close the file; no read or write may be under way."""
        os.close(self._fd)


def _open(path: Path) -> tuple[int, bool]:
    flags = os.O_RDWR | os.O_CLOEXEC
    direct = getattr(os, "O_DIRECT", 0)
    if direct:
        try:
            fd = os.open(path, flags | direct)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        else:
            if _reads_pages(fd):
                return fd, True
            os.close(fd)
    return os.open(path, flags), False


def _reads_pages(fd: int) -> bool:
    """Whether direct reads work; some file systems accept the flag and refuse the reads."""
    with mmap.mmap(-1, PAGE) as page:
        try:
            os.preadv(fd, [page], 0)
        except OSError as error:
            return error.errno != errno.EINVAL
    return True


def _rest(views: Sequence[memoryview], done: int) -> list[memoryview]:
    """Return the bytes after the first ``done`` bytes."""
    rest: list[memoryview] = []
    for view in views:
        if done < view.nbytes:
            rest.append(view[done:])
        done = max(0, done - view.nbytes)
    return rest
