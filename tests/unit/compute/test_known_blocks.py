"""What a node remembers of blocks it has seen is bounded; what was of no use goes first."""

from __future__ import annotations

import numpy as np

from tierkv.compute.l1.part_index import KnownBlocks
from tierkv.kvcore.ids import BlockKey

SCOPE = b"s" * 16


def raw(*tokens: int) -> bytes:
    return np.array(tokens, dtype="<u4").tobytes()


def test_the_block_that_was_of_no_use_for_longest_is_forgotten() -> None:
    known = KnownBlocks(most=2)
    known.note(SCOPE, raw(1, 2), BlockKey(b"a"))
    known.note(SCOPE, raw(3, 4), BlockKey(b"b"))
    part = known.find(SCOPE, raw(1, 9))
    assert part is not None and (part.item, part.tokens) == (b"a", 1)
    known.note(SCOPE, raw(5, 6), BlockKey(b"c"))
    assert len(known) == 2
    assert known.find(SCOPE, raw(3, 4)) is None
    assert known.find(b"t" * 16, raw(1, 2)) is None
