"""Finds the known block that begins like the rest of a prompt: blocks by parent, sorted by tokens.

A pure index over token ids, without hashes. The batcher looks up pages of L1. ``KnownBlocks``
(thread-safe: the engine's thread adds, worker threads look up) covers blocks evicted from L1. Among
the blocks behind a parent, the block with the longest common beginning is always a neighbour in
sorted order. A question costs two comparisons and a bisection, however many blocks are known.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from tierkv.kvcore.block import ROOT_PARENT
from tierkv.kvcore.ids import BlockKey, NamespaceKey

TOKEN_BYTES = 4
Item = TypeVar("Item", bound=Hashable)


def scope_of(namespace: NamespaceKey, parent: BlockKey) -> bytes:
    """Name the blocks that may follow a block; first blocks of two namespaces never mix."""
    return namespace if parent == ROOT_PARENT else parent


@dataclass(frozen=True, slots=True)
class Part(Generic[Item]):
    """A block, and how many leading tokens it shares with the tokens of a question."""

    item: Item
    tokens: int


class PartIndex(Generic[Item]):
    """Blocks by the preceding tokens, one entry per item; items are opaque.

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
        """Record the tokens of an item behind a scope; an earlier record of the item goes."""
        self.remove(item)
        self._numbers += 1
        self._entry[item] = (scope, tokens, self._numbers)
        self._item[self._numbers] = item
        insort(self._children.setdefault(scope, []), (tokens, self._numbers))

    def remove(self, item: Item) -> None:
        """Forget an item; an unknown item is ignored."""
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
        """Return the item behind ``scope`` that shares most of the next tokens; None: no match."""
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
        """Return an item whose tokens are a proper beginning of these tokens."""
        children = self._children.get(scope, [])
        at = bisect_left(children, (tokens, 0)) - 1
        if at >= 0 and tokens.startswith(children[at][0]):
            return self._item[children[at][1]]
        return None

    def following(self, scope: bytes) -> list[tuple[bytes, Item]]:
        """Return all items behind a scope, with their tokens."""
        entries = self._children.get(scope, ())
        return [(tokens, self._item[number]) for tokens, number in entries]

    def tokens_of(self, item: Item) -> bytes:
        """Return the tokens of a known item."""
        return self._entry[item][1]

    def check_invariants(self) -> None:
        """Assert that all three tables agree; O(everything)."""
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
"""Limit of remembered blocks; with 64 tokens each about 20 MB."""


class KnownBlocks:
    """Full blocks by tokens; the least recently used blocks are forgotten first."""

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

    def following(self, scope: bytes) -> list[tuple[bytes, BlockKey]]:
        """Return all known blocks behind a scope, with their tokens."""
        with self._lock:
            return self._index.following(scope)

    def forget(self, keys: Iterable[BlockKey]) -> None:
        """Forget the tokens of blocks."""
        with self._lock:
            for key in keys:
                if key in self._order:
                    del self._order[key]
                    self._index.remove(key)
