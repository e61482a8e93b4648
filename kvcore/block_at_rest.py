"""The fields that every tier below L1 stores with the bytes of a block.

A Protocol, not a class: the pool and the store have values of their own that fit the Protocol, so
neither room imports the other.
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
