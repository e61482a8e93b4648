"""Rebuilding the index of a segment store from its files, at open.

Files are scanned in parallel and entered in the order they were written, so the later of two copies
of a block wins. Called by storage/disk/segment_store.py only.
"""

from __future__ import annotations

import logging
from concurrent.futures import Executor
from typing import Final

from tierkv.storage.disk.direct_io import AlignedBuffers
from tierkv.storage.disk.segment_folder import SegmentFile, SegmentFolder
from tierkv.storage.disk.segment_format import PAGE, FileState, record_bytes
from tierkv.storage.disk.segment_index import IndexEntry, RecordPlace
from tierkv.storage.disk.segment_log import SegmentLog
from tierkv.storage.disk.segment_scan import FoundRecord, is_whole, scan

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
    scans = threads.map(lambda i: _scan(folder.files[i], folder.segment_bytes, buffers), used)
    for file, records in zip(used, scans, strict=True):
        last = file == used[-1]
        _enter_file(folder, segment_log, file, records)
        if last:
            _drop_torn(folder, segment_log, buffers, file, records)
    with segment_log.lock:
        segment_log.index.resume()


def _scan(opened: SegmentFile, size_bytes: int, buffers: AlignedBuffers) -> list[FoundRecord]:
    try:
        return scan(opened.file, buffers, nonce=opened.page.nonce, size_bytes=size_bytes)
    except OSError as error:
        log.error("%s can't be read: %s", opened.file.path, error.strerror)
        return []


def _enter_file(
    folder: SegmentFolder, segment_log: SegmentLog, file: int, records: list[FoundRecord]
) -> None:
    page, index = folder.files[file].page, segment_log.index
    end = max((_end(found) for found in records), default=PAGE)
    replaced: list[IndexEntry] = []
    with segment_log.lock:
        index.restore(file, epoch=page.epoch, nonce=page.nonce, end=end)
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
    records: list[FoundRecord],
) -> None:
    for found in records[-_CHECKED_RECORDS:]:
        if found.record.dead:
            continue
        try:
            whole = is_whole(folder.files[file].file, buffers, found)
        except OSError:
            whole = False
        if whole:
            continue
        with segment_log.lock:
            entry = segment_log.index.remove(found.record.block.key)
        if entry is not None:
            segment_log.bury(entry)


def _place(segment_log: SegmentLog, file: int, found: FoundRecord) -> RecordPlace:
    page = segment_log.index.files[file]
    return RecordPlace(file, page.epoch, page.nonce, found.offset)


def _end(found: FoundRecord) -> int:
    return found.offset + record_bytes(found.record.block)
