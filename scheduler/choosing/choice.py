"""Choice of a node: one cost in seconds for every candidate, and tie-breaking.

Called by scheduler/choosing/router.py. Costs of all candidates are computed at once, in arrays; a
CostSplit is made only on access.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from tierkv.costing.correction import Column, credible
from tierkv.costing.node_cost import CostSplit, ServiceCost, charged, turn_s
from tierkv.costing.node_service import Columns, Service, Waits, by_tier, serve, taken_s
from tierkv.costing.service_time import Line
from tierkv.kvcore.ids import NodeId
from tierkv.kvcore.layout import BlockLayout
from tierkv.kvcore.node import NodeRole, PreferredNode
from tierkv.scheduler.config import SchedulerConfig
from tierkv.scheduler.events import CandidateCost, Stage
from tierkv.scheduler.nodes.fleet import Fleet, Group
from tierkv.scheduler.nodes.node_record import Figures, NodeRecord, Work
from tierkv.scheduler.request_record import RequestRecord

EQUAL_COST = 1.02
"""Costs within two per cent count as equal: the estimate is no more accurate."""

PREFERRED_COST = 1.5
"""A plan's preferred node may cost more by this factor: the plan's knowledge of later calls is
worth some wait."""


class Weighed(Sequence[CandidateCost]):
    """Costs of some candidates; each value is made on first access."""

    def __init__(
        self, node_ids: tuple[NodeId, ...], columns: Sequence[Column], charge: float
    ) -> None:
        self._node_ids = node_ids
        self._columns = columns
        self._charge = charge
        self._made: dict[int, CandidateCost] = {}

    def __len__(self) -> int:
        return len(self._node_ids)

    @overload
    def __getitem__(self, index: int) -> CandidateCost: ...

    @overload
    def __getitem__(self, index: slice) -> list[CandidateCost]: ...

    def __getitem__(self, index: int | slice) -> CandidateCost | list[CandidateCost]:
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        made = self._made.get(index)
        if made is None:
            split = _split([float(column[index]) for column in self._columns], self._charge)
            made = self._made[index] = CandidateCost(self._node_ids[index], split)
        return made


@dataclass(frozen=True, slots=True)
class Costs(Sequence[CostSplit]):
    """Costs of a request at several nodes; a sequence of CostSplit.

    Attributes:
        nodes: the candidates.
        figures: figures of the candidates.
        service: the best load-or-compute plan at each node.
        wait_s: seconds until the request's turn.
        service_s: corrected seconds from the turn to the first token.
        harm_s: charge for delayed decodes.
        handoff_s: seconds added by a handoff.
        taken_s: seconds taken from other requests.
        total_s: the cost.
        charge: ``c*Q``, the factor of ``taken_s``.
    """

    nodes: Sequence[NodeRecord]
    figures: Figures
    service: Service
    wait_s: Column
    service_s: Column
    harm_s: Column
    handoff_s: Column
    taken_s: Column
    total_s: Column
    charge: float

    @property
    def burden_s(self) -> Column:
        """Charged seconds taken by the request at each node, without the wait for the turn."""
        return (1.0 + self.charge) * self.taken_s + self.harm_s + self.handoff_s

    @property
    def ttft_s(self) -> Column:
        """Seconds to the first token: the cost without the charges."""
        return self.wait_s + self.service_s

    def __len__(self) -> int:
        return len(self.nodes)

    @overload
    def __getitem__(self, index: int) -> CostSplit: ...

    @overload
    def __getitem__(self, index: slice) -> list[CostSplit]: ...

    def __getitem__(self, index: int | slice) -> CostSplit | list[CostSplit]:
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        return _split([float(column[index]) for column in self._columns()], self.charge)

    def _columns(self) -> tuple[Column, ...]:
        """Return the columns that ``_split`` needs."""
        service = self.service
        l1, l2, l3, _ = service.reach
        return (
            *(self.wait_s, self.service_s, self.total_s, self.harm_s, self.handoff_s, self.taken_s),
            *(service.depth, service.load_s, service.prefill_s, l1, l2, l3),
        )

    def weighed(self, indices: Sequence[int]) -> Weighed:
        """Keep the costs of some nodes for later access."""
        names = tuple(self.nodes[at].info.node_id for at in indices)
        return Weighed(names, [column[indices] for column in self._columns()], self.charge)

    def behind(self, before_s: Column) -> Costs:
        """Return the costs with ``before_s`` more seconds of earlier work at each node."""
        return replace(self, wait_s=self.wait_s + before_s, total_s=self.total_s + before_s)

    def cheapest(self, count: int) -> list[int]:
        """Return the indices of the cheapest nodes, cheapest first."""
        if count >= len(self):
            return [int(at) for at in np.argsort(self.total_s, kind="stable")]
        some = np.argpartition(self.total_s, count)[:count]
        return [int(at) for at in some[np.argsort(self.total_s[some], kind="stable")]]

    def work(self, index: int, total_tokens: int, layout: BlockLayout) -> Work:
        """Return the work of a node for the request before its first token."""
        blocks = self.service.tier_blocks(index)
        l2, l3, l4 = (float(count * layout.stored_bytes) for count in blocks[1:])
        tokens = total_tokens - sum(blocks) * layout.block_tokens
        # Waiting prompts share forward passes.
        speeds: Any = self.figures.speeds
        saved_s = speeds.cost.shared_pass_s(tokens, speeds.step_tokens, least=np.minimum)
        prefill_s = self.service.prefill_s[index] - saved_s[index]
        return Work(
            tokens=tokens,
            compute_s=float(prefill_s * self.figures.learned.factor[index]),
            load_bytes=(l2, l3, l4),
            predicted_s=float(self.service.ended_s[index]),
            corrected_s=float(self.wait_s[index] + self.service_s[index]),
        )


def _split(values: Sequence[float], charge: float) -> CostSplit:
    """Make the CostSplit of one node."""
    wait_s, service_s, total_s, harm_s, handoff_s, taken_s, blocks, load_s, prefill_s, *ends = (
        values
    )
    service = ServiceCost(int(blocks), load_s, prefill_s, service_s, by_tier(blocks, ends))
    return CostSplit(wait_s, service, total_s, harm_s, handoff_s, charge, taken_s)


def weigh(
    request: RequestRecord,
    candidates: Sequence[NodeRecord],
    *,
    fleet: Fleet,
    now: float,
    splits: bool = False,
    waiting: int = 0,
) -> Costs:
    """Compute the costs of the request at each candidate, in order.

    Args:
        request: has the tokens and the locations of the blocks.
        candidates: at least one node; all serve the request's model.
        fleet: has the candidates' figures, and the queues of shared paths.
        now: current time.
        splits: prefill-only nodes would hand the answer over.
        waiting: requests waiting for the same nodes; the request would delay them too.
    """
    config, group = fleet.config, fleet.group(candidates)
    layout = group.nodes[0].layout(request.arrived.model)
    figures = fleet.table.figures(group.rows)
    token_s = figures.speeds.cost.per_token_s
    turns_s = turn_s(figures, token_s, now, most=np.maximum, least=np.minimum)
    waits = Waits(turns_s, _path_waits(figures, fleet))
    service = serve(request.total_tokens, _reach(request, group), figures.speeds, layout, waits)
    figures = figures._replace(learned=credible(figures.learned, service.ended_s))
    # A request past its first token is delayed only by the harm.
    unanswered = np.maximum(figures.outstanding - figures.decodes, 0.0)
    charge = config.queue_weight * (float(unanswered.sum()) + waiting) / len(group.nodes)
    handoff_s = np.zeros(len(group.nodes))
    if splits:
        handoff_s = figures.hands_over * _handoff_s(request.total_tokens, figures, layout, config)
    taken = taken_s(request.total_tokens, service, group.typical, layout)
    wait_s, service_s, harm_s, total_s = charged(
        figures.learned,
        turn_s=turns_s,
        ended_s=service.ended_s,
        prefill_s=service.prefill_s,
        decodes=figures.decodes,
        decode_step_s=figures.decode_step_s,
        decode_harm=config.decode_harm,
        charge=charge,
        taken_s=taken,
        handoff_s=handoff_s,
        most=np.maximum,
    )
    return Costs(
        *(group.nodes, figures, service, wait_s, service_s, harm_s, handoff_s, taken, total_s),
        charge,
    )


def prefer_direct(costs: Costs, *, stage: Stage) -> list[int]:
    """Keep only decode nodes if no node is cheaper: decode nodes need no handoff."""
    every = list(range(len(costs)))
    if stage is Stage.DECODE:
        return every
    direct = [i for i, r in enumerate(costs.nodes) if r.info.role is NodeRole.DECODE]
    bound = float(costs.total_s.min()) * EQUAL_COST
    return direct if any(costs.total_s[i] <= bound for i in direct) else every


def wished(
    costs: Costs, among: Sequence[int], wish: PreferredNode, tokens: int, layout: BlockLayout
) -> int | None:
    """Return a plan's preferred node, unless the call takes much more from other calls.

    The predicted wait does not count: the plan sends the next call when a call has ended on the
    node, and thus follows the node's actual speed, not predictions. KV of the plan on the node
    counts even before the directory lists the KV.

    Args:
        costs: costs of all candidates.
        among: indices of allowed candidates.
        wish: the plan's preferred node.
        tokens: tokens of the prompt and of the answer so far.
        layout: gives the tokens per block.

    Returns:
        the index of the node; None if the node is not allowed or too expensive.
    """
    at = next((at for at in among if costs.nodes[at].info.node_id == wish.node_id), None)
    if at is None:
        return None
    rest = tokens - int(costs.service.depth[at]) * layout.block_tokens
    planned_rest = max(1, tokens - wish.tokens)
    burden_s = float(costs.burden_s[at]) * min(1.0, planned_rest / rest)
    least_s = float(costs.burden_s[np.asarray(among)].min())
    return at if burden_s <= PREFERRED_COST * least_s else None


def choose(
    costs: Costs,
    among: Sequence[int],
    *,
    last_node: NodeId | None,
) -> int:
    """Return the cheapest node; ties go to the session's last node, then the longest idle node.

    An idle node that would answer sooner than the cheapest, busy node wins whatever the charges:
    seconds of an idle node are taken from no other request.

    Args:
        costs: costs of all candidates.
        among: indices of allowed candidates, at least one.
        last_node: wins ties.

    Returns:
        the index of the chosen candidate.
    """
    some = np.asarray(among)
    at = _cheapest(costs, some, last_node)
    idle = some[costs.figures.outstanding[some] == 0.0]
    if not idle.size or not costs.figures.outstanding[at]:
        return at
    other = _cheapest(costs, idle, last_node)
    return other if costs.ttft_s[other] < costs.ttft_s[at] else at


def _cheapest(costs: Costs, some: NDArray[np.intp], last_node: NodeId | None) -> int:
    totals = costs.total_s[some]
    equal = some[totals <= float(totals.min()) * EQUAL_COST]
    for at in equal:
        if costs.nodes[at].info.node_id == last_node:
            return int(at)
    order = np.lexsort((costs.figures.last_chosen[equal], costs.figures.outstanding[equal]))
    return int(equal[order[0]])


def _handoff_s(
    tokens: int, figures: Figures, layout: BlockLayout, config: SchedulerConfig
) -> Column:
    """Return seconds between prefill and decode stage: the decode node loads all KV."""
    blocks = -(-tokens // layout.block_tokens)
    reads: Any = figures.speeds.reads
    path: Any = Line(config.handoff_s, reads.bytes_per_s[0])
    seconds: Column = path.seconds(blocks * layout.stored_bytes)
    return seconds


def _path_waits(figures: Figures, fleet: Fleet) -> Columns:
    """Predict when paths are free: after the node's own loads, and all loads from pool nodes.

    The speed of each pool node is taken from its fastest reader.
    """
    reads: Any = figures.speeds.reads.bytes_per_s
    rise: Any = figures.speeds.rise.bytes_per_s
    own_s: Columns = figures.queued / reads
    own_s[2] = figures.queued[2] / rise
    if fleet.pool_nodes:
        _, l3_bytes, l4_bytes = fleet.table.queued_bytes().tolist()
        shared_s = (
            l3_bytes / float(reads[1].max()) / fleet.pool_nodes,
            l4_bytes / float(rise.max()) / fleet.pool_nodes,
        )
        own_s[1:] = np.maximum(own_s[1:], np.array(shared_s)[:, None])
    return own_s


def _reach(request: RequestRecord, group: Group) -> NDArray[np.float64]:
    """Return the blocks of the chain that each node could reuse, from near and far: [4, nodes]."""
    reach = np.zeros((4, len(group.nodes)))
    found = [
        (at, near.l1_blocks, near.l2_blocks)
        for node_id, near in request.near.items()
        if (at := group.positions.get(node_id)) is not None
    ]
    if found:
        places, l1, l2 = (list(column) for column in zip(*found, strict=True))
        reach[0, places] = l1
        reach[1, places] = l2
    reach[2] = request.pool.l3_blocks
    reach[3] = request.pool.l4_blocks
    return reach
