"""One cache of prompt prefixes under a production eviction policy: a node's cache, or the pool.

The cluster simulation has a cache for each node and one for the pool. Only leaves are offered to
the policy, so the resident blocks are closed under prefixes, and holding the last block of a chain
holds the whole chain.

``SimPool`` adds one link with a bounded write backlog. Nodes load blocks from the pool and write
computed blocks to the pool; simulator/cluster.py schedules the ends of writes. The link has one
rate for all nodes: loads run in the order of their requests, and writes use the remaining time, in
order. The simulation models no other part of the network: a pool spread over the nodes has the sum
of the nodes' rates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tierkv.costing.service_time import Line
from tierkv.policies.eviction import BlockFacts, EvictionPolicy
from tierkv.simulator.nodes.serving_model import NodeConstants


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


MOVED_WITHIN_S = 1e-6
"""Remaining time at which a write counts as ended: rounding must not keep a write alive."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """Start and end of a transfer, which waits for its turn until ``start_s``."""

    start_s: float
    end_s: float


class PoolLink:
    """Two queues on one wire.

    Attributes:
        bytes_per_s: rate of the link; 0.0 without a pool, and then the link is never used.
        busy_s: seconds of all requested transfers.
        _loads_end_s: end time of all loads requested so far.
        _seen_s: time up to which ``_written_s`` is known.
        _written_s: seconds of finished writing.
        _asked_s: seconds of requested writing.
    """

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self.busy_s = 0.0
        self._loads_end_s = 0.0
        self._seen_s = 0.0
        self._written_s = 0.0
        self._asked_s = 0.0

    def queue_s(self, now: float) -> float:
        """Return the seconds until a load requested now would begin."""
        return max(0.0, self._loads_end_s - now)

    def write_backlog_s(self, now: float) -> float:
        """Return the seconds of transfer still needed by pending writes."""
        self._look(now)
        return self._asked_s - self._written_s

    def load(self, size_bytes: int, now: float) -> Transfer:
        """Queue a load and return its start and end."""
        self._look(now)
        start_s = max(now, self._loads_end_s)
        self._loads_end_s = start_s + self._take(size_bytes)
        return Transfer(start_s, self._loads_end_s)

    def write(self, size_bytes: int, now: float) -> float:
        """Queue a write.

        Returns:
            ticket for ``rest_of_write_s``.
        """
        self._look(now)
        self._asked_s += self._take(size_bytes)
        return self._asked_s

    def rest_of_write_s(self, ticket: float, now: float) -> float:
        """Return the seconds until a write ends if no more loads come; 0.0: the write has ended."""
        self._look(now)
        rest_s = ticket - self._written_s
        return self.queue_s(now) + rest_s if rest_s > MOVED_WITHIN_S else 0.0

    def _take(self, size_bytes: int) -> float:
        seconds = size_bytes / self.bytes_per_s
        self.busy_s += seconds
        return seconds

    def _look(self, now: float) -> None:
        """Give writes the time that loads left."""
        idle_from_s = max(self._seen_s, self._loads_end_s)
        if now > idle_from_s:
            self._written_s = min(self._asked_s, self._written_s + now - idle_from_s)
        self._seen_s = max(self._seen_s, now)


@dataclass(frozen=True, slots=True)
class Write:
    """A write in progress.

    Attributes:
        chain: blocks up to the last written block.
        new: the written blocks.
        ticket: the link's ticket of the write.
    """

    chain: tuple[int, ...]
    new: tuple[int, ...]
    ticket: float


class SimPool:
    """Contents and transfers of the pool.

    Attributes:
        cache: blocks of the pool.
        link: link between the nodes and the pool.
        read_bytes: bytes moved from the pool.
        write_bytes: bytes moved to the pool.
        skipped_write_bytes: bytes not written because the link was behind.
    """

    def __init__(
        self,
        cache: PrefixCache,
        link: PoolLink,
        constants: NodeConstants,
        *,
        block_bytes: int,
    ) -> None:
        self.cache = cache
        self.link = link
        self._constants = constants
        self._block_bytes = block_bytes
        self._being_written: set[int] = set()
        self.read_bytes = self.write_bytes = self.skipped_write_bytes = 0

    def nominal_load_s(self, blocks: int) -> float:
        """Return the seconds of a load on an idle link."""
        if not blocks:
            return 0.0
        path = Line(self._constants.fetch_latency_s, self.link.bytes_per_s)
        return path.seconds(blocks * self._block_bytes)

    def load(self, blocks: int, now: float) -> Transfer:
        """Queue a load."""
        size_bytes = blocks * self._block_bytes
        self.read_bytes += size_bytes
        moved = self.link.load(size_bytes, now)
        latency_s = self._constants.fetch_latency_s
        return Transfer(moved.start_s + latency_s, moved.end_s + latency_s)

    def keep(self, chain: tuple[int, ...], now: float) -> Write | None:
        """Record the use of a chain, and write its new blocks.

        No block is written while writes are behind, or if the policy would not admit the blocks.
        """
        if not self.cache.capacity_blocks:
            return None
        self.cache.touch(chain, now)
        missing = chain[self.cache.depth(chain) :]
        new = tuple(block for block in missing if block not in self._being_written)
        if not new:
            return None
        size_bytes = int(len(new) * self._block_bytes * self._constants.write_share)
        if self.link.write_backlog_s(now) > self._constants.write_backlog_s:
            self.skipped_write_bytes += size_bytes
            return None
        if not self.cache.wants(chain, now):
            return None
        self._being_written.update(new)
        self.write_bytes += size_bytes
        return Write(chain, new, self.link.write(size_bytes, now))

    def written(self, write: Write, now: float) -> float:
        """Add the blocks of a finished write to the cache.

        Returns:
            seconds until the next check; 0.0: the write is finished.
        """
        rest_s = self.link.rest_of_write_s(write.ticket, now)
        if rest_s:
            return rest_s
        self._being_written.difference_update(write.new)
        self.cache.add(write.chain, now)
        return 0.0
