"""Positions of blocks on disk, and the roles of segment files.

The pure core of storage/disk/segment_store.py: the index places records and picks victims, and
never touches a file. All calls hold the store's lock.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

from tierkv.kvcore.block import BlockSpec
from tierkv.kvcore.ids import BlockKey
from tierkv.storage.disk.segment_format import PAGE, Record, record_bytes


class FileRole(Enum):
    """Current role of a segment file."""

    FREE = "free"
    ACTIVE = "active"
    SEALED = "sealed"
    ABANDONED = "abandoned"
    """A write failed: blocks in the file stay readable (every read is verified), no write follows.
    """
    GONE = "gone"
    """Abandoned and emptied: out of use until the store is opened anew."""


@dataclass(frozen=True, slots=True)
class RecordPlace:
    """Position of a record: file, life of the file, and offset of the record page."""

    file: int
    epoch: int
    nonce: int
    offset: int


@dataclass(slots=True)
class IndexEntry:
    """A readable block.

    Attributes:
        record: content of the record page.
        place: position of the record.
        touched: number of the last read since the block was written or copied; 0 if unread.
    """

    record: Record
    place: RecordPlace
    touched: int = 0


@dataclass(slots=True)
class _File:
    """One segment file.

    Attributes:
        role: see FileRole.
        epoch: number of the current life; a later life has a larger number.
        nonce: seed of the record checksums.
        end: offset of the next record.
        pending: writes in progress; a file with pending writes is not collected.
        collecting: True while blocks are copied or dropped; no write may begin.
        keys: blocks whose entry is in this file, oldest first.
        live_bytes: size of their records.
    """

    role: FileRole = FileRole.FREE
    epoch: int = 0
    nonce: int = 0
    end: int = PAGE
    pending: int = 0
    collecting: bool = False
    keys: dict[BlockKey, None] = field(default_factory=dict)
    live_bytes: int = 0


class SegmentFiles:
    """The files of one store by number; at most one file is active.

    Attributes:
        file_bytes: size of each file.
    """

    def __init__(self, file_count: int, file_bytes: int) -> None:
        self.file_bytes = file_bytes
        self._files = [_File() for _ in range(file_count)]
        self._last_epoch = 0

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, file: int) -> _File:
        return self._files[file]

    def __iter__(self) -> Iterator[_File]:
        return iter(self._files)

    def restore(self, file: int, *, epoch: int, nonce: int, end: int) -> None:
        """Register a file found at open; the file is sealed until ``resume``."""
        found = self._files[file]
        found.role, found.epoch, found.nonce, found.end = FileRole.SEALED, epoch, nonce, end
        self._last_epoch = max(self._last_epoch, epoch)

    def resume(self) -> None:
        """Make the most recently begun file active again."""
        last = max(self._of(FileRole.SEALED), key=lambda i: self._files[i].epoch, default=None)
        if last is not None:
            self._files[last].role = FileRole.ACTIVE

    def active(self) -> int | None:
        """Return the file that is written."""
        return next(iter(self._of(FileRole.ACTIVE)), None)

    def free(self) -> int | None:
        """Return a free file, if there is one."""
        return next(iter(self._of(FileRole.FREE)), None)

    def writable(self) -> int:
        """Count the files that are writable now or after collection."""
        return sum(f.role not in (FileRole.ABANDONED, FileRole.GONE) for f in self._files)

    def place(self, size_bytes: int) -> RecordPlace | None:
        """Set room aside in the active file; None if there is none.

        Each place is followed by ``settle``, whatever came of the write.
        """
        active = self.active()
        if active is None or self._files[active].end + size_bytes > self.file_bytes:
            return None
        file = self._files[active]
        place = RecordPlace(active, file.epoch, file.nonce, file.end)
        file.end += size_bytes
        file.pending += 1
        return place

    def settle(self, place: RecordPlace) -> None:
        """Note that a write has ended."""
        self._files[place.file].pending -= 1

    def guard(self, place: RecordPlace) -> bool:
        """Keep a file from being collected until ``settle``, if the place is of this life."""
        file = self._files[place.file]
        writable = file.role in (FileRole.ACTIVE, FileRole.SEALED) and not file.collecting
        current = writable and file.epoch == place.epoch
        file.pending += current
        return current

    def seal_active(self) -> int | None:
        """Stop writing the active file; return which it was."""
        active = self.active()
        if active is not None:
            self._files[active].role = FileRole.SEALED
        return active

    def next_epoch(self) -> int:
        """Number a file's new life."""
        self._last_epoch += 1
        return self._last_epoch

    def activate(self, file: int, *, epoch: int, nonce: int) -> None:
        """Begin a free file."""
        assert self.active() is None and self._files[file].role is FileRole.FREE
        self._files[file] = _File(FileRole.ACTIVE, epoch, nonce)

    def abandon(self, file: int) -> None:
        """Stop writing to a file; its blocks stay readable until the file is collected."""
        self._files[file].role = FileRole.ABANDONED

    def is_abandoned(self, file: int) -> bool:
        """Whether a write to the file has failed."""
        return self._files[file].role is FileRole.ABANDONED

    def victim(self, *, reusable: bool = False) -> int | None:
        """Return the next file to collect, a full one without pending writes.

        The oldest; but a file with a quarter of deleted blocks comes first: a namespace
        with deletes or limits then makes room at no cost to other namespaces. ``reusable`` excludes
        abandoned files, because the collection of an abandoned file makes no room.
        """
        full = self._of(FileRole.SEALED)
        if not reusable:
            full += self._of(FileRole.ABANDONED)
        idle = [i for i in full if self._files[i].pending == 0 and not self._files[i].collecting]
        spent = [i for i in idle if self.is_worth_copying(i)]
        return min(
            spent or idle,
            key=lambda i: (self._files[i].live_bytes if spent else 0, self._files[i].epoch),
            default=None,
        )

    def is_worth_copying(self, file: int) -> bool:
        """Whether copying all live blocks of a file frees at least a quarter of it."""
        return 4 * self._files[file].live_bytes <= 3 * self.file_bytes

    def begin_collecting(self, *, reusable: bool = False) -> int | None:
        """Choose the victim and block new writes to the file until ``empty``."""
        file = self.victim(reusable=reusable)
        if file is not None:
            self._files[file].collecting = True
        return file

    def recycle(self, file: int) -> None:
        """Free an emptied file, or retire it if abandoned."""
        found = self._files[file]
        found.role = FileRole.GONE if found.role is FileRole.ABANDONED else FileRole.FREE
        found.epoch = found.nonce = 0
        found.end = PAGE
        found.collecting = False

    def check_invariants(self) -> None:
        """Assert what must always hold; for tests."""
        assert len(self._of(FileRole.ACTIVE)) <= 1
        assert all(PAGE <= f.end <= self.file_bytes and f.pending >= 0 for f in self._files)

    def _of(self, role: FileRole) -> list[int]:
        return [i for i, file in enumerate(self._files) if file.role is role]


