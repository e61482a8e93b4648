"""What answering a prompt on a node would cost, in seconds.

Pure functions over plain numbers, called by scheduler/state.py for every candidate node. One cost
feeds the choice of the node and the gate "load or recompute"; nothing here knows a clock.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvcore.layout import BlockLayout
from kvcore.node import NodeLoad
from scheduler.config import SchedulerConfig


@dataclass(frozen=True, slots=True)
class Rates:
    """How fast a node prefills and loads; tokens and bytes per second, all positive."""

    prefill_tokens_per_s: float
    l2_bytes_per_s: float
    l3_bytes_per_s: float
    l4_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """How much of a chain a node can reuse; counts of blocks, each including the ones before.

    Attributes:
        l1_blocks: in the node's own pages.
        l2_blocks: in its pages or on its host.
        l3_blocks: as above, or in the memory of other hosts.
        l4_blocks: as above, or on a disk.
    """

    l1_blocks: int = 0
    l2_blocks: int = 0
    l3_blocks: int = 0
    l4_blocks: int = 0


NOTHING_CACHED = CachedPrefix()


@dataclass(frozen=True, slots=True)
class ServiceCost:
    """What a node would do with a prompt once its turn has come.

    Attributes:
        reused_blocks: blocks worth taking from the cache.
        load_s: seconds to load those not in L1.
        prefill_s: seconds to compute the rest.
        total_s: both, overlapped layer by layer.
    """

    reused_blocks: int
    load_s: float
    prefill_s: float
    total_s: float


@dataclass(frozen=True, slots=True)
class CostSplit:
    """A candidate's cost: ``total_s = wait_s + (1 + c*Q) * service.total_s``."""

    wait_s: float
    service: ServiceCost
    total_s: float

    @property
    def ttft_s(self) -> float:
        """Predicted time to the first token: the cost without the charge for delaying others."""
        return self.wait_s + self.service.total_s


def known_rates(load: NodeLoad, config: SchedulerConfig) -> Rates:
    """Take the rates a node measured, and the documented defaults where it has none."""
    return Rates(
        prefill_tokens_per_s=load.prefill_tokens_per_s or config.prefill_tokens_per_s,
        l2_bytes_per_s=load.l2_bytes_per_s or config.l2_bytes_per_s,
        l3_bytes_per_s=load.l3_bytes_per_s or config.l3_bytes_per_s,
        l4_bytes_per_s=config.l4_bytes_per_s,
    )


def service_cost(
    prompt_tokens: int, prefix: CachedPrefix, rates: Rates, layout: BlockLayout
) -> ServiceCost:
    """Find how deep into the cached prefix it pays to load, and what that costs.

    The last prompt token is always computed, because its logits are wanted. A tier that is slower
    than computing is not used: the gate of compute/tiers.py makes the same comparison.

    Args:
        prompt_tokens: tokens of the prompt, at least 1.
        prefix: what the node can reuse.
        rates: how fast it is.
        layout: bytes per block and tokens per block.
    """
    steps = (
        (prefix.l1_blocks, 0.0),
        (prefix.l2_blocks, layout.stored_bytes / rates.l2_bytes_per_s),
        (prefix.l3_blocks, layout.stored_bytes / rates.l3_bytes_per_s),
        (prefix.l4_blocks, layout.stored_bytes / rates.l4_bytes_per_s),
    )
    usable_blocks = (prompt_tokens - 1) // layout.block_tokens
    best: ServiceCost | None = None
    depth, load_s = 0, 0.0
    for prefix_blocks, block_load_s in steps:
        reach = max(depth, min(prefix_blocks, usable_blocks))
        load_s += (reach - depth) * block_load_s
        depth = reach
        prefill_s = (prompt_tokens - depth * layout.block_tokens) / rates.prefill_tokens_per_s
        total_s = overlapped(load_s, prefill_s, layout.layers)
        if best is None or total_s < best.total_s:
            best = ServiceCost(depth, load_s, prefill_s, total_s)
    assert best is not None  # steps is never empty
    return best


def overlapped(load_s: float, prefill_s: float, layers: int) -> float:
    """Time of a two-stage pipeline over layers: the longer stage, and one layer of the shorter."""
    return max(load_s, prefill_s) + min(load_s, prefill_s) / layers


def handoff_cost(prompt_tokens: int, rates: Rates, layout: BlockLayout, *, fixed_s: float) -> float:
    """Seconds between prefill and decode stage: the node that goes on loads all KV."""
    blocks = -(-prompt_tokens // layout.block_tokens)
    return fixed_s + blocks * layout.stored_bytes / rates.l2_bytes_per_s


def wait_cost(waiting_prefill_tokens: int, running: int, rates: Rates) -> float:
    """Seconds until a new prompt's turn.

    Every token queued before it is computed first, and each running request takes the compute of
    one token in each step that is shared with it.
    """
    return (waiting_prefill_tokens + running) / rates.prefill_tokens_per_s


def total_cost(
    wait_s: float, service: ServiceCost, *, mean_outstanding: float, queue_weight: float
) -> CostSplit:
    """Add the wait and the service, charged for the delay it puts on others.

    The more requests are outstanding per node (``Q``), the more everyone behind pays for each
    second of recomputation; greedy minimum TTFT (``queue_weight`` 0) collapses under load because
    it does not see that. On an idle cluster both are the same.
    """
    charge = 1.0 + queue_weight * mean_outstanding
    return CostSplit(wait_s, service, wait_s + charge * service.total_s)
