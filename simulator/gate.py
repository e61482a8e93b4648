"""Load or recompute: the question every node asks before it computes a prompt.

Answered by scheduler/cost.py, the function the scheduler routes by, with the simulated node's own
figures. Called by simulator/cluster.py.
"""

from __future__ import annotations

from kvcore.layout import BlockLayout
from scheduler.cost import CachedPrefix, Rates, service_cost
from simulator.options import Gate
from simulator.serving_model import ServingModel

AT_ONCE = 1e18
"""Bytes per second of what costs nothing."""


def blocks_to_load(
    tokens: int,
    *,
    local: int,
    pool: int,
    model: ServingModel,
    layout: BlockLayout,
    pool_bytes_per_s: float,
    queue_s: float,
    gate: Gate,
) -> int:
    """Say how many blocks beyond the local ones are worth loading.

    Args:
        tokens: of the prompt.
        local: blocks in the node's own cache.
        pool: blocks in the pool, from the beginning of the chain.
        model: what computing takes.
        layout: of a block.
        pool_bytes_per_s: rate of the pool's link.
        queue_s: seconds the transfer would wait, less those the node is busy anyway.
        gate: whether the queue is seen.
    """
    missing = pool - local
    if missing <= 0:
        return 0
    if gate is Gate.OFF:
        return missing
    size_bytes = missing * layout.stored_bytes
    seconds = size_bytes / pool_bytes_per_s
    if gate is not Gate.BLIND:
        seconds = max(size_bytes / AT_ONCE, seconds + queue_s)
    reused, rest = local * layout.block_tokens, tokens - local * layout.block_tokens
    rate = rest / model.prefill_s(reused, rest)
    rates = Rates(rate, AT_ONCE, size_bytes / seconds, AT_ONCE)
    found = CachedPrefix(local, local, pool, pool)
    return service_cost(tokens, found, rates, layout).reused_blocks - local


def pipelined(
    load_s: float, compute_s: float, layers: int, *, load_from_s: float, compute_from_s: float
) -> float:
    """Return when equal layers are computed, each as soon as it is loaded and its turn has come.

    Args:
        load_s: seconds to load all layers.
        compute_s: seconds to compute all layers.
        layers: how many.
        load_from_s: when loading begins.
        compute_from_s: when computing may begin.
    """
    return max(
        compute_from_s + compute_s,
        load_from_s + load_s / layers + compute_s,
        load_from_s + load_s + compute_s / layers,
    )
