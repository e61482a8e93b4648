"""What a request costs at a node: how fast the node is, what waits there, and who is held up.

```
rates     what a heartbeat tells, in bounds; defaults where nothing was measured; the typical
          node's where a node's own first steps say nothing clearly different

turn_s    = waiting before it + tokens and one step of others                  its turn comes
ended_s   = the pipeline of loading and computing from then on                 costing/pipeline.py
wait_s    = factor * turn_s                                                    factor, overhead_s:
service_s = overhead_s + factor * ended_s - wait_s                             costing/correction.py
harm_s    = decode_harm * decodes * (prefill_s - decode_step_s)                answers held up
total_s   = wait_s + service_s + charge * taken_s + harm_s + handoff_s         the cost
```

Pure; seconds, tokens, blocks and bytes. The scheduler (scheduler/choosing/choice.py) evaluates the
sums for all candidates at once, over columns, or for the only one, over floats: ``most`` and
``least`` are ``max`` and ``min`` or NumPy's. costing/node_service.py says what ends when.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from tierkv.costing.correction import COMPARED_TOKENS, UNLIKE_OTHERS, Learned, corrected_s
from tierkv.costing.service_time import Line, StepCost, told_cost
from tierkv.kvcore.node import NodeLoad

_SLOWEST = 1e-6
"""Bytes per second."""

_LONGEST_S = 1e6

_LIKE_OTHERS = 1.5
"""Nodes of a model that differ by less are taken to be equal: what each measured in its first steps
is no better than that, and what remains is learned from answers (costing/correction.py)."""


@dataclass(frozen=True, slots=True)
class Rates:
    """How fast a node prefills and loads.

    Attributes:
        cost: what computing costs.
        l2: each layer's read from the host's segment.
        l3: each layer's read from other hosts.
        l4: bringing what rests into memory, once, to be read from there.
        step_tokens: tokens of a forward pass at most.
    """

    cost: StepCost
    l2: Line
    l3: Line
    l4: Line
    step_tokens: float = math.inf

    @property
    def prefill_tokens_per_s(self) -> float:
        """Tokens computed per second, but for what pairs and steps add."""
        return 1.0 / self.cost.per_token_s if self.cost.per_token_s else math.inf


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


class Queue(Protocol):
    """What a node has to do already; one number each, or a column."""

    @property
    def waiting_s(self) -> Any: ...
    @property
    def head_s(self) -> Any: ...
    @property
    def head_end_s(self) -> Any: ...
    @property
    def others_tokens(self) -> Any: ...
    @property
    def outstanding(self) -> Any: ...


def turn_s(
    queue: Queue,
    token_s: Any,
    now: float,
    *,
    most: Callable[..., Any] = max,
    least: Callable[..., Any] = min,
) -> Any:
    """Return when a new prompt's turn comes, in seconds from now.

    Every prompt before it is computed first, and each request takes the compute of one token in the
    step that is shared with it. What the node is at was begun; when it should be over and is not,
    the node is late, by as much again.
    """
    left_s = queue.head_end_s - now
    ours_s = queue.waiting_s - queue.head_s + most(least(left_s, queue.head_s), -left_s)
    return ours_s + (queue.others_tokens + queue.outstanding) * token_s


class Charged(NamedTuple):
    """Parts of a cost, and their sum; see the top of this file."""

    wait_s: Any
    service_s: Any
    harm_s: Any
    total_s: Any


def charged(
    learned: Learned,
    *,
    turn_s: Any,
    ended_s: Any,
    prefill_s: Any,
    decodes: Any,
    decode_step_s: Any,
    decode_harm: float,
    charge: float,
    taken_s: Any,
    handoff_s: Any = 0.0,
    most: Callable[..., Any] = max,
) -> Charged:
    """Charge a request for the node's time until its first token, and for what others lose.

    What a node was learned to add is spread over its wait and its service alike.
    """
    wait_s = learned.factor * turn_s
    service_s = corrected_s(learned, ended_s) - wait_s
    harm_s = decode_harm * decodes * most(prefill_s - decode_step_s, 0.0)
    total_s = wait_s + service_s + charge * taken_s + harm_s + handoff_s
    return Charged(wait_s, service_s, harm_s, total_s)


def has_computed(load: NodeLoad) -> bool:
    """Whether a node has measured how fast it computes."""
    return told_cost(load) is not None


def typical_load(loads: Sequence[NodeLoad]) -> NodeLoad | None:
    """Return the load of the node that computes neither fast nor slow; None if none measured it."""
    measured = [(cost, load) for load in loads if (cost := told_cost(load)) is not None]
    measured.sort(key=lambda pair: _compared_s(pair[0]))
    return measured[len(measured) // 2][1] if measured else None


def known_rates(load: NodeLoad, defaults: Rates, *, typical: NodeLoad | None = None) -> Rates:
    """Take the figures a node measured, and the documented defaults where it has none.

    What no node can be is cut to what some could: one that reports it must not spoil the sums in
    which all are weighed.

    Args:
        load: what the node tells.
        defaults: for what it does not.
        typical: another node of its model; while it has computed nothing, or about as fast, it is
            taken to be as fast.
    """
    cost, usual = told_cost(load), None if typical is None else told_cost(typical)
    if usual is not None:
        cost = usual if cost is None else usual.times(_times_slower(cost, usual))
    cost = cost or defaults.cost
    return Rates(
        StepCost(
            min(cost.per_token_s, _LONGEST_S),
            min(cost.per_pair_s, _LONGEST_S),
            min(cost.per_step_s, _LONGEST_S),
            min(cost.per_sequence_s, _LONGEST_S),
        ),
        _credible_line(load.l2_latency_s, load.l2_bytes_per_s, defaults.l2),
        _credible_line(load.l3_latency_s, load.l3_bytes_per_s, defaults.l3),
        _credible_line(load.l4_latency_s, load.l4_bytes_per_s, defaults.l4),
        load.step_tokens or math.inf,
    )


def _credible_line(latency_s: float, bytes_per_s: float, default: Line) -> Line:
    return Line(min(latency_s, _LONGEST_S), max(_SLOWEST, bytes_per_s or default.bytes_per_s))


def _times_slower(cost: StepCost, typical: StepCost) -> float:
    """How many times slower than a typical node one computes; 1.0 where that is not clear."""
    slower = _compared_s(cost) / max(_compared_s(typical), 1e-12)
    slower = min(max(slower, 1.0 / UNLIKE_OTHERS), UNLIKE_OTHERS)
    return 1.0 if 1.0 / _LIKE_OTHERS < slower < _LIKE_OTHERS else slower


def _compared_s(cost: StepCost) -> float:
    """Seconds of a prompt by which nodes are compared; finite, whatever a node reports."""
    return min(cost.causal_seconds(0, COMPARED_TOKENS), _LONGEST_S)
