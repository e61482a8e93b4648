"""What a node is, what a prompt could reuse there, and what that costs: the values of routing.

All in seconds, tokens, blocks and bytes. The arithmetic is in scheduler/choosing/service.py; it is
done for all candidates at once, and these values are made only for those that somebody looks at.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tierkv.costing.service_time import StepCost
from tierkv.kvcore.node import NodeLoad
from tierkv.scheduler.config import SchedulerConfig

_SLOWEST = 1e-6
"""Tokens or bytes per second."""

_LONGEST_S = 1e6

_LIKE_OTHERS = 1.5
"""Nodes of a model that differ by less are taken to be equal: what each measured in its first steps
is no better than that, and what remains is learned from answers (nodes/node_record.py)."""

UNLIKE_OTHERS = 8.0
"""A node is not believed to differ by more: one that was stopped in its first step would never get
the work that proves it wrong."""

COMPARED_TOKENS = 512
"""Of the prompt by which nodes are compared."""


@dataclass(frozen=True, slots=True)
class Rates:
    """How fast a node prefills and loads; rates are positive, latencies are not negative.

    Attributes:
        prefill_tokens_per_s: tokens computed per second, but for what the next two add.
        l2_bytes_per_s: load rate from the host's segment.
        l3_bytes_per_s: load rate from other hosts.
        l4_bytes_per_s: rate at which what rests is brought into memory, to be read from there.
        l2_latency_s: seconds of each layer's read from the host's segment.
        l3_latency_s: seconds of each layer's read from other hosts.
        l4_latency_s: seconds of bringing anything up, once.
        step_s: seconds of each forward pass.
        pair_s: seconds per (query, key) pair of attention.
        sequence_s: seconds per further prompt in a forward pass.
        step_tokens: tokens of a forward pass at most.
    """

    prefill_tokens_per_s: float
    l2_bytes_per_s: float
    l3_bytes_per_s: float
    l4_bytes_per_s: float
    l2_latency_s: float = 0.0
    l3_latency_s: float = 0.0
    l4_latency_s: float = 0.0
    step_s: float = 0.0
    pair_s: float = 0.0
    sequence_s: float = 0.0
    step_tokens: float = math.inf


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
        load_s: seconds to load those not in L1, without the wait for the path.
        prefill_s: seconds to compute the rest.
        total_s: seconds from its turn to the first token: both, overlapped layer by layer, what is
            left of the path's queue by then, and what the node was learned to add.
        tier_blocks: the reused blocks in L1, L2, L3 and L4.
    """

    reused_blocks: int
    load_s: float
    prefill_s: float
    total_s: float
    tier_blocks: tuple[int, int, int, int] = (0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class CostSplit:
    """A candidate's cost: ``wait_s + service.total_s + charge * taken_s + harm_s + handoff_s``.

    Attributes:
        wait_s: until the node begins to compute for the prompt.
        service: from then on.
        total_s: the cost.
        harm_s: charge for the decodes it would hold up.
        handoff_s: what passing the answer on to another node adds.
        charge: ``c*Q``, for the delay put on others.
        taken_s: seconds that are taken from them: what is computed and loaded, as a typical node
            does that. How fast this node was seen to be is in the service, and is not charged.
    """

    wait_s: float
    service: ServiceCost
    total_s: float
    harm_s: float = 0.0
    handoff_s: float = 0.0
    charge: float = 0.0
    taken_s: float = 0.0

    @property
    def ttft_s(self) -> float:
        """Predicted time to the first token: the cost without the charges."""
        return self.wait_s + self.service.total_s


def has_computed(load: NodeLoad) -> bool:
    """Whether a node has measured how fast it computes."""
    return _is_fitted(load) or load.prefill_tokens_per_s > 0.0


def typical_load(loads: Sequence[NodeLoad]) -> NodeLoad | None:
    """Return the load of the node that computes neither fast nor slow; None if none measured it."""
    measured = [load for load in loads if has_computed(load)]
    measured.sort(key=_compared_s)
    return measured[len(measured) // 2] if measured else None


def known_rates(
    load: NodeLoad, config: SchedulerConfig, *, typical: NodeLoad | None = None
) -> Rates:
    """Take the figures a node measured, and the documented defaults where it has none.

    What no node can be is cut to what some could: one that reports it must not spoil the sums in
    which all are weighed.

    Args:
        load: what the node tells.
        config: the defaults.
        typical: another node of its model; while it has computed nothing, or about as fast, it is
            taken to be as fast.
    """
    if typical is not None:
        load = _compared(load, typical)
    measured = _prefill_tokens_per_s(load)
    return Rates(
        prefill_tokens_per_s=max(_SLOWEST, measured or config.prefill_tokens_per_s),
        l2_bytes_per_s=max(_SLOWEST, load.l2_bytes_per_s or config.l2_bytes_per_s),
        l3_bytes_per_s=max(_SLOWEST, load.l3_bytes_per_s or config.l3_bytes_per_s),
        l4_bytes_per_s=max(_SLOWEST, load.l4_bytes_per_s or config.l4_bytes_per_s),
        l2_latency_s=min(load.l2_latency_s, _LONGEST_S),
        l3_latency_s=min(load.l3_latency_s, _LONGEST_S),
        l4_latency_s=min(load.l4_latency_s, _LONGEST_S),
        step_s=min(load.prefill_step_s, _LONGEST_S),
        pair_s=min(load.prefill_pair_s, _LONGEST_S),
        sequence_s=min(load.prefill_sequence_s, _LONGEST_S),
        step_tokens=load.step_tokens or math.inf,
    )


def _compared(load: NodeLoad, typical: NodeLoad) -> NodeLoad:
    """Have a node compute as a typical one does, or so many times slower or faster."""
    slower = 1.0
    if has_computed(load):
        slower = _compared_s(load) / max(_compared_s(typical), 1e-12)
        slower = min(max(slower, 1.0 / UNLIKE_OTHERS), UNLIKE_OTHERS)
        if 1.0 / _LIKE_OTHERS < slower < _LIKE_OTHERS:
            slower = 1.0
    return replace(
        load,
        prefill_tokens_per_s=typical.prefill_tokens_per_s / slower,
        prefill_token_s=typical.prefill_token_s * slower,
        prefill_pair_s=typical.prefill_pair_s * slower,
        prefill_step_s=typical.prefill_step_s * slower,
        prefill_sequence_s=typical.prefill_sequence_s * slower,
    )


def _compared_s(load: NodeLoad) -> float:
    """Seconds of a prompt by which nodes are compared; finite, whatever a node reports."""
    if not _is_fitted(load):
        return min(COMPARED_TOKENS * _inverse(load.prefill_tokens_per_s), _LONGEST_S)
    return min(_fitted(load).causal_seconds(0, COMPARED_TOKENS), _LONGEST_S)


def _is_fitted(load: NodeLoad) -> bool:
    return _fitted(load) != StepCost(0.0)


def _fitted(load: NodeLoad) -> StepCost:
    return StepCost(
        load.prefill_token_s, load.prefill_pair_s, load.prefill_step_s, load.prefill_sequence_s
    )


def _prefill_tokens_per_s(load: NodeLoad) -> float:
    return _inverse(load.prefill_token_s) if _is_fitted(load) else load.prefill_tokens_per_s


def _inverse(seconds: float) -> float:
    return 1.0 / seconds if seconds else math.inf
