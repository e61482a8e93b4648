"""Slots that a restart found in the segment, as columns: a hundred thousand in milliseconds.

Made by dmp/segment/segment_file.py and kept by dmp/slots/slot_table.py, which makes the Slot of a
row at the first access to the block. Making the objects of all rows at once would take a second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from tierkv.dmp.segment import geometry as g
from tierkv.kvcore.block import BlockSpec, shared_owner, shared_ranges
from tierkv.kvcore.ids import BlockKey

Column = np.ndarray[Any, Any]
_KEY: Final = np.dtype(np.complex128)
_NO_NAMES: Final = np.zeros((0, 2), "S1")
_NUMBERS: Final = (
    *("indices", "generations", "orders", "keys", "parents"),
    *("range_bytes", "range_counts", "tokens"),
)


@dataclass(frozen=True, slots=True, eq=False)
class NameColumn:
    """A column of model and tenant names; if all rows have the same pair, the pair is stored once.

    Attributes:
        rows: [n, 2] byte strings, or [1, 2] if all rows are equal.
    """

    rows: Column

    @classmethod
    def of(cls, rows: Column) -> NameColumn:
        """Take both columns from header rows."""
        lanes = rows.view(np.uint64).reshape(-1, g.LANES)[:, g.NAMES_LANE :]
        same = len(rows) > 1 and bool((lanes == lanes[0]).all())
        return cls(rows["names"][:1].copy() if same else rows["names"].copy())

    def at(self, row: int) -> tuple[str, str]:
        """Return the model and tenant of a row."""
        model, tenant = self.rows[row if len(self.rows) > 1 else 0].tolist()
        return model.decode("utf-8", "replace"), tenant.decode("utf-8", "replace")

    def some(self, keep: Column) -> NameColumn:
        """Return the rows named or marked by ``keep``."""
        return self if len(self.rows) <= 1 else NameColumn(self.rows[keep])

    @classmethod
    def joined(cls, parts: Sequence[NameColumn], sizes: Sequence[int]) -> NameColumn:
        """Concatenate columns."""
        firsts = [part.rows[0].tolist() for part in parts if len(part.rows)]
        if all(len(part.rows) <= 1 for part in parts) and all(f == firsts[0] for f in firsts):
            return next((part for part in parts if len(part.rows)), NameColumn(_NO_NAMES))
        pairs = zip(parts, sizes, strict=True)
        return cls(np.concatenate([np.broadcast_to(p.rows, (n, 2)) for p, n in pairs]))


@dataclass(frozen=True, slots=True, eq=False)
class RestoredSlots:
    """Sealed slots, oldest seal first; every column has one entry per slot.

    Keys are 16-byte numbers, because numpy moves numbers ten times faster than byte strings.
    """

    indices: Column
    generations: Column
    orders: Column
    keys: Column
    parents: Column
    range_bytes: Column
    range_counts: Column
    tokens: Column
    names: NameColumn

    @classmethod
    def of(cls, indices: Column, rows: Column) -> RestoredSlots:
        """Take columns from header rows, a row per slot."""
        return cls(
            indices=indices,
            generations=rows["generation"].astype(np.int64),
            orders=rows["sealed_order"].copy(),
            keys=rows["key"].copy().view(_KEY),
            parents=rows["parent"].copy().view(_KEY),
            range_bytes=rows["range_bytes"].copy(),
            range_counts=rows["range_count"].copy(),
            tokens=rows["tokens"].copy(),
            names=NameColumn.of(rows),
        )

    @classmethod
    def joined(cls, parts: Sequence[RestoredSlots]) -> RestoredSlots:
        """Concatenate parts, and sort the slots by age, oldest seal first."""
        columns = {
            name: np.concatenate([getattr(part, name) for part in parts]) for name in _NUMBERS
        }
        names = NameColumn.joined([part.names for part in parts], [len(part) for part in parts])
        return cls(**columns, names=names)._aged()

    def _aged(self) -> RestoredSlots:
        if bool((self.orders[1:] >= self.orders[:-1]).all()):
            return self
        return self.some(np.argsort(self.orders, kind="stable"))

    def __len__(self) -> int:
        return len(self.indices)

    def key_list(self) -> list[BlockKey]:
        """Return all keys as bytes."""
        return _as_bytes(self.keys)

    def parent_list(self) -> list[BlockKey]:
        """Return all parents as bytes."""
        return _as_bytes(self.parents)

    def block(self, row: int) -> BlockSpec:
        """Return the block in a row's slot."""
        model, tenant = self.names.at(row)
        return BlockSpec(
            key=BlockKey(self.keys[row].tobytes()),
            parent=BlockKey(self.parents[row].tobytes()),
            tokens=int(self.tokens[row]),
            ranges=shared_ranges(int(self.range_bytes[row]), int(self.range_counts[row])),
            owner=shared_owner(model, tenant),
        )

    def second_copies(self) -> Column:
        """Mark the rows whose block also occurs in an older row."""
        seen: set[BlockKey] = set()
        again = np.zeros(len(self), bool)
        for row, key in enumerate(self.key_list()):
            again[row] = key in seen
            seen.add(key)
        return again

    def some(self, keep: Column) -> RestoredSlots:
        """Return the rows named or marked by ``keep``."""
        columns = {name: getattr(self, name)[keep] for name in _NUMBERS}
        return RestoredSlots(**columns, names=self.names.some(keep))


def _as_bytes(column: Column) -> list[BlockKey]:
    raw: list[BlockKey] = column.view("V16").tolist()
    return raw
