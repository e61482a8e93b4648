"""The life of a segment file: created, reopened, locked, or refused with a remedy.

Called by dmp/node/node.py. A file that may not be a segment is renamed, never removed, and no
half-made segment ever appears under the final name.
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
from pathlib import Path
from typing import Final

from tierkv.dmp.segment import geometry as g
from tierkv.dmp.segment.geometry import Geometry
from tierkv.dmp.segment.memory_room import check_room
from tierkv.dmp.segment.segment import Segment
from tierkv.dmp.segment.segment_head import FILE_MAGIC
from tierkv.kvcore.errors import ConfigError

log = logging.getLogger(__name__)
_LOCK_INTERVAL_S: Final = 0.02


def open_segment(path: Path, geometry: Geometry, *, wait_s: float = 0.0) -> Segment:
    """Open a node's segment as its only owner; create the segment if it does not exist.

    A segment of another size is replaced: the blocks are only cached, and the operator wants the
    new size. A damaged segment is replaced too, with a log line: a damaged cache must not prevent a
    start. A file of another kind is renamed to end in ``.bad``.

    Args:
        path: path of the file.
        geometry: wanted sizes.
        wait_s: how long to wait for the owning process to end ("start new, stop old").

    Raises:
        ConfigError: the file belongs to another user or to a running process, or too little memory
            is available.
    """
    trouble = ""
    while path.exists():
        fd = _open_locked(path, wait_s)
        if fd is None:
            continue
        try:
            known = g.read_geometry(path, fd)
        except ConfigError as error:
            trouble = _put_away(path, fd, error)
        except BaseException:
            os.close(fd)
            raise
        else:
            if known == geometry:
                return Segment(path, fd, geometry)
            log.warning("segment %s has another size than configured; its blocks are dropped", path)
            path.unlink()
        os.close(fd)
    return _create(path, geometry, trouble=trouble)


def _put_away(path: Path, fd: int, error: ConfigError) -> str:
    """Remove or rename a damaged file; return a text about the fault and the action."""
    damage = error.message.partition(";")[0]
    if os.pread(fd, len(FILE_MAGIC), 0) == FILE_MAGIC:
        path.unlink()
        trouble = f"{damage}: its cached blocks are dropped, the pool began empty"
    else:
        aside = path.with_name(f"{path.name}.bad")
        path.rename(aside)
        trouble = f"{damage}: set aside as {aside}; the pool began empty"
    log.critical("%s", trouble)
    return trouble


def _create(path: Path, geometry: Geometry, *, trouble: str) -> Segment:
    """Make the file under a temporary name, so that a crash leaves no half-made segment."""
    fresh = path.with_name(path.name + ".new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise ConfigError(f"segment {path} can't be made: {error.strerror}") from error
    try:
        _lock(path, fd, 0.0)
        _check_owner(fresh, fd)
    except ConfigError:
        os.close(fd)  # Do not unlink: another process may be about to rename the file.
        raise
    try:
        _allocate(path, fd, geometry)
        os.pwrite(fd, _first_page(geometry), 0)
        os.rename(fresh, path)
    except (ConfigError, OSError) as error:
        fresh.unlink(missing_ok=True)
        os.close(fd)
        if isinstance(error, OSError):
            raise ConfigError(f"segment {path} can't be made: {error.strerror}") from error
        raise
    return Segment(path, fd, geometry, trouble=trouble)


def _first_page(geometry: Geometry) -> bytes:
    return g.FILE_HEADER.pack(
        FILE_MAGIC,
        g.LAYOUT_VERSION,
        geometry.slots_per_extent,
        geometry.extent_count,
        geometry.extent_bytes,
        geometry.file_bytes,
        0,
        1,
    )


def _allocate(path: Path, fd: int, geometry: Geometry) -> None:
    """Give the file its size, and the headers their memory; extents get memory as blocks arrive.

    A write into a hole on a full tmpfs would kill the process with SIGBUS. Hence no byte is written
    where the file has no memory (dmp/segment/segment_memory.py).
    """
    os.ftruncate(fd, 0)
    check_room(path, geometry.file_bytes)
    try:
        os.ftruncate(fd, geometry.file_bytes)
        os.posix_fallocate(fd, 0, geometry.payload_at)
    except OSError as error:
        raise ConfigError(f"segment {path} can't be allocated: {error.strerror}") from error


def _open_locked(path: Path, wait_s: float) -> int | None:
    """Open and lock the file; None if the owner replaced or removed the file meanwhile."""
    fd = _open(path)
    try:
        _check_owner(path, fd)
        _lock(path, fd, wait_s)
        if os.stat(path).st_ino == os.fstat(fd).st_ino:
            return fd
    except FileNotFoundError:
        pass
    except ConfigError:
        os.close(fd)
        raise
    os.close(fd)
    return None


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(f"segment {path} can't be opened: {error.strerror}") from error


def _check_owner(path: Path, fd: int) -> None:
    """Refuse another user's file: the blocks may be anything, although the checksums fit."""
    owner = os.fstat(fd).st_uid
    if owner != os.geteuid():
        raise ConfigError(
            f"segment {path} belongs to user {owner}, not to this process's user {os.geteuid()}; "
            f"if nothing in it is needed, remove it (rm {path}), or run as that user"
        )


def _lock(path: Path, fd: int, wait_s: float) -> None:
    tries = max(1, round(wait_s / _LOCK_INTERVAL_S))
    for left in range(tries, 0, -1):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError as error:
            if left == 1:
                raise ConfigError(
                    f"segment {path} is owned by a running process; stop it, or give this DMP node "
                    "another --node-id or dmp.segment_dir"
                ) from error
            if left == tries:
                log.info("segment %s: waiting %g s for the process that owns it", path, wait_s)
            time.sleep(_LOCK_INTERVAL_S)
