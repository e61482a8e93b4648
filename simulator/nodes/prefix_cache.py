"""One cache of prompt prefixes under a production eviction policy: a node's cache, or the pool.

The cluster simulation has a cache for each node and one for the pool. Only leaves are offered to
the policy, so the resident blocks are closed under prefixes, and holding the last block of a chain
holds the whole chain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tierkv.policies.eviction import BlockFacts, EvictionPolicy


class PrefixCache:
    """The resident blocks of a cache. A block's number is its handle.

    Attributes:
        capacity_blocks: most resident blocks.
        evicted_blocks: evictions to date.
        refused_blocks: new blocks refused by the policy, to date.
        _residents: per block, a bit for each cache with this block; shared by all caches.
        _bit: this cache's bit.
        _grip: number of resident children and holds of each resident block; 0: evictable.
    """

    def __init__(
        self,
        policy: EvictionPolicy,
        capacity_blocks: int,
        facts: Sequence[BlockFacts],
        residents: list[int],
        bit: int,
    ) -> None:
        self.capacity_blocks = capacity_blocks
        self.evicted_blocks = 0
        self.refused_blocks = 0
        self._policy = policy
        self._facts = facts
        self._tail_facts: dict[int, BlockFacts] = {}
        self._residents = residents
        self._bit = bit
        self._grip: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._grip)

    def __contains__(self, block: int) -> bool:
        return block in self._grip

    def depth(self, chain: Sequence[int]) -> int:
        """Return the number of leading blocks of the chain in this cache; O(log blocks)."""
        low, high = 0, len(chain)
        while low < high:
            middle = (low + high) // 2
            if chain[middle] in self._grip:
                low = middle + 1
            else:
                high = middle
        return low

    def hold(self, block: int) -> None:
        """Keep a resident block and all blocks before it, until ``release``."""
        grip = self._grip[block]
        if not grip:
            self._policy.withdraw(block)
        self._grip[block] = grip + 1

    def release(self, block: int) -> None:
        """Undo one ``hold``, or a child's grip on a parent."""
        grip = self._grip[block] - 1
        self._grip[block] = grip
        if not grip:
            self._policy.offer(block)

    def touch(self, chain: Sequence[int], now: float) -> None:
        """Tell the policy about a request's use of the resident blocks of a chain."""
        depth = self.depth(chain)
        used, facts = self._policy.used, self._facts
        for block in chain[: min(depth, len(chain) - 1)]:
            used(block, facts[block], now)
        if chain and depth == len(chain):
            used(chain[-1], self._tail(chain[-1]), now)

    def add(self, chain: Sequence[int], now: float) -> None:
        """Add the new blocks of a chain, as far as the policy admits them.

        Each new block holds its parent, so no block of the chain is evicted for another.
        """
        depth = self.depth(chain)
        if depth == len(chain):
            return
        if depth:
            self.hold(chain[depth - 1])
        while depth < len(chain) and self._enter(chain, depth, now):
            depth += 1
        self.refused_blocks += len(chain) - depth
        for block in chain[depth:]:
            facts = self._facts[block] if block != chain[-1] else self._tail(block)
            self._policy.refused(facts, now)
        if depth:
            self.release(chain[depth - 1])  # The last added block has no child here.

    def wants(self, chain: Sequence[int], now: float) -> bool:
        """Whether the first missing block of the chain would be admitted now."""
        depth = self.depth(chain)
        if depth == len(chain):
            return False
        if len(self._grip) < self.capacity_blocks:
            return True
        facts = self._facts[chain[depth]] if depth < len(chain) - 1 else self._tail(chain[depth])
        return self._policy.victim(now) is not None and self._policy.admits(facts, now)

    def _enter(self, chain: Sequence[int], depth: int, now: float) -> bool:
        """Add one block, held as if the block had a child."""
        block = chain[depth]
        facts = self._facts[block] if depth < len(chain) - 1 else self._tail(block)
        if not self._make_room(facts, now):
            return False
        self._grip[block] = 1
        self._residents[block] |= self._bit
        self._policy.entered(block, facts, now)
        return True

    def _make_room(self, facts: BlockFacts, now: float) -> bool:
        if len(self._grip) < self.capacity_blocks:
            return True
        victim = self._policy.victim(now)
        if victim is None or not self._policy.admits(facts, now):
            return False
        self._evict(victim, now)
        return True

    def _evict(self, block: int, now: float) -> None:
        self.evicted_blocks += 1
        grip = self._grip.pop(block)
        assert not grip, f"block {block} is in use"
        self._residents[block] &= ~self._bit
        self._policy.left(block, now)
        parent = self._facts[block].parent
        if isinstance(parent, int):
            self.release(parent)

    def _tail(self, block: int) -> BlockFacts:
        """Return the facts of a block at the end of the prompt."""
        facts = self._tail_facts.get(block)
        if facts is None:
            known = self._facts[block]
            outlook = replace(known.outlook, tail=True)
            facts = self._tail_facts[block] = replace(known, outlook=outlook)
        return facts

    def check_invariants(self) -> None:
        """Assert that grips, bits and capacity agree; O(blocks), for tests without holds."""
        assert len(self._grip) <= max(self.capacity_blocks, 0)
        here = {b for b, bits in enumerate(self._residents) if bits & self._bit}
        assert here == set(self._grip)
        children: dict[int, int] = {}
        for block in self._grip:
            parent = self._facts[block].parent
            if isinstance(parent, int):
                assert parent in self._grip
                children[parent] = children.get(parent, 0) + 1
        assert {b: n for b, n in self._grip.items() if n} == children
