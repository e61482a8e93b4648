"""Finds the known block that begins as a prompt goes on: blocks by parent, sorted by their tokens.

A pure index over token ids, without hashes; the batcher asks it about L1, and ``KnownBlocks``
(thread-safe: the engine's thread adds, worker threads look up) about blocks that L1 no longer has.
Of the blocks behind one parent the one with the longest common beginning is always a neighbour in
sorted order, so a question costs two comparisons and a bisection, however many blocks there are.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from tierkv.kvcore.block_key import ROOT_PARENT
from tierkv.kvcore.ids import BlockKey, NamespaceKey

TOKEN_BYTES = 4
Item = TypeVar("Item", bound=Hashable)


def scope_of(namespace: NamespaceKey, parent: BlockKey) -> bytes:
    """Name the blocks that may follow a block; first blocks of different namespaces never mix."""
    return namespace if parent == ROOT_PARENT else parent


@dataclass(frozen=True, slots=True)
class Part(Generic[Item]):
    """A block that shares its first ``tokens`` tokens with what was asked for."""

    item: Item
    tokens: int


class PartIndex(Generic[Item]):
    """Blocks by what stands before them. One entry per item; items are opaque.

    Attributes:
        _children: by scope, entries ``(tokens as little-endian uint32, number)``, sorted.
        _entry: by item, its scope, tokens and number.
        _item: by number; numbers keep items, which may not be comparable, out of the sorting.
    """

    def __init__(self) -> None:
        self._children: dict[bytes, list[tuple[bytes, int]]] = {}
        self._entry: dict[Item, tuple[bytes, bytes, int]] = {}
        self._item: dict[int, Item] = {}
        self._numbers = 0

    def __len__(self) -> int:
        return len(self._entry)

    def __contains__(self, item: Item) -> bool:
        return item in self._entry

    def add(self, scope: bytes, tokens: bytes, item: Item) -> None:
        """Say that an item's tokens follow a scope; replaces what was said of the item before."""
        self.remove(item)
        self._numbers += 1
        self._entry[item] = (scope, tokens, self._numbers)
        self._item[self._numbers] = item
        insort(self._children.setdefault(scope, []), (tokens, self._numbers))

    def remove(self, item: Item) -> None:
        """Forget an item; nothing happens if it is not known."""
        entry = self._entry.pop(item, None)
        if entry is None:
            return
        scope, tokens, number = entry
        del self._item[number]
        children = self._children[scope]
        del children[bisect_left(children, (tokens, number))]
        if not children:
            del self._children[scope]

    def find(self, scope: bytes, tokens: bytes) -> Part[Item] | None:
        """Return the item behind ``scope`` that shares most of the next tokens; None: not one."""
        children = self._children.get(scope)
        if not children:
            return None
        at = bisect_left(children, (tokens, 0))
        best, number = 0, 0
        for candidate, candidate_number in children[max(0, at - 1) : at + 1]:
            common = _common_tokens(candidate, tokens)
            if common > best:
                best, number = common, candidate_number
        return Part(self._item[number], best) if best else None

    def shortened(self, scope: bytes, tokens: bytes) -> Item | None:
        """Return an item whose tokens are the beginning of these, and not all of them."""
        children = self._children.get(scope, [])
        at = bisect_left(children, (tokens, 0)) - 1
        if at >= 0 and tokens.startswith(children[at][0]):
            return self._item[children[at][1]]
        return None

    def tokens_of(self, item: Item) -> bytes:
        """Return the tokens of a known item."""
        return self._entry[item][1]

    def check_invariants(self) -> None:
        """Assert that all three tables tell the same; O(everything)."""
        for scope, children in self._children.items():
            assert children and children == sorted(children)
            for tokens, number in children:
                assert self._entry[self._item[number]] == (scope, tokens, number)
        assert sum(map(len, self._children.values())) == len(self._entry) == len(self._item)


def _common_tokens(one: bytes, other: bytes) -> int:
    size = min(len(one), len(other))
    different = int.from_bytes(one[:size], "little") ^ int.from_bytes(other[:size], "little")
    if not different:
        return size // TOKEN_BYTES
    return ((different & -different).bit_length() - 1) // (8 * TOKEN_BYTES)


MOST_KNOWN = 32_768
"""Blocks that are remembered; with 64 tokens each about 20 MB."""


class KnownBlocks:
    """Full blocks by tokens; those that were not of use for longest are forgotten first."""

    def __init__(self, most: int = MOST_KNOWN) -> None:
        self._most = most
        self._index: PartIndex[BlockKey] = PartIndex()
        self._order: OrderedDict[BlockKey, None] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._order)

    def note(self, scope: bytes, tokens: bytes, key: BlockKey) -> None:
        """Remember a full block behind ``scope`` (compute/l1/part_index.py::scope_of)."""
        with self._lock:
            if key not in self._order:
                self._index.add(scope, tokens, key)
            self._order[key] = None
            self._order.move_to_end(key)
            if len(self._order) > self._most:
                oldest, _ = self._order.popitem(last=False)
                self._index.remove(oldest)

    def find(self, scope: bytes, tokens: bytes) -> Part[BlockKey] | None:
        """Return the block behind ``scope`` that shares most of the next tokens."""
        with self._lock:
            part = self._index.find(scope, tokens)
            if part is not None:
                self._order.move_to_end(part.item)
            return part
