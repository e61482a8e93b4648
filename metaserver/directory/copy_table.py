"""Location of blocks: a row per copy, linked into one list per block, in columns of NumPy arrays.

Used by metaserver/directory/directory.py with whole batches. Finding the copies of a node takes one
pass over all copies. This pass is rare (after a node left, or its inventory omitted copies) and
touches 8 bytes per copy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from tierkv.metaserver.directory.arrays import U4, U8, Bools, FreeList, Ints, distinct, reserve

L1, L2, L4 = 1, 2, 4
"""Tiers as numbers. L3 is not a separate tier: L3 is L2 seen from another host."""

_NEXT: Final = np.uint64(0xFFFFFFFF)
_HOLDER_SHIFT: Final = np.uint64(40)
_OWNER_SHIFT: Final = np.uint64(32)
_NODE_SHIFT: Final = np.uint64(48)
_SCAN: Final = 1 << 20


def holder_of(node: int, tier: int) -> int:
    """Encode a node and a tier in 24 bits, as stored in the links."""
    return node << 8 | tier


@dataclass(frozen=True, slots=True)
class Places:
    """Locations of copies in their nodes, one entry each; generation 0 means no location."""

    generations: U8
    slots: U4
    lengths: U4
    segments: U4

    def __getitem__(self, chosen: Ints | Bools) -> Places:
        return Places(
            self.generations[chosen],
            self.slots[chosen],
            self.lengths[chosen],
            self.segments[chosen],
        )


@dataclass(frozen=True, slots=True)
class Copies:
    """Copies of a chain's blocks, in no particular order.

    Attributes:
        at: block of each copy, as an index into the chain.
        numbers: rows of the copy table.
        holders: ``holder_of`` value of each copy.
    """

    at: Ints
    numbers: Ints
    holders: Ints


class CopyTable:
    """Rows of copies.

    Attributes:
        links: [n] uint64: holding node (16 bits), tier (8), epoch (8), next copy (32). The epoch is
            the inventory that last named the copy. Node 0 means no node: the row is free, or about
            to be freed.
        generations, slots, lengths, segments: [n] the place, in 24 bytes with ``blocks``.
        blocks: [n] the block's row.
    """

    def __init__(self, limit: int) -> None:
        """Make an empty table for ``limit`` copies at most."""
        self.links = reserve(limit)
        self._next: U4 = self.links.view(np.uint32)[::2]
        self._places = reserve(limit, 3)
        places4 = self._places.view(np.uint32)
        self.generations: U8 = self._places[:, 0]
        self.slots: U4 = places4[:, 2]
        self.lengths: U4 = places4[:, 3]
        self.segments: U4 = places4[:, 4]
        self.blocks: U4 = places4[:, 5]
        self.rows = FreeList(first=1, limit=limit)

    def __len__(self) -> int:
        return self.rows.used - 1 - len(self.rows.free)

    @property
    def nbytes(self) -> int:
        """Memory size in bytes: all rows ever used."""
        return self.rows.used * 32 + self.rows.nbytes

    def of_heads(self, heads: Ints) -> Copies:
        """Collect all copies of the blocks whose lists begin at ``heads``."""
        at = np.flatnonzero(heads)
        numbers = heads if len(at) == len(heads) else heads[at]
        found: list[tuple[Ints, Ints, U8]] = []
        while len(at):
            links = self.links.take(numbers)
            found.append((at, numbers, links >> _HOLDER_SHIFT))
            following = (links & _NEXT).view(np.int64)
            more = following != 0
            at, numbers = at[more], following[more]
        if not found:
            return Copies(at, at, at)
        if len(found) == 1:
            return Copies(found[0][0], found[0][1], found[0][2].view(np.int64))
        columns = [np.concatenate(column) for column in zip(*found, strict=True)]
        return Copies(columns[0], columns[1], columns[2].view(np.int64))

    def find(self, heads: Ints, holder: int) -> Ints:
        """Return the copy of each block held by ``holder``, or 0 without a copy."""
        found = np.zeros(len(heads), np.int64)
        at = np.flatnonzero(heads)
        numbers = heads[at]
        while len(at):
            links = self.links.take(numbers)
            mine = (links >> _HOLDER_SHIFT) == np.uint64(holder)
            found[at[mine]] = numbers[mine]
            following = (links & _NEXT).view(np.int64)
            go_on = ~mine & (following != 0)
            at, numbers = at[go_on], following[go_on]
        return found

    def add(self, blocks: Ints, heads: U4, holder: int, epoch: int) -> Ints:
        """Add copies of distinct blocks in front of the lists in ``heads``."""
        numbers = self.rows.take(len(blocks))
        owner = np.uint64((holder << 8 | epoch) << 32)
        self.links[numbers] = owner | heads[blocks].astype(np.uint64)
        self.blocks[numbers] = blocks
        heads[blocks] = numbers
        return numbers

    def place(self, numbers: Ints, places: Places) -> None:
        """Write the locations of copies."""
        self.generations[numbers] = places.generations
        self.slots[numbers] = places.slots
        self.lengths[numbers] = places.lengths
        self.segments[numbers] = places.segments

    def places(self, numbers: Ints) -> Places:
        """Read the locations of copies."""
        lines = self._places.take(numbers, axis=0)
        lines4 = lines.view(np.uint32)
        return Places(lines[:, 0], lines4[:, 2], lines4[:, 3], lines4[:, 4])

    def confirm(self, numbers: Ints, holder: int, epoch: int) -> int:
        """Move copies of one holder to an epoch; return how many copies were not in the epoch."""
        owner = np.uint64((holder << 8 | epoch) << 32)
        links = self.links[numbers]
        self.links[numbers] = owner | (links & _NEXT)
        return int(np.count_nonzero((links >> _OWNER_SHIFT) != (owner >> _OWNER_SHIFT)))

    def set_epoch(self, numbers: Ints, epoch: int) -> None:
        """Move copies of any holder to an epoch."""
        links = self.links[numbers] & ~(np.uint64(0xFF) << _OWNER_SHIFT)
        self.links[numbers] = links | np.uint64(epoch << 32)

    def epochs(self, numbers: Ints) -> Ints:
        """Return the epochs of copies."""
        return ((self.links[numbers] >> _OWNER_SHIFT) & np.uint64(0xFF)).view(np.int64)

    def of_node(self, node: int) -> Ints:
        """Find all copies of a node. O(all copies), some 2 ms per million."""
        found = []
        for start in range(1, self.rows.used, _SCAN):
            links = self.links[start : min(start + _SCAN, self.rows.used)]
            found.append(np.flatnonzero((links >> _NODE_SHIFT) == np.uint64(node)) + start)
        return np.concatenate(found) if found else np.empty(0, np.int64)

    def remove(self, numbers: Ints, heads: U4) -> Ints:
        """Remove copies; return their distinct blocks."""
        self.links[numbers] &= _NEXT
        blocks = distinct(self.blocks[numbers]).astype(np.int64)
        self._unlink(blocks, heads)
        self.links[numbers] = 0
        self.rows.give_back(numbers)
        return blocks

    def _unlink(self, blocks: Ints, heads: U4) -> None:
        """Unlink copies without a node from the lists, step by step for all lists at once."""
        here = heads[blocks].astype(np.int64)
        while len(blocks):
            links = self.links[here]
            gone = (here != 0) & ((links >> _NODE_SHIFT) == 0)
            if not gone.any():
                break
            here[gone] = (links[gone] & _NEXT).view(np.int64)
            heads[blocks[gone]] = here[gone]
        here = here[here != 0]
        while len(here):
            following = (self.links[here] & _NEXT).view(np.int64)
            here, following = here[following != 0], following[following != 0]
            after = self.links[following]
            gone = (after >> _NODE_SHIFT) == 0
            self._next[here[gone]] = (after[gone] & _NEXT).astype(np.uint32)
            here = np.where(gone, here, following)

    def check_invariants(self, heads: U4, live_blocks: Ints) -> None:
        """Assert that rows are either used or free, and each used row is in its block's list."""
        copies = self.of_heads(heads[live_blocks].astype(np.int64))
        assert np.array_equal(self.blocks[copies.numbers], live_blocks[copies.at])
        assert len(np.unique(copies.numbers)) == len(copies.numbers) == len(self)
        once = np.stack((copies.at, copies.holders), axis=1)
        assert len(np.unique(once, axis=0)) == len(once), "a holder has a block twice"
        assert (copies.holders >> 8).all()
        free = np.sort(self.rows.free.astype(np.int64))
        assert np.array_equal(np.union1d(copies.numbers, free), np.arange(1, self.rows.used))
        assert not self.links[free].any()
