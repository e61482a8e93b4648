"""Which chunk a chunk continues, so that the pool gives up ends of prompts before their heads.

vLLM's keys don't say it, and its jobs come in any order; but it tells at which token of a request
each chunk ends. A parent always ends before its child, so no chunks can be each other's parents,
which the pool would never give up. Pure; called by integrations/vllm/tier.py.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Final

_GROUP_BYTES: Final = 4
"""Keys end with the number of their cache group; each group has a chain of its own."""


@dataclass(slots=True)
class ChainEnds:
    """How far a request's chunks were offered to the pool.

    Attributes:
        ends: of each group the last token of the last chunk, and its key.
    """

    ends: dict[bytes, tuple[int, bytes]] = field(default_factory=dict)


def parents_of(
    keys: Collection[bytes], position: Callable[[bytes], int | None], chain: ChainEnds
) -> Mapping[bytes, bytes]:
    """Return the chunk before each, where that is known; ``chain`` grows by ``keys``.

    Args:
        keys: chunks of one request, in any order.
        position: answers with which token of the request a chunk ends.
        chain: what was offered before.
    """
    placed = [(end, key) for key in keys if (end := position(key)) is not None]
    parents: dict[bytes, bytes] = {}
    for end, key in sorted(placed):
        group = key[-_GROUP_BYTES:]
        last = chain.ends.get(group)
        if last is None or last[0] < end:
            chain.ends[group] = (end, key)
            if last is not None:
                parents[key] = last[1]
    return parents
