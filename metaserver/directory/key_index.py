"""From block keys to row numbers, many at a time: open addressing in buckets of one cache line.

Used by metaserver/directory/block_table.py, whose rows hold the keys. An entry is 64 bits, 36 of
the key's hash and 28 of its row. Growing never moves all entries at once: a grown index takes over
entries from its predecessor bucket by bucket, as keys are inserted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from tierkv.metaserver.directory.arrays import U8, Bools, Ints, reserve

BUCKET: Final = 8
MAX_ROWS: Final = 1 << 28
_ROW_BITS: Final = np.uint64(28)
_HASH_BITS: Final = 36
_ROW: Final = np.uint64(MAX_ROWS - 1)
_EMPTY: Final = np.uint64(0)
_GONE: Final = ~_ROW
"""An entry removed from a full bucket: entries that overflowed from there are in the next bucket.
"""

_FIRST_BUCKETS: Final = 128
_MOVE_AT_ONCE: Final = 4_096
"""A predecessor of at most this many buckets is taken over at once."""

_MIX_HIGH: Final = np.uint64(0x9E3779B97F4A7C15)
_MIX: Final = np.uint64(0xD6E8FEB86659FD93)
_HALF: Final = np.uint64(32)
_ONE: Final = np.uint64(1)
_LAST_BYTE: Final = np.uint64(56)
_BYTE_INDEX: Final = np.uint64(0x0001020304050607)
"""The product with the lowest bit of byte k has k in its last byte: a find-first without a loop."""


@dataclass(slots=True)
class _Table:
    """Buckets of entries; a power of two of them. A key's bucket is the top of its hash."""

    entries: U8
    shift: np.uint64
    taken: int = 0

    @classmethod
    def of(cls, buckets: int) -> _Table:
        shift = _HASH_BITS - (buckets.bit_length() - 1)
        return cls(reserve(buckets, BUCKET), np.uint64(shift))

    @property
    def buckets(self) -> int:
        return len(self.entries)

    @property
    def room(self) -> int:
        """Free entries before searches get long: at most five of eight entries are used."""
        return self.buckets * BUCKET * 5 // 8 - self.taken


