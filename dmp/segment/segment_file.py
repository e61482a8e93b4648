"""The start of a segment file: created, reopened, locked, or refused with a remedy; then scanned.

Called by dmp/node/node.py and dmp/node/state.py. A file that may not be a segment is renamed, never
removed, and no half-made segment ever appears under the final name. The scan is one vectorised pass
over the slot headers. A header counts if the check number is right, the slot was sealed (or
quarantined), and the slot lies inside the extent; all other headers are dropped.
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from tierkv.dmp.config import MIN_SLOT_BYTES, SLOT_ALIGN
from tierkv.dmp.segment import geometry as g
from tierkv.dmp.segment.geometry import Geometry
from tierkv.dmp.segment.restored import Column, RestoredSlots
from tierkv.dmp.segment.segment import Segment
from tierkv.dmp.segment.segment_place import FILE_MAGIC, check_room
from tierkv.dmp.segment.slots import Slot, SlotState
from tierkv.kvcore import limits
from tierkv.kvcore.errors import ConfigError

log = logging.getLogger(__name__)
_LOCK_INTERVAL_S: Final = 0.02

_CHUNK: Final = 4096
"""Headers checked at a time: 1.5 MiB, which stays in the processor's cache."""


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


@dataclass(frozen=True, slots=True, eq=False)
class SegmentScan:
    """Contents of an attached segment.

    Attributes:
        extent_sizes: slot size of every extent, 0 for an extent that was never assigned.
        sealed: readable slots, oldest seal first.
        quarantined: slots with bad bytes.
        dropped: slot numbers that were half-written or have a damaged header.
        last_order: highest order of sealing.
        generation: highest generation that may have been given out.
    """

    extent_sizes: list[int]
    sealed: RestoredSlots
    quarantined: list[Slot]
    dropped: list[int]
    last_order: int
    generation: int


def scan_segment(segment: Segment) -> SegmentScan:
    """Read all slot headers in use; O(slots), 100 000 in about 50 ms."""
    rows, sizes = segment.headers.rows(), segment.extent_sizes()
    used = _used_slots(rows, sizes, segment.geometry)
    sealed, quarantined = [RestoredSlots.of(used[:0], rows[:0])], list[Slot]()
    dropped: list[int] = []
    for start in range(0, len(used), _CHUNK):
        numbers = used[start : start + _CHUNK]
        some = rows[numbers]
        sound = _are_sound(some, numbers, sizes, segment.geometry)
        good = sound & (some["state"] == SlotState.SEALED)
        sealed.append(_columns(numbers, some, good))
        if not good.all():
            quarantined += _quarantined(numbers, some, sound & ~good)
            dropped += numbers[~sound].tolist()
    restored = RestoredSlots.joined(sealed)
    return SegmentScan(
        extent_sizes=sizes.tolist(),
        sealed=restored,
        quarantined=quarantined,
        dropped=dropped,
        last_order=int(restored.orders.max(initial=0)),
        generation=_highest_generation(segment, rows, restored),
    )


def _columns(numbers: Column, some: Column, good: Column) -> RestoredSlots:
    if good.all():
        return RestoredSlots.of(numbers, some)
    return RestoredSlots.of(numbers[good], some[good])


def _used_slots(rows: Column, sizes: Column, geometry: Geometry) -> Column:
    """Return the numbers of slots that are not free, ascending.

    An extent has fewer slots than reserved slot numbers, so most headers need no check.
    """
    sane = (sizes >= MIN_SLOT_BYTES) & (sizes <= geometry.extent_bytes) & (sizes % SLOT_ALIGN == 0)
    found = [np.zeros(0, np.int64)]
    for size in np.unique(sizes[sane]).tolist():
        extents = np.flatnonzero(sizes == size)
        places = np.arange(geometry.extent_bytes // size)
        numbers = (extents[:, None] * geometry.slots_per_extent + places).ravel()
        found.append(numbers[rows["state"][numbers] != SlotState.FREE])
    return found[-1] if len(found) == 2 else np.sort(np.concatenate(found))


def _are_sound(some: Column, numbers: Column, sizes: Column, geometry: Geometry) -> Column:
    """Mark the used slots that can be kept: finished, undamaged and of their extent's size."""
    lanes = some.view(np.uint64).reshape(-1, g.LANES)
    intact = g.header_checks(lanes, numbers) == some["check"]
    known = (some["magic"] == g.SLOT_MAGIC) & (some["layout_version"] == g.LAYOUT_VERSION)
    ended = (some["state"] == SlotState.SEALED) | (some["state"] == SlotState.QUARANTINED)
    size, count = some["range_bytes"], some["range_count"].astype(np.uint64)
    bounded = (size >= 1) & (size <= geometry.extent_bytes)
    bounded &= (count >= 1) & (count <= limits.MAX_LAYERS)
    bounded &= some["sealed_order"] < g.MAX_COUNTER
    bounded &= (some["generation"] >= 1) & (some["generation"] < g.MAX_COUNTER)
    need = -(-(size * count + 8 * count) // SLOT_ALIGN) * SLOT_ALIGN
    fits = np.maximum(need, MIN_SLOT_BYTES) == sizes[numbers // geometry.slots_per_extent]
    exact = some["length"] == size * count
    sound: Column = intact & known & ended & bounded & fits & exact
    return sound


def _quarantined(numbers: Column, some: Column, bad: Column) -> list[Slot]:
    columns = RestoredSlots.of(numbers[bad], some[bad])
    return [
        Slot(int(index), int(columns.generations[row]), columns.block(row), SlotState.QUARANTINED)
        for row, index in enumerate(columns.indices)
    ]


def _highest_generation(segment: Segment, rows: Column, kept: RestoredSlots) -> int:
    """Return an upper bound of the generations of all references."""
    if segment.generation == 0:  # In files of the first versions, slots count their own.
        claimed = rows["generation"]
        return int(claimed[claimed < g.MAX_COUNTER].max(initial=1))
    return max(segment.generation, int(kept.generations.max(initial=1)))
