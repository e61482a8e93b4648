"""Load or recompute: the question every node asks before it computes a prompt.

Answered with policies/service_time.py, the formula of production's nodes and scheduler, and the
simulated node's own figures. Called by simulator/cluster.py.
"""

from __future__ import annotations

from kvcore.layout import BlockLayout
from policies.service_time import pipelined_evenly
from simulator.options import Gate
from simulator.serving_model import ServingModel


def blocks_to_load(
    tokens: int,
    *,
    local: int,
    pool: int,
    model: ServingModel,
    layout: BlockLayout,
    pool_bytes_per_s: float,
    queue_s: float,
    busy_s: float,
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
        queue_s: seconds until the transfer begins.
        busy_s: seconds until the node can compute the prompt.
        gate: whether the queue is seen.
    """
    missing = pool - local
    if missing <= 0 or gate is Gate.OFF:
        return max(0, missing)
    load_s = missing * layout.stored_bytes / pool_bytes_per_s
    with_s = pipelined_evenly(
        load_s,
        model.prefill_s(pool * layout.block_tokens, tokens - pool * layout.block_tokens),
        layout.layers,
        load_from_s=queue_s if gate is not Gate.BLIND else 0.0,
        compute_from_s=busy_s,
    )
    reused = local * layout.block_tokens
    return missing if with_s < busy_s + model.prefill_s(reused, tokens - reused) else 0
