"""What a block is apart from where it lies: the fields every tier below L1 keeps with its bytes.

A shape, not a class: the pool's and the store's own values fit it, so that neither room has to
know the other.
"""

from __future__ import annotations

from typing import Protocol

from tierkv.kvcore.ids import BlockKey


class BlockAtRest(Protocol):
    """What is known of a block; the rooms' own values fit."""

    @property
    def key(self) -> BlockKey: ...

    @property
    def parent(self) -> BlockKey: ...

    @property
    def range_bytes(self) -> int: ...

    @property
    def range_count(self) -> int: ...

    @property
    def tokens(self) -> int: ...

    @property
    def model(self) -> str: ...

    @property
    def tenant(self) -> str: ...
