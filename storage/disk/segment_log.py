"""The log of the disk tier: append, read and bury records; collect files.

The shell around storage/disk/segment_index.py, used by storage/disk/segment_store.py: it does the
I/O and holds the locks. OSErrors pass through to the store, which translates them for callers.

Lock order: ``_turn`` (one thread begins and collects files) before ``lock`` (the index; never held
during I/O).
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from tierkv.kvcore.block import BlockSpec
from tierkv.kvcore.errors import PoolFullError
from tierkv.storage.disk.direct_io import AlignedBuffers, DirectFile, is_aligned
from tierkv.storage.disk.segment_folder import SegmentFolder, set_aside
from tierkv.storage.disk.segment_format import (
    PAGE,
    FilePage,
    FileState,
    Record,
    is_sound,
    pack_file_page,
    pack_record,
    padded,
    record_bytes,
)
from tierkv.storage.disk.segment_index import IndexEntry, RecordPlace, SegmentIndex
from tierkv.storage.disk.store_health import PASSING_ERRNOS

log = logging.getLogger(__name__)

COPY_SHARE: Final = 4
"""At most a quarter of a file is copied forward when the file is collected, so write amplification
stays below 1 / (1 - 1/4) = 1.33 for any reads."""

_WIPED_AT_ONCE: Final = 1 << 20


@dataclass(slots=True)
class News:
    """Results of a collection, for the store's listener."""

    evicted: list[BlockSpec] = field(default_factory=list)
    fading: list[BlockSpec] = field(default_factory=list)


