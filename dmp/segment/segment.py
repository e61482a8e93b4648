"""The segment file: a named mapping that outlives its process, with a header per slot.

The owning DMP node opens the file with an exclusive lock and writes headers. Processes of the same
host map the file to read, and to fill reserved slots. This module moves and checks bytes;
dmp/slots/slot_table.py decides about the use of slots.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tierkv.dmp.segment import geometry as g
from tierkv.dmp.segment.geometry import Geometry
from tierkv.dmp.segment.restored import Column
from tierkv.dmp.segment.segment_memory import SegmentMemory
from tierkv.dmp.segment.segment_place import OWNER_AT, pack_owner
from tierkv.dmp.segment.slots import Slot, SlotState
from tierkv.kvcore.errors import ConfigError

_STAMP = struct.Struct("<I4xQ16s16xQQI")
_WORD = struct.Struct("<Q")
_STATE = struct.Struct("<I")
STAMP_BYTES = _STAMP.size


class Stamp(NamedTuple):
    """The head of a slot header, which a mapped reader compares before and after a copy."""

    state: int
    generation: int
    key: bytes
    length: int
    range_bytes: int
    range_count: int


class SlotHeaders:
    """The headers of all slots, in the mapping."""

    def __init__(self, view: memoryview, geometry: Geometry) -> None:
        self._view = view
        self._geometry = geometry

    def write(self, slot: Slot, *, order: int = 0) -> None:
        """Store a slot's header, the state last.

        A WRITING slot gets no check number, so a restart drops the slot.

        Args:
            slot: slot to store.
            order: order of sealing; preserves the age over a restart.
        """
        block = slot.block
        ranges, owner = block.ranges, block.owner
        at = self._geometry.header_offset(slot.index)
        _STATE.pack_into(self._view, at, SlotState.FREE)
        g.SLOT_HEADER.pack_into(
            self._view,
            at,
            SlotState.FREE,
            g.SLOT_MAGIC,
            slot.generation,
            block.key,
            block.parent,
            ranges.payload_bytes,
            ranges.size_bytes,
            ranges.count,
            block.tokens,
            g.LAYOUT_VERSION,
            0,
            order,
            0,
            owner.model.encode(),
            owner.tenant.encode(),
        )
        if slot.state is not SlotState.WRITING:
            _WORD.pack_into(self._view, at + g.CHECK_AT, self._check_number(slot.index))
        _STATE.pack_into(self._view, at, slot.state)

    def _check_number(self, slot: int) -> int:
        lanes = np.frombuffer(self._view, np.uint64, g.LANES, self._geometry.header_offset(slot))
        return g.header_check(lanes, slot)

    def check(self, slot: Slot) -> None:
        """Assert that a slot's header is intact and describes the slot."""
        at = self._geometry.header_offset(slot.index)
        stored = _WORD.unpack_from(self._view, at + g.CHECK_AT)[0]
        assert stored == self._check_number(slot.index), slot
        stamp = self.stamp(slot.index)
        assert (stamp.state, stamp.generation, stamp.key) == (
            slot.state,
            slot.generation,
            slot.block.key,
        ), slot

    def set_state(self, slot: int, state: SlotState) -> None:
        """Store a slot's state in one aligned word, so a reader sees the old or the new state."""
        _STATE.pack_into(self._view, self._geometry.header_offset(slot), state)

    def stamp(self, slot: int) -> Stamp:
        """Return state, generation, key and sizes of a slot, unchecked."""
        return parse_stamp(self._view, self._geometry.header_offset(slot))

    def rows(self) -> Column:
        """Return all slot headers in place; do not keep the array, because it holds the mapping."""
        shape = self._geometry
        return np.frombuffer(self._view, g.SLOT_DTYPE, shape.slot_count, shape.headers_at)


