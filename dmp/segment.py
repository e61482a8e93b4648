"""The segment file: a named mapping that outlives its process, with a header per slot.

The owning DMP node opens it with an exclusive lock and writes headers; processes of the same host
map it to read and to fill reserved slots. This file moves bytes and checks them; who may use which
slot is decided in dmp/slots.py.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import mmap
import os
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dmp import geometry as g
from dmp.extents import slot_bytes_for
from dmp.geometry import Geometry, SlotHeader
from dmp.pool_node import PutRequest
from dmp.slots import Slot, SlotState
from kvcore.errors import ConfigError
from kvcore.ids import BlockKey

log = logging.getLogger(__name__)

_COLUMNS = (
    *("state", "magic", "layout_version", "generation", "length", "range_bytes"),
    *("range_count", "tokens", "sealed_order", "model", "tenant"),
)
_MADV_POPULATE_WRITE = 23  # <linux/mman.h>; the mmap module has no name for it.
_POPULATE_BYTES = 1 << 20  # madvise keeps the GIL; this is half a millisecond.
_STAMP = struct.Struct("<I4xQ16s16xQQI")
STAMP_BYTES = _STAMP.size


class Stamp(NamedTuple):
    """The head of a slot header: what a mapped reader compares before and after it copies."""

    state: int
    generation: int
    key: bytes
    length: int
    range_bytes: int
    range_count: int


@dataclass(frozen=True, slots=True)
class SegmentScan:
    """What an attached segment holds.

    Attributes:
        generations: of every slot number.
        extent_sizes: slot size of every extent, 0 when never assigned.
        slots: sealed and quarantined slots, oldest seal first.
        dropped: slot numbers that were half-written or whose header is damaged.
        last_order: highest order of sealing among them.
    """

    generations: list[int]
    extent_sizes: list[int]
    slots: list[Slot]
    dropped: list[int]
    last_order: int


class Segment:
    """A mapped segment file.

    Attributes:
        path: the file.
        geometry: sizes and offsets.
        inode: which file of that name it is.
    """

    def __init__(self, path: Path, fd: int, geometry: Geometry) -> None:
        self.path = path
        self.geometry = geometry
        self.inode = os.fstat(fd).st_ino
        self._fd = fd
        self._map = mmap.mmap(fd, geometry.file_bytes)
        self._view = memoryview(self._map)
        self._closing = threading.Event()
        self._populating: threading.Thread | None = None

    @property
    def incarnation(self) -> int:
        """Start number of the process that owns, or last owned, the file."""
        return int.from_bytes(self._view[g.INCARNATION_AT : g.INCARNATION_AT + 8], "little")

    def set_incarnation(self, incarnation: int) -> None:
        """Begin a life; references from older ones are stale from here on."""
        struct.pack_into("<Q", self._view, g.INCARNATION_AT, incarnation)

    def set_extent_size(self, extent: int, slot_bytes: int) -> None:
        """Note the slot size of an extent."""
        struct.pack_into("<Q", self._view, self.geometry.extents_at + 8 * extent, slot_bytes)

    def payload(self, slot: int, slot_bytes: int, start: int, stop: int) -> memoryview:
        """Return bytes [start, stop) of a slot; the caller has checked that they are its own."""
        at = self.geometry.payload_offset(slot, slot_bytes)
        return self._view[at + start : at + stop]

    def write_checksums(self, slot: int, slot_bytes: int, checksums: Sequence[int]) -> None:
        """Store one xxh3_64 per range at the end of a slot."""
        at = self.geometry.payload_offset(slot, slot_bytes) + slot_bytes - 8 * len(checksums)
        struct.pack_into(f"<{len(checksums)}Q", self._view, at, *checksums)

    def checksum(self, slot: int, slot_bytes: int, index: int, count: int) -> int:
        """Return the stored xxh3_64 of range ``index`` of ``count``."""
        at = self.geometry.payload_offset(slot, slot_bytes) + slot_bytes - 8 * (count - index)
        return int.from_bytes(self._view[at : at + 8], "little")

    def write_header(self, slot: Slot, *, order: int = 0) -> None:
        """Store a slot's header, its state last; ``order`` keeps the age over a restart."""
        at = self.geometry.header_offset(slot.index)
        put = slot.put
        self.set_state(slot.index, SlotState.FREE)
        g.SLOT_HEADER.pack_into(
            self._view,
            at,
            SlotState.FREE,
            g.SLOT_MAGIC,
            slot.generation,
            put.key,
            put.parent,
            put.range_bytes * put.range_count,
            put.range_bytes,
            put.range_count,
            put.tokens,
            g.LAYOUT_VERSION,
            0,
            order,
            0,
            put.model.encode(),
            put.tenant.encode(),
        )
        row = np.frombuffer(self._view, np.uint64, g.SLOT_HEADER_BYTES // 8, at)
        check = int(g.header_checks(row[None, :])[0])
        struct.pack_into("<Q", self._view, at + g.CHECK_AT, check)
        self.set_state(slot.index, slot.state)

    def set_state(self, slot: int, state: SlotState) -> None:
        """Store a slot's state: one aligned word, so a reader sees the old or the new one."""
        struct.pack_into("<I", self._view, self.geometry.header_offset(slot), state)

    def read_stamp(self, slot: int) -> Stamp:
        """Return state, generation, key and sizes of a slot; not checked in any way."""
        return parse_stamp(self._view, self.geometry.header_offset(slot))

    @property
    def memory(self) -> memoryview:
        """The whole file, to register with a network device; not to be kept beyond ``close``."""
        return self._view

    def read_header(self, slot: int) -> SlotHeader:
        """Return one slot header, with whether its check number fits."""
        at = self.geometry.header_offset(slot)
        row = np.frombuffer(self._view, g.SLOT_DTYPE, 1, at)
        lanes = row.view(np.uint64).reshape(1, -1)
        intact = int(g.header_checks(lanes)[0]) == int(row["check"][0])
        return _parse_headers(row, [intact])[0]

    def scan(self) -> SegmentScan:
        """Read all slot headers at once; cost is one pass over the used ones."""
        geometry = self.geometry
        rows = np.frombuffer(self._view, g.SLOT_DTYPE, geometry.slot_count, geometry.headers_at)
        sizes = np.frombuffer(self._view, "<u8", geometry.extent_count, geometry.extents_at)
        used = np.flatnonzero(rows["state"])
        some = rows[used]
        intact = g.header_checks(some.view(np.uint64).reshape(-1, g.LANES)) == some["check"]
        headers = _parse_headers(some, intact.tolist())
        extent_sizes = [int(s) for s in sizes]
        kept: list[tuple[int, Slot]] = []
        dropped: list[int] = []
        for index, header in zip(used.tolist(), headers, strict=True):
            size = extent_sizes[index // geometry.slots_per_extent]
            if _is_sound(header, size, index % geometry.slots_per_extent, geometry):
                slot = Slot(index, header.generation, header.put, SlotState(header.state))
                kept.append((header.sealed_order, slot))
            else:
                dropped.append(index)
        kept.sort(key=lambda pair: pair[0])
        generations = rows["generation"].tolist()
        last_order = kept[-1][0] if kept else 0
        return SegmentScan(
            generations, extent_sizes, [slot for _, slot in kept], dropped, last_order
        )

    def populate(self) -> None:
        """Enter all pages into this process's page table, in a thread of its own.

        Else the first copy into each page pays for a fault, which makes it up to 20 times slower
        (measured in a virtual machine: 0.2 instead of 4 GiB/s).
        """
        self._populating = threading.Thread(
            target=self._populate_all, name="dmp-populate", daemon=True
        )
        self._populating.start()

    def stop_populating(self) -> None:
        """End that thread early."""
        self._closing.set()
        if self._populating is not None:
            self._populating.join()

    def _populate_all(self) -> None:
        # Kernels before 5.14 refuse; then pages come as they are touched.
        with contextlib.suppress(OSError):
            for start in range(0, len(self._map), _POPULATE_BYTES):
                if self._closing.is_set():
                    return
                size = min(_POPULATE_BYTES, len(self._map) - start)
                self._map.madvise(_MADV_POPULATE_WRITE, start, size)

    def disown(self) -> None:
        """Keep only the mapping; a process that merely maps needs no descriptor and no lock."""
        self._fd = -1

    def close(self) -> None:
        """Unmap and unlock; views still in use keep the mapping until they die."""
        self.stop_populating()
        with contextlib.suppress(BufferError):
            self._view.release()
            self._map.close()
        if self._fd >= 0:
            fcntl.flock(self._fd, fcntl.LOCK_UN)
            os.close(self._fd)
            self._fd = -1


def parse_stamp(raw: memoryview, at: int = 0) -> Stamp:
    """Unpack the first STAMP_BYTES of a slot header, wherever they were read from."""
    return Stamp(*_STAMP.unpack_from(raw, at))


def open_segment(path: Path, geometry: Geometry) -> Segment:
    """Open a node's segment as its only owner, making it if there is none.

    A segment of another size is replaced: its blocks are only cached, and the operator asked for
    the new size.

    Raises:
        ConfigError: the file is no segment, of another layout version, truncated, owned by a
            running process, or the memory for it is not there.
    """
    if path.exists():
        fd = _open_locked(path)
        try:
            found = _read_geometry(path, fd)
        except ConfigError:
            os.close(fd)
            raise
        if found == geometry:
            return Segment(path, fd, geometry)
        log.warning("segment %s has another size than configured; its blocks are dropped", path)
        path.unlink()
        os.close(fd)
    return _create(path, geometry)


def map_segment(path: Path) -> Segment:
    """Map a running node's segment, to read it and to fill reserved slots.

    Raises:
        ConfigError: there is no such file or it is no segment of this layout.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(f"segment {path} can't be opened: {error.strerror}") from error
    try:
        segment = Segment(path, fd, _read_geometry(path, fd))
        segment.disown()
        return segment
    finally:
        os.close(fd)


def _create(path: Path, geometry: Geometry) -> Segment:
    """Make the file under another name first, so that a crash leaves no half-made segment."""
    fresh = path.with_name(path.name + ".new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"segment {path} can't be made: {error.strerror}") from error
    try:
        _lock(path, fd)
        _allocate(path, fd, geometry.file_bytes)
        header = g.FILE_HEADER.pack(
            g.FILE_MAGIC,
            g.LAYOUT_VERSION,
            geometry.slots_per_extent,
            geometry.extent_count,
            geometry.extent_bytes,
            geometry.file_bytes,
            0,
        )
        os.pwrite(fd, header, 0)
        os.rename(fresh, path)
    except ConfigError:
        fresh.unlink(missing_ok=True)
        os.close(fd)
        raise
    return Segment(path, fd, geometry)


def _allocate(path: Path, fd: int, size: int) -> None:
    """Get all memory now: a sparse file on a full tmpfs would kill its writers with SIGBUS."""
    os.ftruncate(fd, 0)
    room = os.statvfs(path.parent)
    free = room.f_bavail * room.f_frsize
    cure = (
        f"lower dmp.capacity, enlarge it (mount -o remount,size=... {path.parent}), "
        "or put dmp.segment_dir elsewhere"
    )
    message = f"segment {path} needs {size} bytes but {free} are free in {path.parent}; {cure}"
    if size > free:
        raise ConfigError(message)
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG, errno.EDQUOT):
            raise ConfigError(message) from error
        raise ConfigError(f"segment {path} can't be allocated: {error.strerror}") from error


def _open_locked(path: Path) -> int:
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(f"segment {path} can't be opened: {error.strerror}") from error
    try:
        _lock(path, fd)
    except ConfigError:
        os.close(fd)
        raise
    return fd


def _lock(path: Path, fd: int) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise ConfigError(
            f"segment {path} is owned by a running process; stop it, or give this DMP node another "
            "--node-id or dmp.segment_dir"
        ) from error


def _read_geometry(path: Path, fd: int) -> Geometry:
    """Check a segment's first page and size."""
    cure = f"if nothing in it is needed, remove it (rm {path}) and start again"
    raw = os.pread(fd, g.FILE_HEADER.size, 0)
    if len(raw) < g.FILE_HEADER.size or not raw.startswith(g.FILE_MAGIC):
        raise ConfigError(f"{path} is not a TierKV segment; {cure}")
    _, version, slots_per_extent, extents, extent_bytes, size, _ = g.FILE_HEADER.unpack(raw)
    if version != g.LAYOUT_VERSION:
        raise ConfigError(
            f"segment {path} has layout version {version}, this program reads "
            f"{g.LAYOUT_VERSION}; {cure}"
        )
    geometry = Geometry(extents, extent_bytes, slots_per_extent)
    actual = os.fstat(fd).st_size
    if geometry != Geometry.of(extent_count=extents, extent_bytes=extent_bytes) or extents == 0:
        raise ConfigError(f"segment {path} has a damaged first page; {cure}")
    if size != geometry.file_bytes or actual != size:
        raise ConfigError(f"segment {path} has {actual} bytes instead of {size}; {cure}")
    return geometry


def _is_sound(header: SlotHeader, slot_bytes: int, place: int, geometry: Geometry) -> bool:
    """Say whether a used slot may be kept: finished, undamaged and inside its extent."""
    put = header.put
    return (
        header.intact
        and header.state in (SlotState.SEALED, SlotState.QUARANTINED)
        and slot_bytes == slot_bytes_for(put.range_bytes, put.range_count)
        and (place + 1) * slot_bytes <= geometry.extent_bytes
    )


def _parse_headers(rows: np.ndarray[Any, Any], intact: Sequence[bool]) -> list[SlotHeader]:
    """Turn header rows into values; columns at once, because numpy scalars are slow."""
    names: dict[bytes, str] = {}

    def name(raw: bytes) -> str:
        return names.setdefault(raw, raw.decode("utf-8", "replace"))

    keys = rows["key"].tobytes()
    parents = rows["parent"].tobytes()
    table = zip(*(rows[c].tolist() for c in _COLUMNS), strict=True)
    headers = []
    for i, row in enumerate(table):
        state, magic, version, generation, length, size, count, tokens, order, model, tenant = row
        put = PutRequest(
            key=BlockKey(keys[16 * i : 16 * i + 16]),
            parent=BlockKey(parents[16 * i : 16 * i + 16]),
            range_bytes=size,
            range_count=count,
            tokens=tokens,
            model=name(model),
            tenant=name(tenant),
        )
        sound = intact[i] and magic == g.SLOT_MAGIC and version == g.LAYOUT_VERSION
        headers.append(SlotHeader(state, generation, put, length, order, sound))
    return headers
