"""Tier L4 of one DMP node: the disk store and an optional archive below.

Fits dmp's LowerTier Protocol without an import of dmp. Blocks that are about to leave the disk are
copied to the archive in the background; archived blocks are still found and read.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, TypeVar

from tierkv.kvcore.block import BlockSpec
from tierkv.kvcore.clock import Clock, SystemClock
from tierkv.kvcore.errors import BlockNotFoundError, CacheError, ChecksumError
from tierkv.kvcore.ids import BlockKey
from tierkv.kvcore.node import TierStats
from tierkv.storage.archive import ObjectArchive
from tierkv.storage.archiver import Archiver, ArchiveStats, Errand
from tierkv.storage.disk.segment_store import SegmentStore

T = TypeVar("T")
_ERASED_IN_S: Final = 30.0
"""Longest wait for the archive's deletions: its own requests time out before."""


@dataclass(slots=True)
class _Meter:
    read_bytes: int = 0
    read_time_s: float = 0.0
    write_time_s: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)


class L4Store:
    """A disk store with an optional archive below. All calls block and are thread-safe."""

    def __init__(
        self,
        disk: SegmentStore,
        archive: ObjectArchive | None = None,
        *,
        clock: Clock | None = None,
    ) -> None:
        """Take over both stores, which ``close`` closes; with an archive, start its thread."""
        self._disk = disk
        self._archive = archive
        self._archiver = Archiver(disk, archive) if archive is not None else None
        self._clock = clock or SystemClock()
        self._gone: Callable[[Sequence[BlockKey]], None] | None = None
        self._meter = _Meter()
        disk.set_listener(self)
        if self._archiver is not None:
            self._archiver.start()

    @classmethod
    def open(
        cls,
        folder: Path,
        *,
        capacity_bytes: int,
        segment_bytes: int = 0,
        io_threads: int = 4,
        archive_url: str = "",
        archive_options: dict[str, str] | None = None,
        clock: Clock | None = None,
    ) -> L4Store:
        """Open the disk store and, if a URL is given, the archive.

        Raises:
            ConfigError: the folder or the archive can't be used; names the cure.
        """
        archive = None
        if archive_url:
            archive = ObjectArchive.open(archive_url, clock=clock, **(archive_options or {}))
        disk = SegmentStore(
            folder,
            capacity_bytes=capacity_bytes,
            segment_bytes=segment_bytes,
            io_threads=io_threads,
            clock=clock,
        )
        return cls(disk, archive, clock=clock)

    def set_listener(self, gone: Callable[[Sequence[BlockKey]], None]) -> None:
        """Set the callback that receives blocks that can't be read here any more."""
        self._gone = gone

    def put(self, block: BlockSpec, payload: memoryview, *, checksums: bytes | None = None) -> None:
        """Store a whole block on disk; see tierkv.storage.disk.segment_store.SegmentStore.put."""
        began = self._clock.now()
        self._disk.put(block, payload, checksums=checksums)
        with self._meter.lock:
            self._meter.write_time_s += self._clock.now() - began

    def find(self, key: BlockKey) -> BlockSpec | None:
        """Return a block's description from memory; None if unknown.

        If only the key of an archived block is known, its record is fetched in the background, so a
        later call finds the block.
        """
        block = self._disk.find(key)
        if block is not None or not self._in_archive(key):
            return block
        assert self._archive is not None and self._archiver is not None
        record = self._archive.remembered(key)
        if record is None:
            self._archiver.ask([key], Errand.LEARN)
        return record.block if record is not None else None

    def exists(self, key: BlockKey) -> bool:
        """Whether a read would find the block, as far as is known without I/O."""
        return self._disk.find(key) is not None or self._in_archive(key)

    def get_block(self, key: BlockKey, destination: memoryview) -> bytes:
        """Fill the destination with a whole block, verified, from disk or else the archive.

        Returns:
            One xxh3_64 per range as little-endian uint64, as the block was put.

        Raises:
            BlockNotFoundError, ChecksumError, TransportError: as a BlockStore.
        """
        with self._timed_read(destination):
            try:
                return self._disk.get_block(key, destination)
            except CacheError:
                if not self._in_archive(key):
                    raise
            return self._read_archive(key, lambda archive: archive.get_block(key, destination))

    def get_range(self, key: BlockKey, index: int, destination: memoryview) -> None:
        """Fill the destination with one verified range, from disk or else from the archive."""
        with self._timed_read(destination):
            try:
                return self._disk.get_range(key, index, destination)
            except CacheError:
                if not self._in_archive(key):
                    raise
            self._read_archive(key, lambda archive: archive.get_range(key, index, destination))

    def blocks(self) -> Sequence[BlockSpec]:
        """List the blocks on disk, oldest put first; archived blocks are found by key only."""
        return self._disk.blocks()

    def delete(self, key: BlockKey) -> None:
        """Delete a block on disk now, and its archived object in the background.

        An object of another node is deleted only if this node knows of the object.
        """
        self._disk.delete(key)
        if self._archiver is not None and self._in_archive(key):
            self._archiver.ask([key], Errand.DELETE)

    def erase(self, keys: Sequence[BlockKey]) -> tuple[int, int]:
        """Delete blocks on disk and in the archive, and overwrite their bytes on disk.

        Returns:
            Number of removed copies; bytes removed from the disk.

        Raises:
            TransportError: the disk or the archive failed; a copy may be left.
        """
        blocks, size = self._disk.erase(keys)
        if self._archiver is not None:
            blocks += self._archiver.erase(keys, timeout_s=_ERASED_IN_S)
        return blocks, size

    def stats(self) -> TierStats:
        """Return the counters of the tier, the archive's reads and errors included; cheap."""
        disk = self._disk.stats()
        archive = self._archiver.stats() if self._archiver is not None else ArchiveStats()
        troubles = "; ".join(filter(None, [disk.degraded, archive.failing]))
        with self._meter.lock:
            return replace(
                disk.tier,
                medium=f"disk (degraded: {troubles})" if troubles else "disk",
                read_bytes=self._meter.read_bytes,
                read_time_s=self._meter.read_time_s,
                write_time_s=self._meter.write_time_s,
                alloc_failures=disk.tier.alloc_failures + archive.errors,
            )

    def wait_archived(self, timeout_s: float) -> bool:
        """Wait until the archiver has nothing to do; False if time ran out."""
        return self._archiver is None or self._archiver.wait_idle(timeout_s)

    def close(self) -> None:
        """Stop archiving, then close both stores; afterwards every call raises TransportError."""
        if self._archiver is not None:
            self._archiver.stop()
        self._disk.close()
        if self._archive is not None:
            self._archive.close()

    # What the disk store tells (StoreListener).

    def fading(self, blocks: Sequence[BlockSpec]) -> None:
        """Queue blocks for the archive while they can still be read from disk."""
        if self._archiver is not None:
            self._archiver.ask([block.key for block in blocks], Errand.STORE)

    def evicted(self, blocks: Sequence[BlockSpec]) -> None:
        """Tell the listener about evicted blocks that are not archived."""
        gone = [block.key for block in blocks if not self._in_archive(block.key)]
        if gone and self._gone is not None:
            self._gone(gone)

    def _in_archive(self, key: BlockKey) -> bool:
        if self._archive is None or self._archiver is None:
            return False
        return key not in self._archiver.deleting and self._archive.known(key)

    def _read_archive(self, key: BlockKey, read: Callable[[ObjectArchive], T]) -> T:
        assert self._archive is not None
        try:
            return read(self._archive)
        except (BlockNotFoundError, ChecksumError):
            if self._gone is not None and not self._archive.known(key):
                self._gone([key])
            raise

    @contextmanager
    def _timed_read(self, destination: memoryview) -> Iterator[None]:
        began = self._clock.now()
        yield
        with self._meter.lock:
            self._meter.read_bytes += destination.nbytes
            self._meter.read_time_s += self._clock.now() - began