class SegmentLog:
    """Segment files of a folder, written in turn, in a circle.

    Attributes:
        index: the pure core; every call under ``lock``.
        lock: guards the index and the counters.
        copied_bytes: payload copied forward by garbage collection.
        evicted: blocks dropped by garbage collection.
    """

    def __init__(self, folder: SegmentFolder, index: SegmentIndex, buffers: AlignedBuffers) -> None:
        self.index = index
        self.lock = threading.Lock()
        self.copied_bytes = 0
        self.evicted = 0
        self._turn = threading.Lock()
        self._files: Sequence[DirectFile] = [opened.file for opened in folder.files]
        self._buffers = buffers
        self._news = News()

    def append(self, record: Record, payload: memoryview) -> None:
        """Write a block at the end of the log and make it readable.

        Raises:
            PoolFullError: the block is larger than a file, or no file can be begun.
            OSError: the disk could not; nothing of the block is left.
        """
        place = self._reserve(record_bytes(record.block))
        try:
            self._write(place, record, payload)
        except OSError as error:
            self._give_up(place, record, error)
            raise
        with self.lock:
            self.index.enter(IndexEntry(record, place))
            self.index.files.settle(place)

    def read(self, entry: IndexEntry, start: int, destination: memoryview) -> bool:
        """Fill the destination (flat, ``B``) with the payload from ``start`` on.

        Returns:
            Whether there were enough bytes; whether they are right is the caller's to check.

        Raises:
            OSError: the disk could not.
        """
        file = self._files[entry.place.file]
        at = entry.place.offset + PAGE + start
        size = destination.nbytes
        whole = size - size % PAGE
        if at % PAGE == 0 and whole and is_aligned(destination):
            return self._read_in_place(file, at, destination, whole)
        low = at - at % PAGE
        span = padded(at + size - low)
        with self._buffers.lend(span) as staging:
            count = file.read([staging], low)
            destination[:] = staging[at - low : at - low + size]
            return count >= at - low + size

    def bury(self, entry: IndexEntry) -> None:
        """Mark a removed block's record dead, so the next open skips the record.

        If the disk fails, the next open may find the block again; its bytes are still verified.
        """
        with self.lock:
            if not self.index.files.guard(entry.place):
                return
        try:
            self._write_dead(entry.place, entry.record)
        finally:
            with self.lock:
                self.index.files.settle(entry.place)

    def erase(self, entry: IndexEntry) -> None:
        """Mark a removed block's record dead, and overwrite its payload with zeros.

        A record in a file that is being collected is overwritten when the file is used again.

        Raises:
            OSError: the disk could not; bytes may be left.
        """
        with self.lock:
            if not self.index.files.guard(entry.place):
                return
        try:
            self._write_dead(entry.place, entry.record)
            self._wipe(entry.place, entry.record)
            self._files[entry.place.file].sync()
        finally:
            with self.lock:
                self.index.files.settle(entry.place)

    def take_news(self) -> News:
        """Return the block news since the last call."""
        with self.lock:
            news, self._news = self._news, News()
            return news

    def sync(self) -> None:
        """Make the active file's records last; a failure gives the file up."""
        with self.lock:
            active = self.index.files.active()
        if active is not None:
            self._sync(active)

    def _read_in_place(
        self, file: DirectFile, at: int, destination: memoryview, whole: int
    ) -> bool:
        rest = destination.nbytes - whole
        if not rest:
            return file.read([destination], at) == whole
        with self._buffers.lend(PAGE) as tail:
            count = file.read([destination[:whole], tail], at)
            destination[whole:] = tail[:rest]
        return count >= destination.nbytes

    def _write(self, place: RecordPlace, record: Record, payload: memoryview) -> None:
        page = pack_record(record, nonce=place.nonce)
        size = payload.nbytes
        whole = size - size % PAGE
        file = self._files[place.file]
        if whole and is_aligned(payload):
            with self._buffers.lend(2 * PAGE) as ends:
                ends[:PAGE] = page
                ends[PAGE : PAGE + size - whole] = payload[whole:]
                tail = [ends[PAGE:]] if whole < size else []
                file.write([ends[:PAGE], payload[:whole], *tail], place.offset)
            return
        with self._buffers.lend(PAGE + size) as staging:
            staging[:PAGE] = page
            staging[PAGE : PAGE + size] = payload
            file.write([staging], place.offset)

    def _write_dead(self, place: RecordPlace, record: Record) -> None:
        dead = Record(record.block, record.sequence, record.checksums, dead=True)
        with suppress(OSError), self._buffers.lend(PAGE) as page:
            page[:] = pack_record(dead, nonce=place.nonce)
            self._files[place.file].write([page], place.offset)

    def _wipe(self, place: RecordPlace, record: Record) -> None:
        size = record_bytes(record.block) - PAGE
        with self._buffers.lend(min(size, _WIPED_AT_ONCE)) as zeros:
            zeros[:] = bytes(len(zeros))
            for at in range(0, size, len(zeros)):
                part = zeros[: min(len(zeros), size - at)]
                self._files[place.file].write([part], place.offset + PAGE + at)

    def _give_up(self, place: RecordPlace, record: Record, error: OSError) -> None:
        """After a failed write: leave no record, and never write to a broken file again."""
        self._write_dead(place, record)
        with self.lock:
            self.index.files.settle(place)
        if error.errno not in PASSING_ERRNOS:
            self._abandon(place.file, error)

    def _abandon(self, file: int, error: OSError) -> None:
        log.error("%s is given up: %s", self._files[file].path, error.strerror)
        with self.lock:
            self.index.files.abandon(file)

    # Files.

    def _reserve(self, size_bytes: int) -> RecordPlace:
        if size_bytes > self.index.files.file_bytes - PAGE:
            raise PoolFullError(
                f"a block of {size_bytes} bytes does not fit a segment file of "
                f"{self.index.files.file_bytes}"
            )
        with self._turn:
            while True:
                with self.lock:
                    place = self.index.files.place(size_bytes)
                if place is not None:
                    return place
                self._rotate()

    def _rotate(self) -> None:
        """Go on to the next file, and collect the oldest if no other is spare then."""
        with self.lock:
            full = self.index.files.seal_active()
            spare = self.index.files.free()
        if full is not None:
            self._sync(full)
        if spare is None:
            self._collect(budget_bytes=0, reusable=True)
        self._begin()
        with self.lock:
            spare = self.index.files.free()
        if spare is None:
            self._collect(budget_bytes=self.index.files.file_bytes // COPY_SHARE)
        with self.lock:
            victim = self.index.files.victim()
            if victim is not None:
                entries = self.index.entries_of(victim)
                self._news.fading = [entry.record.block for entry in entries]

    def _begin(self) -> None:
        while True:
            with self.lock:
                file = self.index.files.free()
                epoch = self.index.files.next_epoch()
            if file is None:
                raise PoolFullError("every segment file is being written or was given up")
            nonce = secrets.randbits(64)
            try:
                self._write_file_page(file, FileState.IN_USE, epoch, nonce)
            except OSError as error:
                if error.errno in PASSING_ERRNOS:
                    raise
                self._abandon(file, error)
                continue
            with self.lock:
                self.index.files.activate(file, epoch=epoch, nonce=nonce)
            return

    def _write_file_page(self, file: int, state: FileState, epoch: int, nonce: int) -> None:
        page = FilePage(state, self.index.files.file_bytes, epoch, nonce)
        with self._buffers.lend(PAGE) as view:
            view[:] = pack_file_page(page)
            self._files[file].write([view], 0)

    def _sync(self, file: int) -> None:
        try:
            self._files[file].sync()
        except OSError as error:
            self._abandon(file, error)

    def _collect(self, *, budget_bytes: int, reusable: bool = False) -> None:
        """Free the oldest file; first copy recently read blocks to the active file."""
        with self.lock:
            file = self.index.files.begin_collecting(reusable=reusable)
            if file is None:
                return
            kept = self.index.survivors(file, budget_bytes=budget_bytes)
        for entry in kept:
            if not self._copy_forward(entry):
                break
        with self.lock:
            abandoned = self.index.files.is_abandoned(file)
            lost = self.index.empty(file)
            self.evicted += len(lost)
            self._news.evicted += lost
        if abandoned:
            with suppress(OSError):
                set_aside(self._files[file].path)
            return
        # If this fails, the old records count until the file is begun anew: sound copies all.
        with suppress(OSError):
            self._write_file_page(file, FileState.FREE, 0, 0)

    def _copy_forward(self, entry: IndexEntry) -> bool:
        """Copy one block to the active file; False stops the copying."""
        record = entry.record
        with self._buffers.lend(record.block.ranges.payload_bytes) as lent:
            payload = lent[: record.block.ranges.payload_bytes]
            try:
                if not self.read(entry, 0, payload) or not is_sound(record, payload):
                    return True
            except OSError:
                return True
            with self.lock:
                place = self.index.files.place(record_bytes(record.block))
            if place is None:
                return False
            try:
                self._write(place, record, payload)
            except OSError as error:
                self._give_up(place, record, error)
                return False
        self._enter_copy(entry, place)
        return True

    def _enter_copy(self, entry: IndexEntry, place: RecordPlace) -> None:
        with self.lock:
            current = self.index.is_current(entry)
            if current:
                self.index.enter(IndexEntry(entry.record, place))
                self.copied_bytes += entry.record.block.ranges.payload_bytes
        if not current:  # Deleted meanwhile.
            self._write_dead(place, entry.record)
            with suppress(OSError):
                self._wipe(place, entry.record)  # It may have been erased.
        with self.lock:
            self.index.files.settle(place)
