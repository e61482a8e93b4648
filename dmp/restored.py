"""Slots that a restart found in the segment, as columns: a hundred thousand in milliseconds.

Made by dmp/segment_scan.py, kept by dmp/slot_table.py, which makes a Slot of a row when somebody
asks for that block. Objects for all of them at once would take a second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dmp.pool_node import PutRequest
from kvcore.ids import BlockKey

Column = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True, eq=False)
class Names:
    """A column of names: mostly one and the same, which is then stored once."""

    first: str
    others: Column | None

    @classmethod
    def of(cls, column: Column) -> Names:
        """Take in a column of fixed-length byte strings."""
        if len(column) == 0:
            return cls("", None)
        if bool((column == column[0]).all()):
            return cls(_text(column[0]), None)
        return cls("", column)

    def at(self, row: int) -> str:
        """Return one name."""
        return self.first if self.others is None else _text(self.others[row])


@dataclass(frozen=True, slots=True, eq=False)
class RestoredSlots:
    """Sealed slots, oldest seal first; every column has one entry per slot."""

    indices: Column
    generations: Column
    keys: list[BlockKey]
    parents: list[BlockKey]
    range_bytes: Column
    range_counts: Column
    tokens: Column
    models: Names
    tenants: Names

    @classmethod
    def of(cls, indices: Column, rows: Column) -> RestoredSlots:
        """Take the columns of some slots out of all header rows."""
        return cls(
            indices=indices,
            generations=rows["generation"][indices].astype(np.int64),
            keys=rows["key"][indices].tolist(),
            parents=rows["parent"][indices].tolist(),
            range_bytes=rows["range_bytes"][indices],
            range_counts=rows["range_count"][indices],
            tokens=rows["tokens"][indices],
            models=Names.of(rows["model"][indices]),
            tenants=Names.of(rows["tenant"][indices]),
        )

    def __len__(self) -> int:
        return len(self.keys)

    def put(self, row: int) -> PutRequest:
        """Return what is in a slot."""
        return PutRequest(
            key=self.keys[row],
            parent=self.parents[row],
            range_bytes=int(self.range_bytes[row]),
            range_count=int(self.range_counts[row]),
            tokens=int(self.tokens[row]),
            model=self.models.at(row),
            tenant=self.tenants.at(row),
        )

    def second_copies(self) -> list[int]:
        """Return the rows whose block an older row holds already."""
        seen: set[BlockKey] = set()
        again = []
        for row, key in enumerate(self.keys):
            if key in seen:
                again.append(row)
            seen.add(key)
        return again

    def without(self, rows: Sequence[int]) -> RestoredSlots:
        """Return the columns with some rows left out."""
        keep = np.ones(len(self), bool)
        keep[list(rows)] = False
        kept = np.flatnonzero(keep).tolist()
        return RestoredSlots(
            indices=self.indices[keep],
            generations=self.generations[keep],
            keys=[self.keys[row] for row in kept],
            parents=[self.parents[row] for row in kept],
            range_bytes=self.range_bytes[keep],
            range_counts=self.range_counts[keep],
            tokens=self.tokens[keep],
            models=_some(self.models, keep),
            tenants=_some(self.tenants, keep),
        )


def _some(names: Names, keep: Column) -> Names:
    return names if names.others is None else Names(names.first, names.others[keep])


def _text(raw: Any) -> str:
    return bytes(raw).rstrip(b"\0").decode("utf-8", "replace")
