"""Properties of each block except its location: a row per block, in columns of NumPy arrays.

Used by metaserver/directory/directory.py with whole batches of keys. A block has a row while any
copy exists. Rows are found through metaserver/directory/key_index.py and hold the head of the
block's list of copies (metaserver/directory/copy_table.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tierkv.metaserver.directory.arrays import U4, U8, FreeList, Ints, reserve
from tierkv.metaserver.directory.key_index import KeyIndex

NO_BLOCK: Final = np.uint64(2**64 - 1)
"""Both halves of a key that never occurs: the key of row 0, a sentinel."""

HEAT_FADES_S: Final = 3_600.0
"""Seconds until a use counts 1/e; a steady rate of uses settles at uses per hour."""

_HEAD: Final = np.uint64(0xFFFFFFFF)


@dataclass(frozen=True, slots=True)
class SpecColumns:
    """The specs of blocks from events, one column per field; names are numbers."""

    low: U8
    high: U8
    parents: U8
    tokens: U4
    models: U4
    tenants: U4
    sessions: U4

    def __getitem__(self, chosen: Ints) -> SpecColumns:
        return SpecColumns(
            self.low[chosen],
            self.high[chosen],
            self.parents[chosen],
            self.tokens[chosen],
            self.models[chosen],
            self.tenants[chosen],
            self.sessions[chosen],
        )


class BlockTable:
    """Rows of blocks, found by key.

    Times are stored as seconds since ``born`` in 32 bits: to a sixteenth of a second after ten
    days.

    Attributes:
        hot: [n, 4] uint64: both halves of the key (little-endian), head of copies and uses, time of
            the last use and heat. A locate touches only these 32 bytes.
        head: [n] uint32 in ``hot``: first copy; 0: the row is free.
        uses, touched, heat: [n] in ``hot``.
        parents: [n, 2] uint64; with the next columns all data only for listings: 32 bytes.
        created, tokens, sessions: [n]; models and tenants: [n] uint16.
    """

    def __init__(self, limit: int) -> None:
        """Make an empty table for ``limit`` blocks at most."""
        self.hot = reserve(limit, 4)
        hot4 = self.hot.view(np.uint32)
        self.head: U4 = hot4[:, 4]
        self.uses: U4 = hot4[:, 5]
        self.touched: NDArray[np.float32] = self.hot.view(np.float32)[:, 6]
        self.heat: NDArray[np.float32] = self.hot.view(np.float32)[:, 7]
        cold = reserve(limit, 4)
        cold4 = cold.view(np.uint32)
        self.parents: U8 = cold[:, :2]
        self.created: NDArray[np.float32] = cold.view(np.float32)[:, 4]
        self.tokens: U4 = cold4[:, 5]
        self.sessions: U4 = cold4[:, 6]
        self.models: NDArray[np.uint16] = cold.view(np.uint16)[:, 14]
        self.tenants: NDArray[np.uint16] = cold.view(np.uint16)[:, 15]
        self.hot[0, :2] = NO_BLOCK
        self.index = KeyIndex(self.hot)
        self.rows = FreeList(first=1, limit=limit)
        self.born: float | None = None

    def __len__(self) -> int:
        return len(self.index)

    @property
    def nbytes(self) -> int:
        """Memory size in bytes: all rows ever used, and the index."""
        return self.rows.used * 64 + self.rows.nbytes + self.index.nbytes

    def since_born(self, now: float) -> float:
        """Return ``now`` on the table's own clock, which starts at its first use."""
        if self.born is None:
            self.born = now
        return now - self.born

    def add(self, facts: SpecColumns, now: float) -> Ints:
        """Add rows for distinct unknown keys; there must be room. Each row needs a copy at once."""
        rows = self.rows.take(len(facts.low))
        moment = self.since_born(now)
        self.hot[rows, 0] = facts.low
        self.hot[rows, 1] = facts.high
        self.hot[rows, 2:] = 0
        self.touched[rows] = moment
        self.created[rows] = moment
        self.parents[rows] = facts.parents
        self.tokens[rows] = facts.tokens
        self.models[rows] = facts.models
        self.tenants[rows] = facts.tenants
        self.sessions[rows] = facts.sessions
        self.index.insert(facts.low, facts.high, rows)
        return rows

    def learn(self, rows: Ints, facts: SpecColumns) -> None:
        """Fill in names that were unknown so far, for distinct rows."""
        if not len(rows):
            return
        for column, names in (
            (self.models, facts.models),
            (self.tenants, facts.tenants),
            (self.sessions, facts.sessions),
        ):
            (new,) = np.nonzero((column[rows] == 0) & (names != 0))
            if len(new):
                column[rows[new]] = names[new]

    def remove_without_copies(self, rows: Ints) -> None:
        """Free all of the distinct ``rows`` without a copy."""
        bare = rows[self.head[rows] == 0]
        if len(bare):
            self.index.remove(self.hot[bare, 0], self.hot[bare, 1], bare)
            self.rows.give_back(bare)

    def use(self, rows: Ints, lines: U8, now: float) -> None:
        """Count a use of blocks; ``lines`` is a fresh copy of their rows."""
        moment = self.since_born(now)
        last = lines[:, 2:].copy()
        uses = last.view(np.uint32)
        marks = last.view(np.float32)
        uses[:, 1] += np.uint32(1)
        marks[:, 3] *= np.exp((marks[:, 2] - np.float32(moment)) / np.float32(HEAT_FADES_S))
        marks[:, 3] += np.float32(1.0)
        marks[:, 2] = moment
        self.hot.view(np.complex128)[rows, 1] = last.view(np.complex128)[:, 0]

    def faded_heat(self, rows: Ints, now: float) -> NDArray[np.float32]:
        """Return uses per hour of blocks as of now."""
        moment = np.float32(self.since_born(now))
        fade: NDArray[np.float32] = np.exp((self.touched[rows] - moment) / np.float32(HEAT_FADES_S))
        return self.heat[rows] * fade

    def live_rows(self, *, newest: int | None = None) -> Ints:
        """Return the rows in use; with ``newest``, only among as many highest row numbers."""
        first = 1 if newest is None else max(1, self.rows.used - newest)
        return np.flatnonzero(self.head[first : self.rows.used]) + first

    def check_invariants(self) -> None:
        """Assert that rows are either used or free, and that the index knows the used rows."""
        live = self.live_rows()
        free = np.sort(self.rows.free.astype(np.int64))
        assert np.array_equal(np.union1d(live, free), np.arange(1, self.rows.used))
        assert len(live) + len(free) == self.rows.used - 1
        self.index.check_invariants(live)


def heads_of(lines: U8) -> Ints:
    """Return the first copies of rows from lines copied by ``KeyIndex.find``."""
    return (lines[:, 2] & _HEAD).view(np.int64)


def halves(keys: bytes) -> U8:
    """View concatenated keys as [n, 2] little-endian halves."""
    return np.frombuffer(keys, np.dtype("<u8")).reshape(-1, 2)
