"""A reference to one range of a slot as plain numbers, for the hot path of reads and writes.

Used by the node and its doors. Plain tuples because a dataclass for each range of each frame would
cost more than the rest of a small transfer.
"""

from __future__ import annotations

from typing import Final

from tierkv.dmp.wire.messages import RangeRef

Ref = tuple[int, int, int, int, int, int]
"""Incarnation, segment, slot, generation, index of the range, bytes expected of it."""

WHOLE: Final = 0xFFFF_FFFF
"""The index that stands for all ranges of a reserved slot."""

ANY_SIZE: Final = -1
"""A size that is not checked."""


def as_ref(ref: RangeRef) -> Ref:
    """Return the plain form."""
    at = ref.location
    return at.incarnation, at.segment, at.slot, at.generation, ref.index, ANY_SIZE
