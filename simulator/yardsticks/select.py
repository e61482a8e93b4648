"""Yardsticks by name, and Belady's optimum: an upper bound for every policy with the same capacity.

Called by simulator/cache_replay.py. The optimum evicts the block with the farthest next use, among
equal blocks the deepest; the victim may be the newest block, which then bypasses the cache. Because
an id names its whole prefix, a block is never used before its parent. The victim is therefore a
leaf, and the number of block hits is the maximum.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from tierkv.policies.eviction import EvictionPolicy
from tierkv.policies.select import CLASSIC_POLICIES
from tierkv.simulator.trace import Request
from tierkv.simulator.yardsticks.published import Lhd, S3Fifo

BLOCK_POLICIES: Final[dict[str, Callable[[int, int], EvictionPolicy]]] = {
    **CLASSIC_POLICIES,
    "s3fifo": lambda capacity_blocks, seed: S3Fifo(capacity_blocks),
    "lhd": lambda capacity_blocks, seed: Lhd(capacity_blocks, seed=seed),
}
"""Policies by name; called with a capacity and a seed."""


def belady_hits(requests: Sequence[Request], capacity_blocks: int) -> Iterator[int]:
    """Yield hit blocks per request under the optimum; O(references log references).

    Ref: L. A. Belady, "A study of replacement algorithms for a virtual-storage computer", 1966.
    """
    never = len(requests)
    upcoming: dict[int, int] = {}  # Resident blocks and their next use.
    queue: list[tuple[int, int, int]] = []
    for request, following in zip(requests, _next_uses(requests), strict=True):
        chain = request.block_ids
        yield next((i for i, block in enumerate(chain) if block not in upcoming), len(chain))
        for depth, (block, use) in enumerate(zip(chain, following, strict=True)):
            if use < never:
                upcoming[block] = use
                heapq.heappush(queue, (-use, -depth, block))
            else:
                upcoming.pop(block, None)
        while len(upcoming) > capacity_blocks:
            use, _, block = heapq.heappop(queue)
            if upcoming.get(block) == -use:
                del upcoming[block]


def _next_uses(requests: Sequence[Request]) -> list[list[int]]:
    """Return the number of the next request of each block, per request; past the end: none."""
    latest: dict[int, int] = {}
    found: list[list[int]] = [[]] * len(requests)
    for index in range(len(requests) - 1, -1, -1):
        chain = requests[index].block_ids
        found[index] = [latest.get(block, len(requests)) for block in chain]
        latest.update(dict.fromkeys(chain, index))
    return found