class SegmentIndex:
    """Readable blocks of one store, and the files that hold the blocks.

    Attributes:
        files: the segment files.
        live_bytes: size of the records of all readable blocks.
    """

    def __init__(self, file_count: int, file_bytes: int) -> None:
        self.files = SegmentFiles(file_count, file_bytes)
        self._entries: dict[BlockKey, IndexEntry] = {}
        self._reads = 0
        self._last_sequence = 0
        self.live_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, key: BlockKey) -> IndexEntry | None:
        """Return where a block is."""
        return self._entries.get(key)

    def touch(self, entry: IndexEntry) -> None:
        """Note a read; collection keeps blocks that were read."""
        self._reads += 1
        entry.touched = self._reads

    def is_current(self, entry: IndexEntry) -> bool:
        """Whether this is still the block's entry (not deleted, moved or evicted since)."""
        return self._entries.get(entry.record.block.key) is entry

    def next_sequence(self) -> int:
        """Number a put."""
        self._last_sequence += 1
        return self._last_sequence

    def enter(self, entry: IndexEntry) -> None:
        """Make a block readable; an older entry of the same key is replaced."""
        key = entry.record.block.key
        self.remove(key)
        self._entries[key] = entry
        file = self.files[entry.place.file]
        file.keys[key] = None
        file.live_bytes += record_bytes(entry.record.block)
        self.live_bytes += record_bytes(entry.record.block)
        self._last_sequence = max(self._last_sequence, entry.record.sequence)

    def remove(self, key: BlockKey) -> IndexEntry | None:
        """Forget a block; its bytes stay until the file is collected."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            file = self.files[entry.place.file]
            file.keys.pop(key, None)
            file.live_bytes -= record_bytes(entry.record.block)
            self.live_bytes -= record_bytes(entry.record.block)
        return entry

    def blocks(self) -> list[BlockSpec]:
        """List the blocks, oldest put first."""
        entries = sorted(self._entries.values(), key=lambda entry: entry.record.sequence)
        return [entry.record.block for entry in entries]

    def entries_of(self, file: int) -> list[IndexEntry]:
        """Return the live blocks of a file, in the order they came."""
        return [self._entries[key] for key in self.files[file].keys]

    def survivors(self, file: int, *, budget_bytes: int) -> list[IndexEntry]:
        """Return the blocks of a file worth copying: read since they came, last read first.

        Of a file with many deleted blocks, all; no block is returned for a budget of 0.
        """
        kept: list[IndexEntry] = []
        entries = self.entries_of(file)
        if budget_bytes and self.files.is_worth_copying(file):
            budget_bytes = self.files[file].live_bytes
        else:
            entries = [entry for entry in entries if entry.touched]
        for entry in sorted(entries, key=lambda entry: -entry.touched):
            size = record_bytes(entry.record.block)
            if size <= budget_bytes:
                budget_bytes -= size
                kept.append(entry)
        return kept

    def empty(self, file: int) -> list[BlockSpec]:
        """Drop the remaining blocks of a file; free the file, or retire it if abandoned.

        Returns:
            The dropped blocks.
        """
        lost = [entry.record.block for entry in self.entries_of(file)]
        for block in lost:
            self.remove(block.key)
        self.files.recycle(file)
        return lost

    def check_invariants(self) -> None:
        """Assert what must always hold; for tests."""
        self.files.check_invariants()
        for file in self.files:
            sizes = (record_bytes(self._entries[key].record.block) for key in file.keys)
            assert file.live_bytes == sum(sizes)
        keys = [key for file in self.files for key in file.keys]
        assert sorted(keys) == sorted(self._entries)
        for key, entry in self._entries.items():
            file = self.files[entry.place.file]
            assert key in file.keys and file.epoch == entry.place.epoch
            assert entry.place.offset >= PAGE
            assert entry.place.offset + record_bytes(entry.record.block) <= file.end
        total = sum(record_bytes(e.record.block) for e in self._entries.values())
        assert total == self.live_bytes
