"""Rebuilding the index of a segment store from its files, at open.

Files are scanned in parallel and entered in the order they were written, so the later of two copies
of a block wins. A file is foreign input: sizes are bounded, a damaged or torn record is skipped
page by page until the next valid one, and only a page with the right checksum is accepted. Called
by storage/disk/segment_store.py only.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Final

from tierkv.storage.disk.direct_io import AlignedBuffers, DirectFile
from tierkv.storage.disk.segment_folder import SegmentFile, SegmentFolder
from tierkv.storage.disk.segment_format import (
    PAGE,
    RECORD_MAGIC,
    FileState,
    Record,
    is_sound,
    padded,
    parse_record,
    record_bytes,
)
from tierkv.storage.disk.segment_index import IndexEntry, RecordPlace
from tierkv.storage.disk.segment_log import SegmentLog

_SEARCH_BYTES: Final = 1 << 20

log = logging.getLogger(__name__)

_CHECKED_RECORDS: Final = 8
"""Records at the end of the log whose payload is verified at open, because a crash may have torn
concurrent writes. Older records are verified when they are read, like every record."""


def restore(
    folder: SegmentFolder, segment_log: SegmentLog, buffers: AlignedBuffers, threads: Executor
) -> None:
    """Enter every valid block of the folder and continue in the most recently begun file.

    An unreadable file is left sealed and empty, so it is the first to be reused.
    """
    used = [i for i, found in enumerate(folder.files) if found.page.state is FileState.IN_USE]
    used.sort(key=lambda i: folder.files[i].page.epoch)
    scans = threads.map(lambda i: _records_of(folder.files[i], folder.segment_bytes, buffers), used)
    for file, records in zip(used, scans, strict=True):
        last = file == used[-1]
        _enter_file(folder, segment_log, file, records)
        if last:
            _drop_torn(folder, segment_log, buffers, file, records)
    with segment_log.lock:
        segment_log.index.files.resume()


def _records_of(
    opened: SegmentFile, size_bytes: int, buffers: AlignedBuffers
) -> list[_FoundRecord]:
    try:
        return _scan(opened.file, buffers, nonce=opened.page.nonce, size_bytes=size_bytes)
    except OSError as error:
        log.error("%s can't be read: %s", opened.file.path, error.strerror)
        return []


def _enter_file(
    folder: SegmentFolder, segment_log: SegmentLog, file: int, records: list[_FoundRecord]
) -> None:
    page, index = folder.files[file].page, segment_log.index
    end = max((_end(found) for found in records), default=PAGE)
    replaced: list[IndexEntry] = []
    with segment_log.lock:
        index.files.restore(file, epoch=page.epoch, nonce=page.nonce, end=end)
        for found in records:
            older = index.remove(found.record.block.key)
            if older is not None:
                replaced.append(older)
            if not found.record.dead:
                index.enter(IndexEntry(found.record, _place(segment_log, file, found)))
    for entry in replaced:
        segment_log.bury(entry)


def _drop_torn(
    folder: SegmentFolder,
    segment_log: SegmentLog,
    buffers: AlignedBuffers,
    file: int,
    records: list[_FoundRecord],
) -> None:
    for found in records[-_CHECKED_RECORDS:]:
        if found.record.dead:
            continue
        try:
            whole = _is_whole(folder.files[file].file, buffers, found)
        except OSError:
            whole = False
        if whole:
            continue
        with segment_log.lock:
            entry = segment_log.index.remove(found.record.block.key)
        if entry is not None:
            segment_log.bury(entry)


def _place(segment_log: SegmentLog, file: int, found: _FoundRecord) -> RecordPlace:
    page = segment_log.index.files[file]
    return RecordPlace(file, page.epoch, page.nonce, found.offset)


def _end(found: _FoundRecord) -> int:
    return found.offset + record_bytes(found.record.block)


@dataclass(frozen=True, slots=True)
class _FoundRecord:
    """A valid record page and its offset."""

    offset: int
    record: Record


def _scan(
    file: DirectFile, buffers: AlignedBuffers, *, nonce: int, size_bytes: int
) -> list[_FoundRecord]:
    """Find every record of the file's present life, deleted ones included, in file order.

    One page is read per record; only where a record is damaged, and behind the last, are all
    pages read.

    Raises:
        OSError: the disk could not.
    """
    found: list[_FoundRecord] = []
    offset = PAGE
    with buffers.lend(PAGE) as page:
        while offset + PAGE <= size_bytes:
            count = file.read([page], offset)
            record = parse_record(page[:count], nonce=nonce) if count == PAGE else None
            if record is None:
                offset = _search(file, buffers, nonce=nonce, start=offset + PAGE, stop=size_bytes)
                continue
            end = offset + record_bytes(record.block)
            if end > size_bytes:
                break
            found.append(_FoundRecord(offset, record))
            offset = end
    return found


def _is_whole(file: DirectFile, buffers: AlignedBuffers, found: _FoundRecord) -> bool:
    """Whether a record's payload matches its checksums; a crash may have torn the payload.

    Raises:
        OSError: the disk failed.
    """
    block = found.record.block
    with buffers.lend(padded(block.ranges.payload_bytes)) as payload:
        if file.read([payload], found.offset + PAGE) < block.ranges.payload_bytes:
            return False
        return is_sound(found.record, payload[: block.ranges.payload_bytes])


def _search(file: DirectFile, buffers: AlignedBuffers, *, nonce: int, start: int, stop: int) -> int:
    """Return the offset of the next valid record page, or ``stop``."""
    with buffers.lend(_SEARCH_BYTES) as window:
        while start < stop:
            count = file.read([window[: min(_SEARCH_BYTES, stop - start)]], start)
            for at in _magic_pages(window[:count]):
                if parse_record(window[at : at + PAGE], nonce=nonce) is not None:
                    return start + at
            if count < PAGE:
                break
            start += count - count % PAGE
    return stop


def _magic_pages(window: memoryview) -> Iterator[int]:
    for at in range(0, len(window) - PAGE + 1, PAGE):
        if bytes(window[at : at + len(RECORD_MAGIC)]) == RECORD_MAGIC:
            yield at
