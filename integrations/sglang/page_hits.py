"""How much of a prefix can be restored, from what is in the pool. Pure.

Used by integrations/sglang/hicache.py. SGLang wants leading pages; models with further pools (state
of Mamba layers, sliding windows, indexers) want those too, every page of it or only the last ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SidePool:
    """A pool beside the keys and values.

    Attributes:
        name: SGLang's.
        there: which pages of the prefix it has.
        trailing: pages that must be there at the end of a prefix; None: all pages.
    """

    name: str
    there: Sequence[bool]
    trailing: int | None


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """What can be restored.

    Attributes:
        pages: longest prefix that can be, in pages.
        by_pool: how far each pool reaches alone; pools that have nothing are missing.
        lengths: all prefixes that can be.
    """

    pages: int
    by_pool: dict[str, int]
    lengths: list[int]


def leading(there: Sequence[bool]) -> int:
    """Count those at the beginning."""
    return next((i for i, is_there in enumerate(there) if not is_there), len(there))


def prefix_hit(kv_name: str, kv: Sequence[bool], sides: Sequence[SidePool]) -> PrefixHit:
    """Intersect what all pools allow."""
    pages = leading(kv)
    by_pool = {kv_name: pages} if pages else {}
    lengths = list(range(1, pages + 1))
    for side in sides:
        allowed = _allowed(side, pages)
        if allowed:
            by_pool[side.name] = max(allowed)
        lengths = [length for length in lengths if length in allowed]
    return PrefixHit(lengths[-1] if lengths else 0, by_pool, lengths)


def _allowed(side: SidePool, pages: int) -> set[int]:
    """Return the lengths up to ``pages`` that one pool allows."""
    if side.trailing is None:
        return set(range(1, min(leading(side.there), pages) + 1))
    window = max(side.trailing, 1)
    return {n for n in range(1, pages + 1) if all(side.there[max(0, n - window) : n])}
