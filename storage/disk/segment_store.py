"""The disk tier: a log-structured block store on preallocated segment files.

    put -> [active file] -> full -> the next file; the oldest is collected (evicted) to be the next

A block is written with one I/O past the page cache, and read with one I/O. The index lives in
memory and is rebuilt from the record pages at open. docs/storage.md describes format, durability
and degraded states.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tierkv.kvcore.block import BlockSpec, Tier
from tierkv.kvcore.clock import Clock, SystemClock
from tierkv.kvcore.errors import (
    BlockNotFoundError,
    CacheError,
    ChecksumError,
    PoolFullError,
    TransportError,
)
from tierkv.kvcore.ids import BlockKey
from tierkv.kvcore.node import TierStats
from tierkv.storage.block_store import (
    BlockRead,
    DiskRangeRead,
    StoreListener,
    block_size_checked,
    check_block,
    range_span,
)
from tierkv.storage.disk.direct_io import AlignedBuffers
from tierkv.storage.disk.segment_folder import MIN_FILES, choose_segment_bytes, open_folder
from tierkv.storage.disk.segment_format import Record, pack_checksums, pieces, range_is_sound
from tierkv.storage.disk.segment_index import IndexEntry, SegmentIndex
from tierkv.storage.disk.segment_log import SegmentLog
from tierkv.storage.disk.segment_restore import restore
from tierkv.storage.disk.store_health import FULL_ERRNOS, MediumHealth, SegmentStoreStats

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Counts:
    puts: int = 0
    gets: int = 0
    read_bytes: int = 0
    write_bytes: int = 0
    checksum_errors: int = 0
    io_errors: int = 0


class SegmentStore:
    """A BlockStore on one folder of one process; see tierkv.storage.block_store.BlockStore.

    A full store evicts the blocks that were put first and not read since; it refuses no put for
    lack of capacity.
    """

    def __init__(
        self,
        folder: Path,
        *,
        capacity_bytes: int,
        segment_bytes: int = 0,
        io_threads: int = 4,
        clock: Clock | None = None,
        listener: StoreListener | None = None,
    ) -> None:
        """Lock the folder, preallocate missing files and rebuild the index.

        Args:
            folder: created if absent; used by this process only.
            capacity_bytes: size in whole segment files, including one spare.
            segment_bytes: size of a segment file, larger than the largest block by two pages; 0
                chooses an eighth of the capacity, at most 256 MiB.
            io_threads: parallel reads of a batch.
            clock: time source for retrying a full disk.
            listener: receives the blocks that leave the store.

        Raises:
            ConfigError: the folder can't be used; the message says how to fix this.
        """
        segment_bytes = segment_bytes or choose_segment_bytes(capacity_bytes)
        count = capacity_bytes // max(1, segment_bytes)
        self._buffers = AlignedBuffers()
        self._folder = open_folder(
            folder, segment_bytes=segment_bytes, file_count=count, buffers=self._buffers
        )
        index = SegmentIndex(count, segment_bytes)
        self._log = SegmentLog(self._folder, index, self._buffers)
        self._index, self._lock = index, self._log.lock
        self._settled = threading.Condition(self._lock)
        self._clock = clock or SystemClock()
        self._listener = listener
        self._health = MediumHealth()
        self._counts = _Counts()
        self._writing: set[BlockKey] = set()
        self._calls = 0
        self._closed = False
        self._direct = all(opened.file.direct for opened in self._folder.files)
        self._threads = ThreadPoolExecutor(io_threads, thread_name_prefix="tierkv-disk")
        restore(self._folder, self._log, self._buffers, self._threads)
        if not self._direct:
            log.warning("%s: no direct I/O on this file system; the page cache is used", folder)

    def set_listener(self, listener: StoreListener) -> None:
        """Replace the listener."""
        self._listener = listener

    def put(self, block: BlockSpec, payload: memoryview, *, checksums: bytes | None = None) -> None:
        """Store a whole block; see tierkv.storage.block_store.BlockStore.

        Args:
            block: description of the block.
            payload: bytes of the block; written without a copy if page-aligned.
            checksums: one xxh3_64 per range as little-endian uint64, if the caller knows them: a
                bit flip since the caller computed them is then found too. Computed if None.
        """
        block = check_block(block, payload)
        flat = payload.cast("B")
        sums = pack_checksums(block, flat) if checksums is None else bytes(checksums)
        if len(sums) != 8 * block.ranges.count:
            raise ValueError(f"{len(sums)} bytes of checksums for {block.ranges.count} ranges")
        try:
            with self._call(), self._writer(block.key) as writes:
                if writes:
                    self._append(block, flat, sums)
        finally:
            self._tell()

    def get_range(self, key: BlockKey, index: int, destination: memoryview) -> None:
        with self._call():
            entry = self._find(key)
            span = range_span(entry.record.block, index, destination)
            flat = destination.cast("B")
            sound = self._read(entry, span.start, flat)
            self._count_read(flat)
            if not sound or not range_is_sound(entry.record, index, flat):
                raise self._bad_bytes(entry, f"range {index}")

    def get_block(self, key: BlockKey, destination: memoryview, *, touch: bool = True) -> bytes:
        """Fill the destination with a whole payload and verify every range.

        One I/O; a large block is read in a few parallel pieces, so one piece is verified while the
        next is read. Page-aligned destinations are fastest, because nothing is copied.
        ``touch=False`` is for housekeeping: the read does not count as a use of the block.

        Returns:
            One xxh3_64 per range as little-endian uint64, from the put.

        Raises:
            BlockNotFoundError: unknown block, or the destination has another size.
            ChecksumError: bad bytes; the block is dropped.
            TransportError: the disk failed.
        """
        return self._get_block(key, destination, touch=touch, split=True)

    def get_blocks(self, reads: Sequence[BlockRead]) -> list[CacheError | None]:
        """Read whole blocks, several at a time.

        Returns:
            One entry per read: None if the destination is filled and verified, else the error.
        """
        split = len(reads) < 2  # Side by side already; and a pool must not wait for itself.
        calls = [
            partial(self._get_block, r.key, r.destination, touch=True, split=split) for r in reads
        ]
        return self._batch(calls)

    def get_ranges(self, reads: Sequence[DiskRangeRead]) -> list[CacheError | None]:
        """Read ranges, several at a time; returns as ``get_blocks`` does."""
        calls = [partial(self.get_range, r.key, r.index, r.destination) for r in reads]
        return self._batch(calls)

    def find(self, key: BlockKey) -> BlockSpec | None:
        """Return a block's description from memory; None if the block is not stored."""
        with self._lock:
            self._check_open()
            entry = self._index.find(key)
            return entry.record.block if entry else None

    def exists(self, key: BlockKey) -> bool:
        return self.find(key) is not None

    def delete(self, key: BlockKey) -> None:
        with self._call():
            with self._lock:
                entry = self._index.remove(key)
            if entry is not None:
                self._log.bury(entry)

    def erase(self, keys: Sequence[BlockKey]) -> tuple[int, int]:
        """Delete blocks and overwrite their bytes; return how many, and their payload bytes.

        Raises:
            TransportError: the disk could not; bytes may be left.
        """
        blocks = size = 0
        with self._call():
            for key in keys:
                with self._lock:
                    entry = self._index.remove(key)
                if entry is None:
                    continue
                try:
                    self._log.erase(entry)
                except OSError as error:
                    raise TransportError(
                        f"block {key.hex()} is not overwritten: {error}"
                    ) from error
                blocks, size = blocks + 1, size + entry.record.block.ranges.payload_bytes
        return blocks, size

    def blocks(self) -> Sequence[BlockSpec]:
        with self._lock:
            self._check_open()
            return self._index.blocks()

    def stats(self) -> SegmentStoreStats:
        """Return the counters; cheap."""
        with self._lock:
            counts = self._counts
            tier = TierStats(
                Tier.L4,
                capacity_bytes=self._index.files.file_bytes * len(self._index.files),
                used_bytes=self._index.live_bytes,
                blocks_used=len(self._index),
                evicted_blocks=self._log.evicted,
                read_bytes=counts.read_bytes,
                write_bytes=counts.write_bytes,
                alloc_failures=counts.checksum_errors + counts.io_errors,
            )
            return SegmentStoreStats(
                tier,
                puts=counts.puts,
                gets=counts.gets,
                copied_bytes=self._log.copied_bytes,
                checksum_errors=counts.checksum_errors,
                io_errors=counts.io_errors,
                degraded=self._health.reason or self._folder.deleted(),
                direct_io=self._direct,
            )

    def close(self) -> None:
        """Wait for the calls under way, sync the active file and unlock the folder."""
        with self._settled:
            if self._closed:
                return
            self._closed = True
            self._settled.wait_for(lambda: not self._calls)
        self._threads.shutdown()
        self._log.sync()
        self._folder.close()
        self._buffers.close()

    def check_invariants(self) -> None:
        """Assert what must always hold; for tests."""
        with self._lock:
            self._index.check_invariants()

    # Calls and locks.

    def _check_open(self) -> None:
        if self._closed:
            raise TransportError("the block store is closed")

    @contextmanager
    def _call(self) -> Iterator[None]:
        """Keep ``close`` from closing the files under a call."""
        with self._lock:
            self._check_open()
            self._calls += 1
        try:
            yield
        finally:
            with self._settled:
                self._calls -= 1
                self._settled.notify_all()

    @contextmanager
    def _writer(self, key: BlockKey) -> Iterator[bool]:
        """Let one thread write a block; yields False if the block is (then) stored already."""
        with self._settled:
            self._settled.wait_for(lambda: key not in self._writing)
            if self._index.find(key) is not None:
                writes = False
            else:
                self._check_health()
                self._writing.add(key)
                writes = True
        try:
            yield writes
        finally:
            if writes:
                with self._settled:
                    self._writing.discard(key)
                    self._settled.notify_all()

    def _batch(self, calls: Sequence[Callable[[], object]]) -> list[CacheError | None]:
        if len(calls) < 2:
            return [_outcome(call) for call in calls]
        try:
            return list(self._threads.map(_outcome, calls))
        except RuntimeError as error:  # Shut down between the check and here.
            raise TransportError("the block store is closed") from error

    def _tell(self) -> None:
        news = self._log.take_news()
        if self._listener is not None and news.evicted:
            self._listener.evicted(news.evicted)
        if self._listener is not None and news.fading:
            self._listener.fading(news.fading)

    # Reading.

    def _get_block(
        self, key: BlockKey, destination: memoryview, *, touch: bool, split: bool
    ) -> bytes:
        with self._call():
            entry = self._find(key, touch=touch)
            flat = block_size_checked(entry.record.block, destination)
            spans = pieces(entry.record.block)
            if split and len(spans) > 1:
                sound = self._read_pieces(entry, flat, spans)
            else:
                sound = self._read_ranges(entry, flat, slice(0, entry.record.block.ranges.count))
            self._count_read(flat)
            if not sound:
                raise self._bad_bytes(entry, "payload")
            return entry.record.checksums

    def _read_pieces(self, entry: IndexEntry, payload: memoryview, spans: Sequence[slice]) -> bool:
        """Read and verify a payload in parallel pieces; all reads have ended on return."""
        reads = [self._threads.submit(self._read_ranges, entry, payload, span) for span in spans]
        wait(reads)
        return all(read.result() for read in reads)

    def _read_ranges(self, entry: IndexEntry, payload: memoryview, span: slice) -> bool:
        """Fill and verify ranges ``span`` of a payload."""
        size = entry.record.block.ranges.size_bytes
        part = payload[span.start * size : span.stop * size]
        return self._read(entry, span.start * size, part) and all(
            range_is_sound(entry.record, i, payload[i * size : (i + 1) * size])
            for i in range(span.start, span.stop)
        )

    def _find(self, key: BlockKey, *, touch: bool = True) -> IndexEntry:
        with self._lock:
            entry = self._index.find(key)
            if entry is None:
                raise BlockNotFoundError(f"block {key.hex()} is not stored")
            if touch:
                self._index.touch(entry)
            return entry

    def _read(self, entry: IndexEntry, start: int, destination: memoryview) -> bool:
        try:
            whole = self._log.read(entry, start, destination)
        except OSError as error:
            self._drop(entry)
            with self._lock:
                self._counts.io_errors += 1
            key = entry.record.block.key.hex()
            raise TransportError(f"block {key} can't be read: {error.strerror}") from error
        return whole

    def _count_read(self, destination: memoryview) -> None:
        with self._lock:
            self._counts.gets += 1
            self._counts.read_bytes += destination.nbytes

    def _bad_bytes(self, entry: IndexEntry, what: str) -> CacheError:
        """Return the error of a failed checksum; drop the block if the disk is to blame."""
        key = entry.record.block.key.hex()
        if not self._drop(entry):
            return BlockNotFoundError(f"block {key} was evicted while it was read")
        with self._lock:
            self._counts.checksum_errors += 1
        log.warning("%s of block %s has bad bytes on disk; the block is dropped", what, key)
        return ChecksumError(f"{what} of block {key} has bad bytes")

    def _drop(self, entry: IndexEntry) -> bool:
        """Drop an unreadable block; False if the block had moved or gone already."""
        with self._lock:
            current = self._index.is_current(entry)
            if current:
                self._index.remove(entry.record.block.key)
        if current:
            self._log.bury(entry)
            if self._listener is not None:
                self._listener.evicted([entry.record.block])
        return current

    # Writing.

    def _append(self, block: BlockSpec, payload: memoryview, checksums: bytes) -> None:
        with self._lock:
            record = Record(block, self._index.next_sequence(), checksums)
        try:
            self._log.append(record, payload)
        except OSError as error:
            raise self._write_failed(block.key, error) from error
        except PoolFullError:
            self._note_trouble(None)
            raise
        self._write_worked(block)

    def _check_health(self) -> None:
        if self._health.refuses(self._clock.now()):
            kind = PoolFullError if self._health.full else TransportError
            raise kind(f"the disk tier takes no blocks: {self._health.reason}")

    def _write_failed(self, key: BlockKey, error: OSError) -> CacheError:
        with self._lock:
            self._counts.io_errors += 1
        self._note_trouble(error)
        kind = PoolFullError if error.errno in FULL_ERRNOS else TransportError
        return kind(f"block {key.hex()} was not stored: {error.strerror}")

    def _note_trouble(self, error: OSError | None) -> None:
        """Degrade the store if the disk is full, read-only or mostly broken; log that once."""
        now = self._clock.now()
        with self._lock:
            news = error is not None and self._health.failed(error, now)
            if self._index.files.writable() < MIN_FILES:
                reason = "writes to most segment files failed"
                news = self._health.degrade(reason, now, full=False)
        if news:
            log.error(
                "the disk tier %s takes no blocks: %s", self._folder.path, self._health.reason
            )

    def _write_worked(self, block: BlockSpec) -> None:
        with self._lock:
            self._counts.puts += 1
            self._counts.write_bytes += block.ranges.payload_bytes
            recovered = self._health.worked()
        if recovered:
            log.info("the disk tier %s takes blocks again", self._folder.path)


def _outcome(call: Callable[[], object]) -> CacheError | None:
    try:
        call()
    except CacheError as error:
        return error
    return None