class KeyIndex:
    """Row numbers of keys. The caller owns the rows, with the keys in columns 0 and 1.

    A row's entry is in its key's bucket or, while buckets are full, in the next bucket. Row 0 is a
    sentinel with a key that never occurs, so "not found" needs no extra test.

    Attributes:
        _rows: [n, width >= 2] uint64.
        _now: the table for new entries.
        _old: the predecessor while entries are taken over; buckets below ``_moved`` are done.
        _live: number of rows with an entry.
    """

    def __init__(self, rows: U8) -> None:
        self._rows = rows
        self._now = _Table.of(_FIRST_BUCKETS)
        self._old: _Table | None = None
        self._moved = 0
        self._live = 0

    def __len__(self) -> int:
        return self._live

    @property
    def nbytes(self) -> int:
        """Memory size in bytes."""
        return self._now.entries.nbytes + (self._old.entries.nbytes if self._old else 0)

    def find(self, low: U8, high: U8) -> tuple[Ints, U8]:
        """Return each key's row number, 0 for unknown keys, and a copy of the rows."""
        hashes = hashes_of(low, high)
        numbers, rows = self._search(self._now, hashes, low, high)
        if self._old is not None:
            (missing,) = np.nonzero(numbers == 0)
            if len(missing):
                numbers[missing], rows[missing] = self._search(
                    self._old, hashes[missing], low[missing], high[missing]
                )
        return numbers, rows

    def insert(self, low: U8, high: U8, numbers: Ints) -> None:
        """Add distinct unknown keys; the rows must already hold the keys."""
        self._make_room(len(numbers))
        entries = (hashes_of(low, high) << _ROW_BITS) | numbers.astype(np.uint64)
        _insert(self._now, entries)
        self._live += len(numbers)
        self._take_over(len(numbers) + 512)

    def remove(self, low: U8, high: U8, numbers: Ints) -> None:
        """Remove known keys."""
        entries = (hashes_of(low, high) << _ROW_BITS) | numbers.astype(np.uint64)
        rest = _remove(self._now, entries)
        if self._old is not None and len(rest):
            rest = _remove(self._old, rest)
        assert not len(rest), f"{len(rest)} keys to remove have no entry"
        self._live -= len(numbers)

    def check_invariants(self, live_rows: Ints) -> None:
        """Assert that exactly the live rows have one entry each, and are found."""
        tables = [self._now, *([self._old] if self._old is not None else [])]
        for table in tables:
            assert table.taken == np.count_nonzero(table.entries)
        numbers = np.concatenate([(t.entries & _ROW)[(t.entries & _ROW) != 0] for t in tables])
        assert np.array_equal(np.sort(numbers), np.sort(live_rows.astype(np.uint64)))
        assert len(live_rows) == self._live
        keys = self._rows[live_rows]
        assert np.array_equal(self.find(keys[:, 0].copy(), keys[:, 1].copy())[0], live_rows)

    def _search(self, table: _Table, hashes: U8, low: U8, high: U8) -> tuple[Ints, U8]:
        buckets = hashes >> table.shift
        lines = table.entries.take(buckets.view(np.int64), axis=0)
        alike = (lines >> _ROW_BITS) == hashes[:, None]
        marks = alike.view(np.uint64).ravel()  # A byte per entry, 1 where the hash is equal.
        at = ((marks & -marks) * _BYTE_INDEX >> _LAST_BYTE).view(np.int64)
        at += np.arange(0, BUCKET * len(at), BUCKET)
        numbers = (lines.ravel().take(at) & _ROW).view(np.int64)
        rows = self._rows.take(numbers, axis=0)
        wrong = rows[:, 0] != low
        wrong |= rows[:, 1] != high
        (open_,) = np.nonzero(wrong)
        if len(open_):
            numbers[open_] = 0
            lines, marks = lines[open_], marks[open_]
            go_on = (lines != _EMPTY).all(axis=1) | ((marks & (marks - _ONE)) != 0)
            self._search_on(table, open_[go_on], hashes, low, high, numbers)
            rows[open_] = self._rows.take(numbers[open_], axis=0)
        return numbers, rows

    def _search_on(
        self, table: _Table, open_: Ints, hashes: U8, low: U8, high: U8, numbers: Ints
    ) -> None:
        """Check every candidate of the keys ``open_``, bucket after bucket."""
        buckets = (hashes[open_] >> table.shift).view(np.int64)
        for _ in range(table.buckets):
            if not len(open_):
                return
            lines = table.entries.take(buckets, axis=0)
            alike = (lines >> _ROW_BITS) == hashes[open_, None]
            candidates = np.where(alike, lines & _ROW, _EMPTY).view(np.int64)
            rows = self._rows.take(candidates, axis=0)
            right = (rows[..., 0] == low[open_, None]) & (rows[..., 1] == high[open_, None])
            right &= candidates != 0  # Row 0 is no answer, even for the key of row 0.
            found = right.any(axis=1)
            numbers[open_[found]] = candidates[right]
            go_on = ~found & (lines != _EMPTY).all(axis=1)
            open_, buckets = open_[go_on], (buckets[go_on] + 1) & (table.buckets - 1)

    def _make_room(self, count: int) -> None:
        if self._now.room >= count:
            return
        self._take_over(None)
        buckets = self._now.buckets
        while buckets * BUCKET * 7 // 16 < self._live + count:
            buckets *= 2
        self._old, self._moved = self._now, 0
        self._now = _Table.of(buckets)
        if self._old.buckets <= _MOVE_AT_ONCE:
            self._take_over(None)

    def _take_over(self, buckets: int | None) -> None:
        """Move entries of the next ``buckets`` buckets of the predecessor; None: of all buckets."""
        old = self._old
        if old is None:
            return
        end = old.buckets if buckets is None else min(old.buckets, self._moved + buckets)
        for start in range(self._moved, end, _MOVE_AT_ONCE):
            lines = old.entries[start : min(start + _MOVE_AT_ONCE, end)]
            _insert(self._now, lines[(lines & _ROW) != _EMPTY])
            lines[lines != _EMPTY] = _GONE
        self._moved = end
        if end == old.buckets:
            self._old = None


def hashes_of(low: U8, high: U8) -> U8:
    """Mix keys into 36 bits. Real keys are hashes already, but keys made by tests may not be."""
    mixed = high * _MIX_HIGH
    mixed ^= low
    mixed ^= mixed >> _HALF
    mixed *= _MIX
    mixed >>= _ROW_BITS
    return mixed


def _insert(table: _Table, entries: U8) -> None:
    """Put entries into the first free places from their buckets on; several may compete."""
    flat = table.entries.reshape(-1)
    buckets = ((entries >> _ROW_BITS) >> table.shift).view(np.int64)
    while len(entries):
        lines = table.entries.take(buckets, axis=0)
        free = (lines & _ROW) == _EMPTY
        place = free.argmax(axis=1)
        each = np.arange(len(entries))
        fits = free[each, place]
        at = buckets * BUCKET + place
        before = lines[each, place]
        flat[at[fits]] = entries[fits]
        won: Bools = fits & (flat[at] == entries)
        table.taken += int(np.count_nonzero(won & (before == _EMPTY)))
        rest = ~won
        buckets = (buckets + ~fits)[rest] & (table.buckets - 1)
        entries = entries[rest]


def _remove(table: _Table, entries: U8) -> U8:
    """Remove entries; return the entries missing from this table."""
    flat = table.entries.reshape(-1)
    buckets = ((entries >> _ROW_BITS) >> table.shift).view(np.int64)
    lost = [entries[:0]]
    for _ in range(table.buckets):
        if not len(entries):
            break
        lines = table.entries.take(buckets, axis=0)
        same = lines == entries[:, None]
        here = same.any(axis=1)
        full = (lines != _EMPTY).all(axis=1)
        at = (buckets * BUCKET + same.argmax(axis=1))[here]
        flat[at] = np.where(full[here], _GONE, _EMPTY)
        table.taken -= int(np.count_nonzero(here & ~full))
        lost.append(entries[~here & ~full])
        go_on = ~here & full
        entries, buckets = entries[go_on], (buckets[go_on] + 1) & (table.buckets - 1)
    lost.append(entries)
    return np.concatenate(lost)
