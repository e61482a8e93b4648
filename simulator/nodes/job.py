"""One request on its way through the simulated cluster.

Made when it arrives, changed by the cluster and its nodes, read by the routers. Times are virtual
seconds.
"""

from __future__ import annotations

from dataclasses import dataclass

from tierkv.simulator.nodes.pool_link import Transfer
from tierkv.simulator.workload import WorkloadPrompt

NOWHERE = -1


@dataclass(frozen=True, slots=True)
class AheadLoad:
    """Blocks ``[start, stop)`` of a chain on their way to a node."""

    node: int
    start: int
    stop: int
    transfer: Transfer

    def comes_to(self, node: int, local: int, now: float) -> bool:
        """Whether it is still under way to that node, and goes on where its cache ends."""
        here = node == self.node and self.start <= local < self.stop
        return here and self.transfer.end_s > now


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    """A request and what became of it.

    Attributes:
        prompt: what came in.
        chain: its blocks that may be reused; the last token is always computed.
        arrived_s: when it came in.
        node: who has it; NOWHERE until a router placed it.
        held_local: a block held for it in its node's cache; NOWHERE: none.
        held_pool: the same in the pool.
        expected_tokens: tokens its node will probably compute, while they are queued.
        expected_s: seconds that will probably take.
        local_blocks: reused from the node's cache.
        loaded_blocks: reused from the pool.
        ahead: what was moved while it waited for a node; None: nothing.
        load: when these are moved; None for none.
        started_s: when its node began to compute it.
        first_token_s: when the prefill ended.
        decode_from_s: when the rest of the answer began.
        decode_busy_s: the node's seconds of prefill until then.
    """

    prompt: WorkloadPrompt
    chain: tuple[int, ...]
    arrived_s: float
    node: int = NOWHERE
    held_local: int = NOWHERE
    held_pool: int = NOWHERE
    expected_tokens: int = 0
    expected_s: float = 0.0
    local_blocks: int = 0
    loaded_blocks: int = 0
    ahead: AheadLoad | None = None
    load: Transfer | None = None
    started_s: float = 0.0
    first_token_s: float = 0.0
    decode_from_s: float = 0.0
    decode_busy_s: float = 0.0

    @property
    def pool_blocks(self) -> int:
        """Reused blocks that came from the pool for this request, while it waited or after."""
        ahead = self.ahead
        if ahead is None or ahead.node != self.node:
            return self.loaded_blocks
        return self.loaded_blocks + max(0, min(ahead.stop, self.local_blocks) - ahead.start)

    @property
    def ttft_s(self) -> float:
        """Time to the first token."""
        return self.first_token_s - self.arrived_s


@dataclass(frozen=True, slots=True)
class Lookup:
    """Where a chain is: blocks in each node's cache and in the pool, from its beginning."""

    local: list[int]
    pool: int


def look_up(chain: tuple[int, ...], residents: list[int], nodes: int) -> Lookup:
    """Find the prefix that each node and the pool have.

    What a cache has is closed under prefixes, so each different length is found by bisection.

    Args:
        chain: block numbers.
        residents: per block, a bit per node and, above them, the pool's.
        nodes: how many nodes.
    """
    depths = [0] * (nodes + 1)
    left = (1 << (nodes + 1)) - 1
    low, length = 0, len(chain)
    while left and low < length:
        high = length
        first = left & residents[chain[low]]
        if first == left:
            low += 1
            while low < high:
                middle = (low + high) // 2
                if residents[chain[middle]] & left == left:
                    low = middle + 1
                else:
                    high = middle
            first = left & residents[chain[low]] if low < length else 0
        gone = left & ~first
        left = first
        while gone:
            bit = gone & -gone
            depths[bit.bit_length() - 1] = low
            gone ^= bit
    return Lookup(depths[:nodes], depths[nodes])
