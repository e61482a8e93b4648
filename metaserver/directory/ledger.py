"""The directory's ledger: blocks, their copies and names, and the application of event batches.

Owned by metaserver/directory/directory.py, which classifies each batch; the ledger enters all
records of a batch at once. The ledger also counts the copies of each node, so most inventories end
without a search. Models, tenants and sessions are stored as numbers (``Names``). A table of names
stays bounded: a full table forgets names without blocks; if blocks use all names, further names
become number 0, the empty name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from tierkv.kvwire.event_records import STORED, EventRecords
from tierkv.metaserver.directory.arrays import Ints, distinct
from tierkv.metaserver.directory.block_table import BlockTable, SpecColumns
from tierkv.metaserver.directory.copy_table import L1, L2, L4, CopyTable, holder_of
from tierkv.metaserver.directory.event_columns import (
    NameNumbers,
    Records,
    acceptable,
    group_keys,
    last_of,
    places_of,
    specs_of,
)
from tierkv.metaserver.directory.node_book import Holder


class Names:
    """Numbers of names; a number is reused when no block has its name any more.

    Attributes:
        _numbers: number of each name; the empty name is 0.
        _names: name of each number.
        _free: numbers without a name.
        _unknown: names unknown on arrival, counted since the last sweep.
    """

    def __init__(self, *, limit: int) -> None:
        """Know the empty name only; give out at most ``limit`` numbers."""
        self._limit = limit
        self._numbers = {"": 0}
        self._names = [""]
        self._free: list[int] = []
        self._sweep_at = min(limit, 1 << 16)
        self._unknown = 0

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, number: int) -> str:
        return self._names[number]

    def numbers(
        self, names: Sequence[str], in_use: Callable[[], Iterable[int]]
    ) -> NDArray[np.uint32]:
        """Return the numbers of ``names``.

        Args:
            names: names of a batch.
            in_use: returns the numbers used by blocks. It may be slow, and is called only when the
                table has doubled, or is full and many unknown names came since.
        """
        known = self._numbers
        unknown = sum(name not in known for name in names)
        self._unknown += unknown
        is_full = len(known) + unknown > self._sweep_at
        if is_full and self._unknown >= min(self._limit, 1 << 16) >> 4:
            self._unknown = 0
            self._sweep(in_use())
        return np.array([known.get(n) or self._number(n) for n in names], np.uint32)

    def _number(self, name: str) -> int:
        if not name:
            return 0
        if self._free:
            number = self._free.pop()
            self._names[number] = name
        elif len(self._names) < self._limit:
            number = len(self._names)
            self._names.append(name)
        else:
            return 0
        self._numbers[name] = number
        return number

    def _sweep(self, in_use: Iterable[int]) -> None:
        """Forget names without blocks."""
        keep = {0, *in_use}
        for number in [n for n in self._numbers.values() if n not in keep]:
            del self._numbers[self._names[number]]
            self._names[number] = ""
            self._free.append(number)
        self._sweep_at = min(self._limit, max(1 << 16, 2 * len(self._numbers)))


_NONE: Final = np.empty(0, np.int64)
_Item = TypeVar("_Item", bound=np.generic)


class Ledger:
    """Blocks and copies, entered and removed in batches.

    Attributes:
        refused: events that were not entered, by reason (event_columns.acceptable, and ``full``).
        blocks: every block with at least one copy.
        copies: the copies, linked to their blocks.
        models, tenants, sessions: names of blocks.
    """

    def __init__(self, max_blocks: int) -> None:
        self.refused: Counter[str] = Counter()
        self.blocks = BlockTable(max_blocks)
        self.copies = CopyTable(2 * max_blocks)
        self.models = Names(limit=1 << 16)
        self.tenants = Names(limit=1 << 16)
        self.sessions = Names(limit=1 << 32)

    def enter(self, holder: Holder, batch: EventRecords, records: Records, now: float) -> None:
        """Enter a node's events; of several events about a copy the last counts."""
        records, refused = acceptable(records, batch, computes=holder.computes, pools=holder.pools)
        self.refused.update(refused)
        if not len(records):
            return
        facts = specs_of(records, self._name_numbers(batch))
        first, groups = group_keys(records)
        rows, _ = self.blocks.index.find(_pick(facts.low, first), _pick(facts.high, first))
        known = (rows != 0)[groups]
        stored = records["kind"] == STORED
        news = self._news(records["tier"], groups, len(first))
        self._make_rows(
            rows, groups, [_pick(n, np.flatnonzero(stored[n])) for n in news.values()], facts, now
        )
        rows = rows[groups]
        bare = [_NONE]
        for tier, latest in news.items():
            latest = _pick(latest, np.flatnonzero(rows[latest]))
            put = _pick(latest, np.flatnonzero(stored[latest]))
            bare.append(self._put(holder, tier, _pick(rows, put), _pick(records, put)))
            old = put[known[put]]
            self.blocks.learn(rows[old], facts[old])
            if len(put) < len(latest):
                struck = latest[~stored[latest]]
                bare.append(self._strike(holder, tier, rows[struck]))
        emptied = np.concatenate(bare)
        if len(emptied):
            self.blocks.remove_without_copies(distinct(emptied))

    def begin_inventory(self, holder: Holder) -> None:
        """Begin an inventory: copies not named until ``end_inventory`` will be removed."""
        if holder.confirmed < holder.copies:  # The last inventory was not finished.
            self.copies.set_epoch(self.copies.of_node(holder.number), holder.epoch)
        holder.epoch = (holder.epoch + 1) & 0xFF
        holder.confirmed = 0
        holder.taking_inventory = True

    def end_inventory(self, holder: Holder) -> None:
        """Remove copies not named since ``begin_inventory``."""
        holder.taking_inventory = False
        if holder.confirmed < holder.copies:
            mine = self.copies.of_node(holder.number)
            self._remove(holder, mine[self.copies.epochs(mine) != holder.epoch])

    def strike_all(self, holder: Holder) -> None:
        """Remove all copies of a node. O(all copies), or O(1) without copies."""
        if holder.copies:
            self._remove(holder, self.copies.of_node(holder.number))

    def check_holder(self, holder: Holder) -> None:
        """Assert that the counts of a node match its copies."""
        mine = self.copies.of_node(holder.number)
        assert holder.copies == len(mine), holder.info.node_id
        confirmed = np.count_nonzero(self.copies.epochs(mine) == holder.epoch)
        assert holder.confirmed == confirmed, holder.info.node_id

    def check_invariants(self) -> None:
        """Assert that blocks and copies are consistent."""
        self.blocks.check_invariants()
        self.copies.check_invariants(self.blocks.head, self.blocks.live_rows())

    def _name_numbers(self, batch: EventRecords) -> NameNumbers:
        blocks = self.blocks

        def used(column: NDArray[Any]) -> Callable[[], list[int]]:
            return lambda: [int(n) for n in distinct(column[blocks.live_rows()])]

        return NameNumbers(
            self.models.numbers(batch.models, used(blocks.models)),
            self.tenants.numbers(batch.tenants, used(blocks.tenants)),
            self.sessions.numbers(batch.sessions, used(blocks.sessions)),
        )

    @staticmethod
    def _news(tiers: NDArray[np.uint8], groups: Ints, keys: int) -> dict[int, Ints]:
        """Return for each tier the last record about each block."""
        news = {}
        for tier in (L1, L2, L4):
            chosen = np.flatnonzero(tiers == tier)
            if len(chosen):
                news[tier] = chosen if keys == len(groups) else last_of(chosen, groups)
        return news

    def _make_rows(
        self, rows: Ints, groups: Ints, stored: list[Ints], facts: SpecColumns, now: float
    ) -> None:
        """Make missing rows for stored blocks, as far as there is room."""
        chosen = np.sort(np.concatenate(stored))
        chosen = _pick(chosen, np.flatnonzero(rows[groups[chosen]] == 0))
        if not len(chosen):
            return
        if len(rows) < len(groups):
            chosen = np.sort(chosen[np.unique(groups[chosen], return_index=True)[1]])
        room = self.blocks.rows.room
        if len(chosen) > room:
            self.refused["full"] += len(chosen) - room
            chosen = chosen[:room]
        new = facts if len(chosen) == len(groups) else facts[chosen]
        rows[groups[chosen]] = self.blocks.add(new, now)

    def _put(self, holder: Holder, tier: int, rows: Ints, records: Records) -> Ints:
        """Enter copies of distinct blocks; return the blocks without room for a copy."""
        if not len(rows):
            return rows
        name = holder_of(holder.number, tier)
        heads = self.blocks.head[rows].astype(np.int64)
        numbers = self.copies.find(heads, name)
        (there,) = np.nonzero(numbers)
        new = np.flatnonzero(numbers == 0)[: self.copies.rows.room]
        if len(there):
            holder.confirmed += self.copies.confirm(numbers[there], name, holder.epoch)
        if len(new):
            numbers[new] = self.copies.add(_pick(rows, new), self.blocks.head, name, holder.epoch)
            holder.copies += len(new)
            holder.confirmed += len(new)
        (entered,) = np.nonzero(numbers)
        if len(entered) < len(rows):
            self.refused["full"] += len(rows) - len(entered)
        self.copies.place(_pick(numbers, entered), places_of(_pick(records, entered)))
        unplaced: Ints = rows[numbers == 0]
        return unplaced

    def _strike(self, holder: Holder, tier: int, rows: Ints) -> Ints:
        """Remove copies of distinct blocks; return the blocks that had a copy."""
        if not len(rows):
            return rows
        name = holder_of(holder.number, tier)
        numbers = self.copies.find(self.blocks.head[rows].astype(np.int64), name)
        return self._remove_copies(holder, numbers[numbers != 0])

    def _remove(self, holder: Holder, numbers: Ints) -> None:
        self.blocks.remove_without_copies(self._remove_copies(holder, numbers))

    def _remove_copies(self, holder: Holder, numbers: Ints) -> Ints:
        epochs = self.copies.epochs(numbers)
        holder.copies -= len(numbers)
        holder.confirmed -= int(np.count_nonzero(epochs == holder.epoch))
        return self.copies.remove(numbers, self.blocks.head)


def _pick(column: NDArray[_Item], chosen: Ints) -> NDArray[_Item]:
    """Return the ``chosen`` entries, ascending; the column itself if all are chosen."""
    return column if len(chosen) == len(column) else column[chosen]
