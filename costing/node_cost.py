"""Cost of a request at a node: the speed of the node, its queue, and the delay of other requests.

```
rates     reported by a heartbeat, within bounds; defaults for figures without a measurement; the
          typical node's rates unless a node's own first steps clearly differ

turn_s    = waiting before it + tokens and one step of others                  its turn comes
ended_s   = loading and computing from then on, overlapped                costing/service_time.py
wait_s    = factor * turn_s                                                    factor, overhead_s:
service_s = overhead_s + factor * ended_s - wait_s                             costing/correction.py
harm_s    = decode_harm * decodes * (prefill_s - decode_step_s)                delayed answers
total_s   = wait_s + service_s + charge * taken_s + harm_s + handoff_s         the cost
```

Pure; seconds, tokens, blocks and bytes. The scheduler (scheduler/choosing/choice.py) evaluates the
sums over columns for all candidates, or over floats for a single candidate: ``most`` and ``least``
are NumPy's ``maximum`` and ``minimum``, or ``max`` and ``min``. costing/node_service.py computes
the ends.
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
"""Nodes of a model with a speed ratio below this are treated as equal. Measurements of the first
steps are no more precise; the remaining difference is learned from answers
(costing/correction.py)."""


@dataclass(frozen=True, slots=True)
class Rates:
    """How fast a node prefills and loads.

    Attributes:
        cost: cost of computing.
        l2: read of a layer from the host's segment.
        l3: read of a layer from other hosts.
        l4: promotion of a block from L4 into memory, once, to be read from memory.
        step_tokens: maximum number of tokens in a forward pass.
    """

    cost: StepCost
    l2: Line
    l3: Line
    l4: Line
    step_tokens: float = math.inf

    @property
    def prefill_tokens_per_s(self) -> float:
        """Tokens computed per second, without the cost of pairs and steps."""
        return 1.0 / self.cost.per_token_s if self.cost.per_token_s else math.inf


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """Blocks of a chain that a node can reuse; each count includes the counts before.

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
    """A node's plan for a prompt, from the prompt's turn on.

    Attributes:
        reused_blocks: blocks worth taking from the cache.
        load_s: seconds to load the blocks outside L1, without the wait for the path.
        prefill_s: seconds to compute the rest.
        total_s: seconds from the turn to the first token. Includes loading and computing,
            overlapped layer by layer, the remaining queue of the path, and the learned correction
            of the node.
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
        wait_s: seconds until the node begins to compute the prompt.
        service: the plan after the wait.
        total_s: the cost.
        harm_s: charge for the decodes that the prompt would delay.
        handoff_s: additional seconds for passing the answer on to another node.
        charge: ``c*Q``, for the delay of other requests.
        taken_s: seconds taken from other requests: computing and loading at the speed of a typical
            node. The measured speed of this node is a part of the service and is not charged.
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
    """The queued work of a node; each property is a number or a column."""

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

    The queued prompts of all fronts are computed first, and each outstanding request takes the
    compute of a token in the shared step. The prompt at the head of the queue is already in
    progress. If the head is overdue, the remaining time is assumed to equal the delay so far.
    """
    left_s = queue.head_end_s - now
    ours_s = queue.waiting_s - queue.head_s + most(least(left_s, queue.head_s), -left_s)
    return ours_s + (queue.others_tokens + queue.outstanding) * token_s


class Charged(NamedTuple):
    """Parts of a cost, and the total; the module docstring defines the parts."""

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
    """Charge a request for the node's time until the first token, and for delaying other requests.

    The learned correction of a node applies to the wait and to the service alike.
    """
    wait_s = learned.factor * turn_s
    service_s = corrected_s(learned, ended_s) - wait_s
    harm_s = decode_harm * decodes * most(prefill_s - decode_step_s, 0.0)
    total_s = wait_s + service_s + charge * taken_s + harm_s + handoff_s
    return Charged(wait_s, service_s, harm_s, total_s)


def typical_load(loads: Sequence[NodeLoad]) -> NodeLoad | None:
    """Return the load of the node with the median computing speed; None without measurements."""
    measured = [(cost, load) for load in loads if (cost := told_cost(load)) is not None]
    measured.sort(key=lambda pair: _compared_s(pair[0]))
    return measured[len(measured) // 2][1] if measured else None


def known_rates(load: NodeLoad, defaults: Rates, *, typical: NodeLoad | None = None) -> Rates:
    """Return the rates that a node measured, and the documented defaults for missing figures.

    Impossible figures are clipped to possible figures, so a node with a broken report does not
    spoil the sums that compare all nodes.

    Args:
        load: the node's report.
        defaults: rates for figures missing from the report.
        typical: another node of the same model. Its speed is used for a node that has computed
            nothing yet, or that is about as fast.
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
    """Return the compute time over a typical node's; 1.0 if not clearly different."""
    slower = _compared_s(cost) / max(_compared_s(typical), 1e-12)
    slower = min(max(slower, 1.0 / UNLIKE_OTHERS), UNLIKE_OTHERS)
    return 1.0 if 1.0 / _LIKE_OTHERS < slower < _LIKE_OTHERS else slower


def _compared_s(cost: StepCost) -> float:
    """Return the seconds of the prompt by which nodes are compared; finite for any report."""
    return min(cost.causal_seconds(0, COMPARED_TOKENS), _LONGEST_S)
