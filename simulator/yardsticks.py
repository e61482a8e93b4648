"""Yardsticks for production's eviction policies: LHD, S3-FIFO, and Belady's optimum.

Called by simulator/cache_replay.py. The published policies follow their papers block by block, with
ghosts by key, and ignore prompts and prefixes. The optimum is an upper bound for every policy with
the same capacity: it evicts the block with the farthest next use, among equal blocks the deepest;
the victim may be the newest block, which then bypasses the cache. Because an id names its whole
prefix, a block is never used before its parent. The victim is therefore a leaf, and the number of
block hits is the maximum.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Final

from tierkv.policies.eviction import BlockFacts, EvictionPolicy
from tierkv.policies.select import CLASSIC_POLICIES
from tierkv.simulator.trace import Request

_CLASSES: Final = 16
_AGES: Final = 128
_DECAY: Final = 0.9
_SAMPLE: Final = 16
_LCG_FACTOR: Final = 6364136223846793005
_LCG_STEP: Final = 1442695040888963407

_SMALL_SHARE: Final = 0.1
_MOST_USES: Final = 3


class OfferedHandles:
    """Keeps the offered handles in a set.

    Attributes:
        _offered: resident handles that may be evicted.
    """

    def __init__(self) -> None:
        self._offered: set[int] = set()

    def offer(self, handle: int) -> None:
        self._offered.add(handle)

    def withdraw(self, handle: int) -> None:
        self._offered.discard(handle)


class Lhd:
    """LHD: evicts the block with the least expected hits per unit of space and time.

    Ages in coarse steps of references, classes by the ages at the last two hits, hit densities from
    decaying counts, and a sample of the cache per eviction.

    Ref: N. Beckmann, H. Chen and A. Cidon, "LHD: Improving Cache Hit Rate by Maximizing Hit
    Density", NSDI 2018.

    Attributes:
        _state: per resident handle: reference of the last use, class, age at the last hit.
        _offered: array of evictable handles to draw from; _place: index of each handle.
        _density: hit density per class and age, as last computed.
        _hits, _evictions: decaying counts per class and age.
        _step: references per step of age; _uses: references so far.
    """

    def __init__(self, capacity_blocks: int, *, seed: int = 0) -> None:
        self._state: dict[int, tuple[int, int, int]] = {}
        self._offered: list[int] = []
        self._place: dict[int, int] = {}
        self._step = max(1, 8 * capacity_blocks // _AGES)
        self._every = max(1_000, capacity_blocks)
        self._uses = 0
        self._due = self._every
        self._chosen: tuple[int, int] | None = None
        self._chance = 2 * seed + 1
        self._hits = [[0.0] * _AGES for _ in range(_CLASSES)]
        self._evictions = [[0.0] * _AGES for _ in range(_CLASSES)]
        self._density = [[1.0 / (age + 1) for age in range(_AGES)] for _ in range(_CLASSES)]

    def entered(self, handle: int, facts: BlockFacts, now: float) -> None:
        self._tick()
        self._state[handle] = (self._uses, 0, _AGES)

    def used(self, handle: int, facts: BlockFacts, now: float) -> None:
        self._tick()
        last, kind, before = self._state[handle]
        age = self._age(last)
        self._hits[kind][age] += 1.0
        self._state[handle] = (self._uses, _class_of(age + before), age)

    def left(self, handle: int, now: float) -> None:
        self.withdraw(handle)
        last, kind, _ = self._state.pop(handle)
        self._evictions[kind][self._age(last)] += 1.0

    def offer(self, handle: int) -> None:
        if handle not in self._place:
            self._place[handle] = len(self._offered)
            self._offered.append(handle)

    def withdraw(self, handle: int) -> None:
        place = self._place.pop(handle, None)
        if place is not None:
            moved = self._offered.pop()
            if moved != handle:
                self._offered[place] = moved
                self._place[moved] = place

    def victim(self, now: float) -> int | None:
        """Draw a sample; return the same victim until the next use or eviction."""
        offered = self._offered
        if not offered:
            return None
        if self._chosen and self._chosen[0] in self._place and self._chosen[1] == self._uses:
            return self._chosen[0]
        count = len(offered)
        if count <= _SAMPLE:
            sample = offered
        else:  # One draw, then even steps; the array has no order.
            place, step = self._draw() % count, count // _SAMPLE
            sample = [offered[place - i * step] for i in range(_SAMPLE)]
        victim = self._least_dense(sample)
        self._chosen = (victim, self._uses)
        return victim

    def admits(self, facts: BlockFacts, now: float) -> bool:
        return True

    def refused(self, facts: BlockFacts, now: float) -> None:
        pass

    def _least_dense(self, sample: list[int]) -> int:
        """Return the handle with the least density; among equal handles the least recently used."""
        found, least, oldest = sample[0], float("inf"), 0
        state, density, step, uses = self._state, self._density, self._step, self._uses
        for handle in sample:
            last, kind, _ = state[handle]
            age = (uses - last) // step
            rank = density[kind][age] if age < _AGES else -1.0
            if rank < least or (rank == least and last < oldest):
                found, least, oldest = handle, rank, last
        return found

    def _draw(self) -> int:
        """Return 32 pseudo-random bits."""
        self._chance = (self._chance * _LCG_FACTOR + _LCG_STEP) & 0xFFFF_FFFF_FFFF_FFFF
        return self._chance >> 32

    def _age(self, last: int) -> int:
        return min((self._uses - last) // self._step, _AGES - 1)

    def _tick(self) -> None:
        self._uses += 1
        if self._uses >= self._due:
            self._due = self._uses + self._every
            for kind in range(_CLASSES):
                self._reconfigure(kind)

    def _reconfigure(self, kind: int) -> None:
        """Compute hit densities from old age to young, then let the counts decay."""
        hits, evictions = self._hits[kind], self._evictions[kind]
        ahead = events = held = 0.0
        for age in range(_AGES - 1, -1, -1):
            ahead += hits[age]
            events += hits[age] + evictions[age]
            held += events
            if events > 0.0:
                self._density[kind][age] = ahead / held
        self._hits[kind] = [count * _DECAY for count in hits]
        self._evictions[kind] = [count * _DECAY for count in evictions]


def _class_of(age: int) -> int:
    """Return the class of a hit at an age: 1 for the oldest ages, more for younger ages.

    Class 0 is for blocks never hit.
    """
    return max(1, _CLASSES - 1 - age.bit_length())


class S3Fifo(OfferedHandles):
    """S3-FIFO: a small queue for newcomers, a main queue for reused blocks, a queue of ghosts.

    A tenth of the cache is for newcomers.

    Ref: J. Yang and others, "FIFO Queues are All You Need for Cache Eviction", SOSP 2023,
    algorithm 1.

    Attributes:
        _small, _main: resident handles and their keys, oldest first.
        _gone: keys evicted from the small queue, oldest first; bounded by the size of the main
            queue.
        _uses: per resident handle, uses since admission to its queue, at most three.
    """

    def __init__(self, capacity_blocks: int) -> None:
        self._most_small = max(1, int(capacity_blocks * _SMALL_SHARE))
        self._most_gone = max(1, capacity_blocks - self._most_small)
        self._small: OrderedDict[int, Hashable] = OrderedDict()
        self._main: OrderedDict[int, Hashable] = OrderedDict()
        self._gone: OrderedDict[Hashable, None] = OrderedDict()
        self._uses: dict[int, int] = {}
        super().__init__()

    def entered(self, handle: int, facts: BlockFacts, now: float) -> None:
        self._uses[handle] = 0
        if facts.key in self._gone:
            del self._gone[facts.key]
            self._main[handle] = facts.key
        else:
            self._small[handle] = facts.key

    def used(self, handle: int, facts: BlockFacts, now: float) -> None:
        self._uses[handle] = min(self._uses[handle] + 1, _MOST_USES)

    def left(self, handle: int, now: float) -> None:
        self._offered.discard(handle)
        del self._uses[handle]
        if handle in self._small:
            self._gone[self._small.pop(handle)] = None
            if len(self._gone) > self._most_gone:
                self._gone.popitem(last=False)
        else:
            del self._main[handle]

    def victim(self, now: float) -> int | None:
        if not self._offered:
            return None
        victim = None
        if len(self._small) >= self._most_small or not self._main:
            victim = self._from_small()
        if victim is None:
            victim = self._from_main()
        return victim if victim is not None else self._from_small()

    def admits(self, facts: BlockFacts, now: float) -> bool:
        return True

    def refused(self, facts: BlockFacts, now: float) -> None:
        pass

    def _from_small(self) -> int | None:
        """Return the oldest handle with at most one use; others move to the main queue."""
        for handle in list(self._peek(self._small)):
            if self._uses[handle] <= 1:
                return handle
            self._main[handle] = self._small.pop(handle)
            self._uses[handle] = 0
        return None

    def _from_main(self) -> int | None:
        """Return the oldest handle without uses; each round costs a used handle one use."""
        for _ in range((_MOST_USES + 1) * len(self._main)):
            handle = next(iter(self._main))
            if handle in self._offered and not self._uses[handle]:
                return handle
            self._main.move_to_end(handle)
            self._uses[handle] = max(0, self._uses[handle] - 1)
        return None

    def _peek(self, queue: OrderedDict[int, Hashable]) -> list[int]:
        """Return the offered handles up to the first evictable handle."""
        found = []
        for handle in queue:
            if handle in self._offered:
                found.append(handle)
                if self._uses[handle] <= 1:
                    break
        return found


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
