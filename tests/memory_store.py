"""A block store in memory: the reference for the contract of storage/block_store.py."""

from __future__ import annotations

import struct
import threading
from collections.abc import Sequence

import xxhash

from tierkv.kvcore.block import BlockSpec
from tierkv.kvcore.errors import BlockNotFoundError, ChecksumError, PoolFullError, TransportError
from tierkv.kvcore.ids import BlockKey
from tierkv.storage.block_store import block_size_checked, check_block, range_span


class MemoryBlockStore:
    """Blocks in a dictionary, up to ``capacity_bytes``."""

    def __init__(self, *, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self._used_bytes = 0
        self._lock = threading.Lock()
        self._held: dict[BlockKey, tuple[BlockSpec, bytearray, tuple[int, ...]]] = {}
        self._closed = False

    def put(self, block: BlockSpec, payload: memoryview) -> None:
        block = check_block(block, payload)
        data = bytearray(payload.cast("B"))
        size = block.ranges.size_bytes
        sums = tuple(
            xxhash.xxh3_64_intdigest(memoryview(data)[i * size : (i + 1) * size])
            for i in range(block.ranges.count)
        )
        with self._lock:
            self._check_open()
            if block.key in self._held:
                return
            if self._used_bytes + block.ranges.payload_bytes > self._capacity_bytes:
                raise PoolFullError(
                    f"{block.ranges.payload_bytes} more bytes exceed the store's capacity"
                )
            self._held[block.key] = (block, data, sums)
            self._used_bytes += block.ranges.payload_bytes

    def get_range(self, key: BlockKey, index: int, destination: memoryview) -> None:
        with self._lock:
            self._check_open()
            found = self._held.get(key)
        if found is None:
            raise BlockNotFoundError(f"block {key.hex()} is not stored")
        block, data, sums = found
        destination.cast("B")[:] = data[range_span(block, index, destination)]
        if xxhash.xxh3_64_intdigest(destination) != sums[index]:
            self.delete(key)
            raise ChecksumError(f"range {index} of block {key.hex()} has bad bytes")

    def get_block(self, key: BlockKey, destination: memoryview) -> bytes:
        with self._lock:
            self._check_open()
            found = self._held.get(key)
        if found is None:
            raise BlockNotFoundError(f"block {key.hex()} is not stored")
        block = found[0]
        flat = block_size_checked(block, destination)
        for index in range(block.ranges.count):
            start = index * block.ranges.size_bytes
            self.get_range(key, index, flat[start : start + block.ranges.size_bytes])
        return struct.pack(f"<{block.ranges.count}Q", *found[2])

    def exists(self, key: BlockKey) -> bool:
        with self._lock:
            self._check_open()
            return key in self._held

    def find(self, key: BlockKey) -> BlockSpec | None:
        with self._lock:
            self._check_open()
            found = self._held.get(key)
            return found[0] if found is not None else None

    def delete(self, key: BlockKey) -> None:
        with self._lock:
            self._check_open()
            found = self._held.pop(key, None)
            if found is not None:
                self._used_bytes -= found[0].ranges.payload_bytes

    def blocks(self) -> Sequence[BlockSpec]:
        with self._lock:
            self._check_open()
            return [block for block, _, _ in self._held.values()]

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._held.clear()

    def _check_open(self) -> None:
        if self._closed:
            raise TransportError("the block store is closed")