class Segment:
    """A mapped segment file.

    Attributes:
        path: path of the file.
        geometry: sizes and offsets.
        inode: inode of the file, which tells files with the same path apart.
        headers: the headers of the slots.
        backing: which extents have memory; for the owner.
        trouble: human-readable: what was wrong with the replaced file; empty for no fault.
    """

    def __init__(self, path: Path, fd: int, geometry: Geometry, *, trouble: str = "") -> None:
        self.path = path
        self.trouble = trouble
        self.geometry = geometry
        self.inode = os.fstat(fd).st_ino
        self._fd = fd
        self._map = mmap.mmap(fd, geometry.file_bytes)
        self._view = memoryview(self._map)
        self.headers = SlotHeaders(self._view, geometry)
        self.backing = SegmentMemory(self._map, fd, geometry)
        self._noted_sizes: dict[int, int] = {}

    @property
    def incarnation(self) -> int:
        """Start number of the process that owns, or last owned, the file."""
        return int.from_bytes(self._view[g.INCARNATION_AT : g.INCARNATION_AT + 8], "little")

    def set_incarnation(self, incarnation: int) -> None:
        """Begin a new life; older references are stale from now on."""
        _WORD.pack_into(self._view, g.INCARNATION_AT, incarnation)

    @property
    def generation(self) -> int:
        """Highest generation that may have been given out; 0 in files of old versions."""
        return int.from_bytes(self._view[g.GENERATION_AT : g.GENERATION_AT + 8], "little")

    def set_generation(self, generation: int) -> None:
        """Note that a generation is given out, before any client sees the generation."""
        _WORD.pack_into(self._view, g.GENERATION_AT, generation)

    def set_owner(self, folder: str) -> None:
        """Note the owning cluster, for commands that find the file later."""
        raw = pack_owner(folder)
        self._view[OWNER_AT : OWNER_AT + len(raw)] = raw

    def keep_only(self, slots: Iterable[Slot]) -> None:
        """Give back all memory except for these slots, at a clean stop."""
        at = self.geometry.payload_at
        self.backing.keep_only(sorted((at + slot.offset, slot.extent.slot_bytes) for slot in slots))

    def set_extent_size(self, extent: int, slot_bytes: int) -> None:
        """Note the slot size of an extent."""
        if self._noted_sizes.get(extent) == slot_bytes:
            return
        self._noted_sizes[extent] = slot_bytes
        _WORD.pack_into(self._view, self.geometry.extents_at + 8 * extent, slot_bytes)

    def extent_sizes(self) -> Column:
        """Return a copy of the slot sizes of all extents, unchecked."""
        shape = self.geometry
        return np.frombuffer(self._view, "<u8", shape.extent_count, shape.extents_at).copy()

    def span(self, offset: int, start: int, stop: int) -> memoryview:
        """Return bytes [start, stop) of the slot that begins at an offset (``Slot.offset``)."""
        at = self.geometry.payload_at + offset
        return self._view[at + start : at + stop]

    def stored_checksum(self, slot: Slot, index: int) -> int:
        """Return the stored xxh3_64 of range ``index`` of a slot."""
        end = self.geometry.payload_at + slot.offset + slot.extent.slot_bytes
        at = end - 8 * (slot.block.ranges.count - index)
        checksum: int = _WORD.unpack_from(self._view, at)[0]
        return checksum

    def payload(self, slot: int, slot_bytes: int, start: int, stop: int) -> memoryview:
        """Return bytes [start, stop) of a slot; the caller has checked the bounds."""
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

    @property
    def memory(self) -> memoryview:
        """The whole file, to register with a network device; not to be used after ``close``."""
        return self._view

    def disown(self) -> None:
        """Keep only the mapping; a process without ownership needs no descriptor and no lock."""
        self._fd = -1

    def close(self) -> None:
        """Unmap and unlock; views still in use keep the mapping until they die."""
        self.backing.close()
        with contextlib.suppress(BufferError):
            self._view.release()
            self._map.close()
        if self._fd >= 0:
            fcntl.flock(self._fd, fcntl.LOCK_UN)
            os.close(self._fd)
            self._fd = -1


def parse_stamp(raw: memoryview, at: int = 0) -> Stamp:
    """Unpack the first STAMP_BYTES of a slot header from any source."""
    return Stamp(*_STAMP.unpack_from(raw, at))


def map_segment(path: Path) -> Segment:
    """Map a running node's segment, to read from it and to fill reserved slots.

    A peer names the path, so only a regular file is opened.

    Raises:
        ConfigError: the file does not exist, is no segment of this layout, or can't be mapped.
    """
    try:
        if not path.is_file():
            raise ConfigError(f"segment {path} can't be opened: there is no such file")
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        raise ConfigError(f"segment {path} can't be opened: {error}") from error
    try:
        segment = _mapped(path, fd)
        segment.disown()
        return segment
    finally:
        os.close(fd)


def _mapped(path: Path, fd: int) -> Segment:
    try:
        return Segment(path, fd, g.read_geometry(path, fd))
    except OSError as error:
        raise ConfigError(f"segment {path} can't be mapped: {error.strerror}") from error
