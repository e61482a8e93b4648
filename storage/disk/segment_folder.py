"""The folder of the disk tier: locked, checked, and filled with preallocated segment files.

Called by the segment store at open. A problem that a person can fix is a ConfigError with the fix.
A single damaged file is renamed ``*.bad`` and replaced, because its blocks are only cached copies.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tierkv.kvcore.errors import ConfigError
from tierkv.storage.disk.direct_io import AlignedBuffers, DirectFile
from tierkv.storage.disk.segment_format import (
    LAYOUT_VERSION,
    PAGE,
    FilePage,
    FileState,
    OtherVersionError,
    parse_file_page,
)

log = logging.getLogger(__name__)

DEFAULT_SEGMENT_BYTES: Final = 256 << 20
MIN_FILES: Final = 3
"""One active file, one spare, and one to collect."""

_NAME: Final = re.compile(r"segment-(\d{5})\.l4")
_IGNORED: Final = frozenset({"lost+found"})
_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def segment_path(folder: Path, index: int) -> Path:
    """Return the path of a segment file."""
    return folder / f"segment-{index:05d}.l4"


def choose_segment_bytes(capacity_bytes: int) -> int:
    """Return the size of one segment file: an eighth of the capacity, at most 256 MiB."""
    return min(DEFAULT_SEGMENT_BYTES, capacity_bytes // 8 // PAGE * PAGE)


def set_aside(path: Path) -> None:
    """Rename a damaged segment file to ``*.bad``, replacing an earlier one."""
    os.replace(path, path.with_suffix(".bad"))


@dataclass(frozen=True, slots=True)
class SegmentFile:
    """An open segment file and its first page."""

    file: DirectFile
    page: FilePage


@dataclass(slots=True)
class SegmentFolder:
    """An open folder; the lock is held until ``close``.

    Attributes:
        path: the folder.
        segment_bytes: size of each file.
        files: all of them, in the order of their numbers.
        lock_fd: the locked folder.
    """

    path: Path
    segment_bytes: int
    lock_fd: int
    files: list[SegmentFile] = field(default_factory=list)

    def deleted(self) -> str:
        """Say which files were deleted under the running store; empty when none was."""
        count = sum(opened.file.is_deleted for opened in self.files)
        if not count:
            return ""
        total = len(self.files)
        return f"{count} of {total} files in {self.path} were deleted: restart this node"

    def close(self) -> None:
        """Close the files and give the lock back."""
        for opened in self.files:
            opened.file.close()
        os.close(self.lock_fd)


def open_folder(
    path: Path, *, segment_bytes: int, file_count: int, buffers: AlignedBuffers
) -> SegmentFolder:
    """Lock a folder and open or make its segment files.

    Raises:
        ConfigError: the sizes make no sense; the folder can't be used, is used by another
            process, holds other files, or was written by another version; there is no room.
    """
    if segment_bytes < 2 * PAGE or segment_bytes % PAGE or file_count < MIN_FILES:
        raise ConfigError(
            f"a disk tier of {file_count} files of {segment_bytes} bytes is too small",
            hint=f"Give it at least {MIN_FILES} files, each larger than the largest block.",
        )
    try:
        path.mkdir(parents=True, exist_ok=True)
        folder = SegmentFolder(path, segment_bytes, _lock(path))
    except OSError as error:
        raise _unusable(path, error) from error
    made: list[Path] = []
    try:
        _check_names(path, file_count)
        for index in range(file_count):
            folder.files.append(
                _open_segment(segment_path(path, index), segment_bytes, buffers, made)
            )
    except OSError as error:
        _undo(folder, made)
        if error.errno in _FULL:
            raise _no_room(path, segment_bytes * file_count) from error
        raise _unusable(path, error) from error
    except ConfigError:
        _undo(folder, made)
        raise
    return folder


def _lock(path: Path) -> int:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(fd)
        raise ConfigError(
            f"the disk tier folder {path} is in use by another process",
            hint="Give each DMP node a folder of its own, or stop the other process.",
        ) from error
    except OSError:
        os.close(fd)
        raise
    return fd


def _check_names(path: Path, file_count: int) -> None:
    """Refuse a folder of foreign files; remove segment files beyond the capacity."""
    names = sorted(os.listdir(path))
    ours = [name for name in names if _NAME.fullmatch(name)]
    others = [n for n in names if n not in ours and n not in _IGNORED and not n.endswith(".bad")]
    if others and not ours:
        raise ConfigError(
            f"{path} is not a disk tier folder: it holds {others[0]!r}",
            hint="Name an empty folder or one that does not exist yet.",
        )
    if others:
        log.warning("%s holds files that are not ours and are left alone: %s", path, others[:5])
    for name in ours:
        found = _NAME.fullmatch(name)
        if found and int(found[1]) >= file_count:
            log.warning("%s lies beyond the configured capacity and is removed", path / name)
            (path / name).unlink()


def _open_segment(
    path: Path, segment_bytes: int, buffers: AlignedBuffers, made: list[Path]
) -> SegmentFile:
    if path.exists():
        opened = _open_existing(path, segment_bytes, buffers)
        if opened is not None:
            return opened
    made.append(path)
    _make(path, segment_bytes)
    return SegmentFile(DirectFile(path), FilePage(FileState.FREE, segment_bytes, 0, 0))


def _open_existing(path: Path, segment_bytes: int, buffers: AlignedBuffers) -> SegmentFile | None:
    """Open an existing segment file; None if the file was removed or set aside."""
    file = DirectFile(path)
    try:
        page = _read_page(file, buffers)
        size = file.size()
    except BaseException:
        file.close()
        raise
    unused = page is not None and page.file_bytes == 0
    if page is not None and size == segment_bytes and (unused or page.file_bytes == size):
        return SegmentFile(file, page)
    file.close()
    if page is not None and size >= page.file_bytes:
        log.warning("%s has another size than configured and is made anew", path)
        path.unlink()
    else:
        log.warning("%s is damaged or cut off; it is set aside as *.bad", path)
        set_aside(path)
    return None


def _read_page(file: DirectFile, buffers: AlignedBuffers) -> FilePage | None:
    try:
        return _first_page(file, buffers)
    except OtherVersionError as error:
        raise ConfigError(
            f"{file.path} was written with layout version {error.version}; "
            f"this TierKV knows {LAYOUT_VERSION}",
            hint="Use the version that wrote it, or empty the folder (it is only a cache).",
        ) from error
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        return None


def _first_page(file: DirectFile, buffers: AlignedBuffers) -> FilePage | None:
    """Read a file's first page; None if it is damaged or the file is too short.

    Raises:
        OtherVersionError: another layout version.
        OSError: the disk failed.
    """
    with buffers.lend(PAGE) as page:
        count = file.read([page], 0)
        return parse_file_page(bytes(page[:count]))


def _make(path: Path, size_bytes: int) -> None:
    """Create a file of zeros with its disk space allocated."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, size_bytes)
        os.fsync(fd)
    finally:
        os.close(fd)


def _undo(folder: SegmentFolder, made: list[Path]) -> None:
    """Delete the files of a half-made tier, so they don't fill the disk."""
    folder.close()
    for path in made:
        with contextlib.suppress(OSError):
            path.unlink()


def _unusable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"the disk tier folder {path} can't be used: {error.strerror}",
        hint="Name a folder on a disk this process may write to.",
    )


def _no_room(path: Path, needed_bytes: int) -> ConfigError:
    return ConfigError(
        f"{path} has no room for a disk tier of {needed_bytes} bytes",
        hint="Free disk space (*.bad files may go), lower the capacity, or name another disk.",
    )
