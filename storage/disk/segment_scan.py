"""Reading the record pages of a segment file, one after the other, at open.

Called by storage/disk/segment_restore.py for each file. A file is foreign input: sizes are bounded,
a damaged or torn record is skipped page by page until the next valid one, and only a page with the
right checksum is accepted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from tierkv.storage.disk.direct_io import AlignedBuffers, DirectFile
from tierkv.storage.disk.segment_format import (
    PAGE,
    RECORD_MAGIC,
    FilePage,
    Record,
    is_sound,
    padded,
    parse_file_page,
    parse_record,
    record_bytes,
)

_SEARCH_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class FoundRecord:
    """A valid record page and its offset."""

    offset: int
    record: Record


def read_file_page(file: DirectFile, buffers: AlignedBuffers) -> FilePage | None:
    """Read a file's first page; None if it is damaged or the file is too short.

    Raises:
        OtherVersionError: another layout version.
        OSError: the disk failed.
    """
    with buffers.lend(PAGE) as page:
        count = file.read([page], 0)
        return parse_file_page(bytes(page[:count]))


def scan(
    file: DirectFile, buffers: AlignedBuffers, *, nonce: int, size_bytes: int
) -> list[FoundRecord]:
    """Find every record of the file's present life, deleted ones included, in file order.

    One page is read per record; only where a record is damaged, and behind the last, are all
    pages read.

    Raises:
        OSError: the disk could not.
    """
    found: list[FoundRecord] = []
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
            found.append(FoundRecord(offset, record))
            offset = end
    return found


def is_whole(file: DirectFile, buffers: AlignedBuffers, found: FoundRecord) -> bool:
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
