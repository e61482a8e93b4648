"""A block store in a folder: one file per block, whole or absent, index rebuilt from headers.

    header (336 bytes, little-endian) | one xxh3_64 per range | payload

A file is written under a temporary name, synced and renamed, so a crash leaves no half block. The
last eight bytes of the header are the xxh3_64 of header and checksums. Simple on purpose:
segment files with direct I/O come behind the same Protocol.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import xxhash

from kvcore import limits
from kvcore.errors import (
    BlockNotFoundError,
    ChecksumError,
    ConfigError,
    PoolFullError,
    TransportError,
)
from kvcore.ids import BlockKey
from storage.block_store import StoredBlock, check_block, range_span

log = logging.getLogger(__name__)

_MAGIC: Final = b"TKVBLK01"
_FIELDS: Final = struct.Struct("<8s16s16sQIIQ128s128s")
_HEADER_BYTES: Final = _FIELDS.size + 16
_SUFFIX: Final = ".block"
_TEMPORARY: Final = ".part"
_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True, slots=True)
class _Entry:
    block: StoredBlock
    order: int
    checksums: tuple[int, ...]

    @property
    def payload_at(self) -> int:
        """Where the payload begins in the file."""
        return _HEADER_BYTES + 8 * self.block.range_count


class FileBlockStore:
    """Blocks as files below ``folder``, up to ``capacity_bytes`` of payload."""

    def __init__(self, folder: Path, *, capacity_bytes: int) -> None:
        """Open the folder and read every header in it.

        Files that are broken or half-written are removed: they are only cached copies.

        Raises:
            ConfigError: the folder can't be made or read.
        """
        self._folder = folder
        self._capacity_bytes = capacity_bytes
        self._lock = threading.Lock()
        self._closed = False
        self._index: dict[BlockKey, _Entry] = {}
        self._used_bytes = 0
        self._last_order = 0
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._rebuild()
        except OSError as error:
            raise ConfigError(
                f"the block store folder {folder} can't be used: {error.strerror}"
            ) from error

    def put(self, block: StoredBlock, payload: memoryview) -> None:
        check_block(block, payload)
        with self._lock:
            self._check_open()
            if block.key in self._index:
                return
            if self._used_bytes + block.payload_bytes > self._capacity_bytes:
                raise PoolFullError(f"{block.payload_bytes} more bytes exceed the store's capacity")
            self._used_bytes += block.payload_bytes
            self._last_order += 1
            order = self._last_order
        try:
            entry = self._write(block, payload.cast("B"), order)
        except OSError as error:
            with self._lock:
                self._used_bytes -= block.payload_bytes
            kind = PoolFullError if error.errno in _FULL else TransportError
            raise kind(f"block {block.key.hex()} was not stored: {error.strerror}") from error
        with self._lock:
            if block.key in self._index:  # Two writers of one block: same bytes, counted once.
                self._used_bytes -= block.payload_bytes
            self._index[block.key] = entry

    def get_range(self, key: BlockKey, index: int, destination: memoryview) -> None:
        with self._lock:
            self._check_open()
            entry = self._index.get(key)
        if entry is None:
            raise BlockNotFoundError(f"block {key.hex()} is not stored")
        span = range_span(entry.block, index, destination)
        try:
            with self._path(key).open("rb", buffering=0) as file:
                count = os.preadv(
                    file.fileno(), [destination.cast("B")], entry.payload_at + span.start
                )
        except FileNotFoundError as error:
            self._forget(key)
            raise BlockNotFoundError(f"block {key.hex()} has lost its file") from error
        except OSError as error:
            raise TransportError(f"block {key.hex()} can't be read: {error.strerror}") from error
        sound = count == entry.block.range_bytes
        if not sound or xxhash.xxh3_64_intdigest(destination) != entry.checksums[index]:
            self.delete(key)
            raise ChecksumError(f"range {index} of block {key.hex()} has bad bytes")

    def exists(self, key: BlockKey) -> bool:
        with self._lock:
            self._check_open()
            return key in self._index

    def delete(self, key: BlockKey) -> None:
        with self._lock:
            self._check_open()
        if self._forget(key):
            with contextlib.suppress(OSError):
                self._path(key).unlink()

    def blocks(self) -> Sequence[StoredBlock]:
        with self._lock:
            self._check_open()
            entries = sorted(self._index.values(), key=lambda entry: entry.order)
            return [entry.block for entry in entries]

    def close(self) -> None:
        with self._lock:
            self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise TransportError("the block store is closed")

    def _forget(self, key: BlockKey) -> bool:
        with self._lock:
            entry = self._index.pop(key, None)
            if entry is not None:
                self._used_bytes -= entry.block.payload_bytes
            return entry is not None

    def _path(self, key: BlockKey) -> Path:
        """Return a block's file; 256 folders keep listings short."""
        name = key.hex()
        return self._folder / name[:2] / (name + _SUFFIX)

    def _write(self, block: StoredBlock, payload: memoryview, order: int) -> _Entry:
        size = block.range_bytes
        sums = tuple(
            xxhash.xxh3_64_intdigest(payload[i * size : (i + 1) * size])
            for i in range(block.range_count)
        )
        path = self._path(block.key)
        path.parent.mkdir(exist_ok=True)
        temporary = path.with_name(f"{path.stem}-{order}{_TEMPORARY}")
        try:
            with temporary.open("wb") as file:
                file.write(_pack_head(block, order, sums))
                file.write(payload)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
            _sync_folder(path.parent)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        return _Entry(block, order, sums)

    def _rebuild(self) -> None:
        for part in self._folder.glob(f"??/*{_TEMPORARY}"):
            part.unlink()
        for path in self._folder.glob(f"??/*{_SUFFIX}"):
            entry = _read_head(path)
            if entry is None or path != self._path(entry.block.key):
                log.warning("block file %s is broken and removed", path)
                path.unlink()
                continue
            self._index[entry.block.key] = entry
            self._used_bytes += entry.block.payload_bytes
            self._last_order = max(self._last_order, entry.order)


def _pack_head(block: StoredBlock, order: int, sums: Sequence[int]) -> bytes:
    fields = _FIELDS.pack(
        _MAGIC,
        block.key,
        block.parent,
        block.range_bytes,
        block.range_count,
        block.tokens,
        order,
        block.model.encode(),
        block.tenant.encode(),
    )
    packed = struct.pack(f"<{len(sums)}Q", *sums)
    check = xxhash.xxh3_64_intdigest(fields + packed)
    return fields + struct.pack("<QQ", 0, check) + packed


def _read_head(path: Path) -> _Entry | None:
    """Read a block file's header; None if it or the file's size is not right."""
    with path.open("rb") as file:
        head = file.read(_HEADER_BYTES)
        if len(head) < _HEADER_BYTES or not head.startswith(_MAGIC):
            return None
        _, key, parent, size, count, tokens, order, model, tenant = _FIELDS.unpack_from(head)
        if not 1 <= count <= limits.MAX_LAYERS:
            return None
        packed = file.read(8 * count)
        actual = os.fstat(file.fileno()).st_size
    if actual != _HEADER_BYTES + 8 * count + size * count:
        return None
    check = int.from_bytes(head[-8:], "little")
    if xxhash.xxh3_64_intdigest(head[: _FIELDS.size] + packed) != check:
        return None
    block = StoredBlock(
        BlockKey(key), BlockKey(parent), size, count, tokens, _text(model), _text(tenant)
    )
    return _Entry(block, order, struct.unpack(f"<{count}Q", packed))


def _text(raw: bytes) -> str:
    return raw.rstrip(b"\0").decode("utf-8", "replace")


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
