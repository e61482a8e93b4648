"""One request on its way through the simulated cluster.

Created when the request arrives, changed by the cluster and its nodes, read by the routers. Times
are virtual seconds.
"""

from __future__ import annotations

from dataclasses import dataclass

from tierkv.simulator.nodes.prefix_cache import Transfer
from tierkv.simulator.workload import WorkloadPrompt

NOWHERE = -1


@dataclass(frozen=True, slots=True)
class AheadLoad:
    """Blocks ``[start, stop)`` of a chain that are being moved to a node."""

    node: int
    start: int
    stop: int
    transfer: Transfer

    def comes_to(self, node: int, local: int, now: float) -> bool:
        """Whether this move to the node is unfinished and starts within its cached prefix."""
        here = node == self.node and self.start <= local < self.stop
        return here and self.transfer.end_s > now


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    """A request and its results so far.

    Attributes:
        prompt: the request of the workload.
        chain: reusable blocks of the prompt; the last token is always computed.
        arrived_s: time of arrival.
        node: number of the node; NOWHERE until a router placed the request.
        held_local: block held for this request in the node's cache; NOWHERE: no block.
        held_pool: block held for this request in the pool; NOWHERE: no block.
        expected_tokens: predicted number of tokens to compute, set when a node queues the request.
        expected_s: predicted seconds of the prefill.
        local_blocks: blocks reused from the node's cache.
        loaded_blocks: blocks reused from the pool.
        ahead: blocks moved before the request had a node; None without a move.
        load: transfer of ``loaded_blocks``; None without a load.
        started_s: start of the prefill.
        first_token_s: end of the prefill.
        decode_from_s: start of the rest of the answer.
        decode_busy_s: the node's seconds of prefill until ``decode_from_s``.
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
        """Reused blocks from the pool for this request, loaded before or after its placement."""
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
    """Locations of a chain: leading blocks in each node's cache and in the pool."""

    local: list[int]
    pool: int


def look_up(chain: tuple[int, ...], residents: list[int], nodes: int) -> Lookup:
    """Find the prefix of a chain in each node and in the pool.

    The contents of a cache are closed under prefixes, so bisection finds each different length.

    Args:
        chain: block numbers.
        residents: per block, a bit for each node and, above these, a bit for the pool.
        nodes: number of nodes.
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
