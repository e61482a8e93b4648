"""The tokens of blocks this node has seen, so that the pool's blocks can be taken in part.

A key says nothing about the tokens it names, so a pool that holds a block which shares most of a
prompt's next tokens can't be asked for it. The node remembers the tokens of what it computed or
loaded, also when L1 has it no more, and asks for that block by its key. Thread-safe: the engine's
thread notes, worker threads look up.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

from tierkv.compute.batching.part_index import Part, PartIndex
from tierkv.kvcore.ids import BlockKey

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
        """Remember a full block behind ``scope`` (compute/batching/part_index.py::scope_of)."""
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
