"""Format of a segment file: one page for the file, one page before each block.

    [file page][record page][payload, padded to a page][record page][payload ...

Pure packing and checking, called by storage/disk/segment_store.py and
storage/disk/segment_restore.py. A record page is valid only if its checksum is right. The checksum
is seeded with a random number of the file's current life, so a record of an earlier life, or a
payload that looks like a record, does not pass.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import xxhash

from tierkv.kvcore import limits
from tierkv.kvcore.block import BlockSpec, shared_owner, shared_ranges
from tierkv.kvcore.ids import BlockKey

PAGE: Final = 4096
FILE_MAGIC: Final = b"TIERKVL4"
RECORD_MAGIC: Final = b"TKVBLK02"
LAYOUT_VERSION: Final = 1

PIECE_BYTES: Final = 1 << 20
"""A read of this size reaches the disk's full rate; two side by side hide the verification."""

_FILE: Final = struct.Struct("<8sII Q Q Q")
"""Magic, layout version, state, file bytes, epoch, nonce."""

_RECORD: Final = struct.Struct("<8s16s16sQIIQII128s128s")
"""Magic, key, parent, range bytes, range count, tokens, sequence, state, spare, model, tenant."""

_CHECK: Final = struct.Struct("<Q")
_CHECK_AT: Final = PAGE - _CHECK.size
_SUMS_AT: Final = 512
assert _RECORD.size <= _SUMS_AT and _SUMS_AT + 8 * limits.MAX_LAYERS <= _CHECK_AT


class FileState(IntEnum):
    """Whether a segment file holds valid records."""

    FREE = 0
    IN_USE = 1


@dataclass(frozen=True, slots=True)
class FilePage:
    """The first page of a segment file.

    Attributes:
        state: whether the file's records are valid.
        file_bytes: size of the file when it was made.
        epoch: number of the file's current life; the most recently begun file has the largest.
        nonce: random seed of the record checksums in this life.
    """

    state: FileState
    file_bytes: int
    epoch: int
    nonce: int


@dataclass(frozen=True, slots=True)
class Record:
    """Content of a block's record page.

    Attributes:
        block: the block.
        sequence: position in the order of puts; a garbage collection copy keeps its sequence.
        checksums: one xxh3_64 per range, packed as little-endian uint64.
        dead: True if the block was deleted.
    """

    block: BlockSpec
    sequence: int
    checksums: bytes
    dead: bool = False


class OtherVersionError(Exception):
    """The file was written by a version of TierKV with another layout."""

    def __init__(self, version: int) -> None:
        super().__init__(f"layout version {version}")
        self.version = version


def padded(size_bytes: int) -> int:
    """Round up to whole pages."""
    return -(-size_bytes // PAGE) * PAGE


def record_bytes(block: BlockSpec) -> int:
    """Return the size of a block in a segment file."""
    return PAGE + padded(block.ranges.payload_bytes)


def pieces(block: BlockSpec) -> list[slice]:
    """Split a block's ranges into pieces of about PIECE_BYTES, to be read in parallel.

    A small block, or one whose ranges are not whole pages, is one piece.
    """
    count, size = block.ranges.count, block.ranges.size_bytes
    if block.ranges.payload_bytes < 2 * PIECE_BYTES or size % PAGE:
        return [slice(0, count)]
    step = max(1, PIECE_BYTES // size)
    return [slice(start, min(start + step, count)) for start in range(0, count, step)]


def checksum_of(checksums: bytes, index: int) -> int:
    """Return one range's xxh3_64 from the packed checksums."""
    return int(_CHECK.unpack_from(checksums, 8 * index)[0])


def pack_checksums(block: BlockSpec, payload: memoryview) -> bytes:
    """Compute the xxh3_64 of every range of a payload (flat, format ``B``)."""
    size = block.ranges.size_bytes
    return b"".join(
        _CHECK.pack(xxhash.xxh3_64_intdigest(payload[i * size : (i + 1) * size]))
        for i in range(block.ranges.count)
    )


def is_sound(record: Record, payload: memoryview) -> bool:
    """Whether every range of a payload matches its checksum."""
    size = record.block.ranges.size_bytes
    return all(
        range_is_sound(record, i, payload[i * size : (i + 1) * size])
        for i in range(record.block.ranges.count)
    )


def range_is_sound(record: Record, index: int, data: memoryview) -> bool:
    """Whether one range matches its checksum."""
    return xxhash.xxh3_64_intdigest(data) == checksum_of(record.checksums, index)


def pack_file_page(page: FilePage) -> bytes:
    """Return the page that opens a segment file."""
    head = _FILE.pack(
        FILE_MAGIC, LAYOUT_VERSION, page.state, page.file_bytes, page.epoch, page.nonce
    )
    return _sealed(head, seed=0)


def parse_file_page(data: bytes) -> FilePage | None:
    """Read the first page of a segment file; None if it is damaged.

    A page of zeros means a new, unused file.

    Raises:
        OtherVersionError: the page is valid but of another layout version.
    """
    if len(data) != PAGE:
        return None
    if not any(data):
        return FilePage(FileState.FREE, 0, 0, 0)
    magic, version, state, file_bytes, epoch, nonce = _FILE.unpack_from(data)
    if magic != FILE_MAGIC or not _is_sound(data, seed=0):
        return None
    if version != LAYOUT_VERSION:
        raise OtherVersionError(version)
    if state not in (FileState.FREE, FileState.IN_USE):
        return None
    return FilePage(FileState(state), file_bytes, epoch, nonce)


def pack_record(record: Record, *, nonce: int) -> bytes:
    """Return the record page of a block."""
    block = record.block
    fields = _RECORD.pack(
        RECORD_MAGIC,
        block.key,
        block.parent,
        block.ranges.size_bytes,
        block.ranges.count,
        block.tokens,
        record.sequence,
        int(record.dead),
        0,
        block.owner.model.encode(),
        block.owner.tenant.encode(),
    )
    return _sealed(fields.ljust(_SUMS_AT, b"\0") + record.checksums, seed=nonce)


def parse_record(data: bytes | memoryview, *, nonce: int) -> Record | None:
    """Parse a record page; None unless it is valid in the file's current life."""
    if bytes(data[:8]) != RECORD_MAGIC or len(data) != PAGE or not _is_sound(data, seed=nonce):
        return None
    _, key, parent, size, count, tokens, sequence, dead, _, model, tenant = _RECORD.unpack_from(
        data
    )
    if not 1 <= count <= limits.MAX_LAYERS or not 1 <= size * count <= limits.MAX_SLOT_BYTES:
        return None
    try:
        owner = shared_owner(model.rstrip(b"\0").decode(), tenant.rstrip(b"\0").decode())
    except UnicodeDecodeError:
        return None
    block = BlockSpec(BlockKey(key), BlockKey(parent), tokens, shared_ranges(size, count), owner)
    sums = bytes(data[_SUMS_AT : _SUMS_AT + 8 * count])
    return Record(block, sequence, sums, dead=bool(dead))


def _sealed(data: bytes, *, seed: int) -> bytes:
    body = data.ljust(_CHECK_AT, b"\0")
    return body + _CHECK.pack(xxhash.xxh3_64_intdigest(body, seed=seed))


def _is_sound(data: bytes | memoryview, *, seed: int) -> bool:
    check: int = _CHECK.unpack_from(data, _CHECK_AT)[0]
    return check == xxhash.xxh3_64_intdigest(data[:_CHECK_AT], seed=seed)
