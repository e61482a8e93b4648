"""Layout of a segment file, and packing of the headers.

    [header page][extent table: u64 slot size each][slot headers][pad][extent 0][extent 1]...

Called by the dmp/segment*.py files. A slot header is 384 bytes, little-endian. All headers form a
contiguous array, so numpy scans a hundred thousand in milliseconds. A slot's payload starts on a
page border; the checksums (an xxh3_64 per range) stand at the end of the slot.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from tierkv.dmp.config import MIN_SLOT_BYTES, SLOT_ALIGN
from tierkv.dmp.segment.segment_place import FILE_MAGIC, PAGE
from tierkv.kvcore import limits
from tierkv.kvcore.errors import ConfigError

LAYOUT_VERSION: Final = 1
SLOT_MAGIC: Final = 0x534B5654
FILE_HEADER: Final = struct.Struct("<8sIIQQQQQ")
"""Magic, layout version, slots per extent, extent count, extent bytes, file bytes, incarnation, and
the highest generation that may have been given out (0 in files of the first versions)."""

INCARNATION_AT: Final = 40
GENERATION_AT: Final = 48
MAX_COUNTER: Final = 1 << 62
"""Upper bound (exclusive) of incarnations and generations; a larger number means damage."""

_NAME: Final = f"S{limits.MAX_NAME_CHARS}"
SLOT_DTYPE: Final = np.dtype(
    [
        ("state", "<u4"),
        ("magic", "<u4"),
        ("generation", "<u8"),
        ("key", "V16"),
        ("parent", "V16"),
        ("length", "<u8"),
        ("range_bytes", "<u8"),
        ("range_count", "<u4"),
        ("tokens", "<u4"),
        ("layout_version", "<u4"),
        ("reserved", "<u4"),
        ("sealed_order", "<u8"),
        ("check", "<u8"),
        ("pad", "V32"),
        ("names", _NAME, (2,)),  # Model and tenant.
    ]
)
SLOT_HEADER: Final = struct.Struct("<IIQ16s16sQQIIIIQQ32x128s128s")
SLOT_HEADER_BYTES: Final = SLOT_HEADER.size
CHECK_AT: Final = 88
assert SLOT_DTYPE.itemsize == SLOT_HEADER_BYTES == 384

LANES: Final = SLOT_HEADER_BYTES // 8
NAMES_LANE: Final = 16
"""Index of the 8-byte number in a header at which model and tenant begin."""
_WEIGHTS: Final = np.array(
    [(0x9E3779B97F4A7C15 * (2 * i + 1)) & 0xFFFFFFFFFFFFFFFF | 1 for i in range(LANES)],
    dtype=np.uint64,
)
_SLOT_WEIGHT: Final = np.uint64(0xC2B2AE3D27D4EB4F)
_WEIGHTS[0] = 0  # State and magic: the state is written last, after the check.
_WEIGHTS[CHECK_AT // 8] = 0


@dataclass(frozen=True, slots=True)
class Geometry:
    """Sizes and offsets of one segment file.

    Attributes:
        extent_count: number of extents in the file.
        extent_bytes: size of each extent.
        slots_per_extent: slot numbers and headers reserved for each extent.
        headers_at: offset of the slot headers.
        payload_at: offset of the first extent.
    """

    extent_count: int
    extent_bytes: int
    slots_per_extent: int
    headers_at: int = field(init=False)
    payload_at: int = field(init=False)

    def __post_init__(self) -> None:
        # Computed once, because every access to a slot needs both.
        headers_at = _page_up(self.extents_at + 8 * self.extent_count)
        payload_at = _page_up(headers_at + SLOT_HEADER_BYTES * self.slot_count)
        object.__setattr__(self, "headers_at", headers_at)
        object.__setattr__(self, "payload_at", payload_at)

    @classmethod
    def of(cls, *, extent_count: int, extent_bytes: int) -> Geometry:
        """Return the geometry of segments that this version creates."""
        return cls(extent_count, extent_bytes, extent_bytes // MIN_SLOT_BYTES)

    @property
    def slot_count(self) -> int:
        """Number of slot numbers in the segment."""
        return self.extent_count * self.slots_per_extent

    @property
    def extents_at(self) -> int:
        """Offset of the extent table."""
        return PAGE

    @property
    def file_bytes(self) -> int:
        """Size of the whole file."""
        return self.payload_at + self.extent_count * self.extent_bytes

    def header_offset(self, slot: int) -> int:
        """Return where a slot's header begins."""
        return self.headers_at + SLOT_HEADER_BYTES * slot

    def payload_offset(self, slot: int, slot_bytes: int) -> int:
        """Return where a slot's payload begins."""
        extent, place = divmod(slot, self.slots_per_extent)
        return self.payload_at + extent * self.extent_bytes + place * slot_bytes


def header_checks(rows: np.ndarray[Any, Any], slots: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return a check number per header row ([n, 48] uint64): a weighted sum modulo 2**64.

    The sum covers the slot number, so a header in another slot's place is found too. The check
    finds torn and stray writes, not forgeries; payloads have xxh3 checksums of their own.
    """
    sums: np.ndarray[Any, Any] = rows @ _WEIGHTS + slots.astype(np.uint64) * _SLOT_WEIGHT
    return sums


def header_check(lanes: np.ndarray[Any, Any], slot: int) -> int:
    """Return the check number of one header ([48] uint64)."""
    return (int(lanes @ _WEIGHTS) + slot * int(_SLOT_WEIGHT)) & 0xFFFF_FFFF_FFFF_FFFF


def read_geometry(path: Path, fd: int) -> Geometry:
    """Read and check a segment's first page and size.

    Raises:
        ConfigError: the file is not a segment, has another layout version, is damaged or truncated.
    """
    cure = f"if nothing in it is needed, remove it (rm {path}) and start again"
    raw = os.pread(fd, FILE_HEADER.size, 0)
    if len(raw) < FILE_HEADER.size or not raw.startswith(FILE_MAGIC):
        raise ConfigError(f"{path} is not a TierKV segment; {cure}")
    fields = FILE_HEADER.unpack(raw)
    _, version, slots_per_extent, extents, extent_bytes, size, incarnation, generation = fields
    if version != LAYOUT_VERSION:
        raise ConfigError(
            f"segment {path} has layout version {version}, this program reads "
            f"{LAYOUT_VERSION}; {cure}"
        )
    geometry = Geometry(extents, extent_bytes, slots_per_extent)
    actual = os.fstat(fd).st_size
    sane = extents > 0 and max(incarnation, generation) < MAX_COUNTER
    if not sane or geometry != Geometry.of(extent_count=extents, extent_bytes=extent_bytes):
        raise ConfigError(f"segment {path} has a damaged first page; {cure}")
    if size != geometry.file_bytes or actual != size:
        raise ConfigError(f"segment {path} has {actual} bytes instead of {size}; {cure}")
    return geometry


def _page_up(offset: int) -> int:
    return -(-offset // SLOT_ALIGN) * SLOT_ALIGN
