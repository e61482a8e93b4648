"""Which node should load blocks ahead, and which blocks.

Pure; a part of SchedulerState, mutated only through SchedulerState. Two cases: the successor loads
blocks while the prefill goes on at another node; a node loads blocks for a waiting request.
"""

from __future__ import annotations

from tierkv.costing.node_cost import NOTHING_CACHED, CachedPrefix
from tierkv.kvcore.ids import NodeId
from tierkv.scheduler.choosing.router import Pick, Router, layout_of
from tierkv.scheduler.config import SchedulerConfig
from tierkv.scheduler.events import Instruction, Prefetch, PrefetchDone, PrefillProgress, Stage
from tierkv.scheduler.nodes.fleet import Fleet
from tierkv.scheduler.nodes.node_record import NodeRecord
from tierkv.scheduler.request_record import RequestRecord

PREFETCH_BLOCKS = 4
"""Fewer new blocks are not worth a prefetch."""

PREFETCH_STEPS = 8
"""Approximate number of prefetches of one prompt; each prefetch names all tokens so far."""


class PrefetchPlan:
    """Prefetches that nodes were asked for.

    Attributes:
        loading: per node, waiting requests whose blocks the node is loading now.
    """

    def __init__(self, config: SchedulerConfig, fleet: Fleet, router: Router) -> None:
        self.loading: dict[NodeId, int] = {}
        self._config = config
        self._fleet = fleet
        self._router = router

    def for_handoff(
        self, request: RequestRecord, event: PrefillProgress, now: float
    ) -> list[Instruction]:
        """Have the successor load the published blocks, in a few large steps."""
        if request.stage is not Stage.PREFILL or request.node is None:
            return []
        block_tokens = layout_of(request, request.node).block_tokens
        step = max(PREFETCH_BLOCKS * block_tokens, request.total_tokens // PREFETCH_STEPS)
        if event.published_tokens - request.prefetched_tokens < step:
            return []
        successor = self._router.successor(request, now)
        if successor is None:
            return []
        request.prefetched_tokens = event.published_tokens
        return [_prefetch(request, successor, event.published_tokens)]

    def for_turn(self, request: RequestRecord, pick: Pick) -> list[Instruction]:
        """Prefetch worthwhile blocks for a waiting request; once per wait, and few at a time."""
        node_id, reused_blocks = pick.node.info.node_id, pick.cost.service.reused_blocks
        in_l1 = request.near.get(node_id, NOTHING_CACHED).l1_blocks
        loading = self.loading.get(node_id, 0)
        if (
            request.asked_ahead
            or request.ahead is not None
            or reused_blocks - in_l1 < PREFETCH_BLOCKS
            or loading >= self._config.prefetches_per_node
        ):
            return []
        request.asked_ahead, request.ahead = True, node_id
        self.loading[node_id] = loading + 1
        block_tokens = layout_of(request, pick.node).block_tokens
        return [_prefetch(request, pick.node, reused_blocks * block_tokens)]

    def may_ask(self, request: RequestRecord) -> bool:
        """Return whether ``for_turn`` could start a prefetch, whatever the costs are."""
        return (
            not request.asked_ahead
            and request.ahead is None
            and max(request.pool.l3_blocks, request.pool.l4_blocks) >= PREFETCH_BLOCKS
            and (
                request.awaits is None
                or self.loading.get(request.awaits, 0) < self._config.prefetches_per_node
            )
        )

    def done(self, request: RequestRecord, event: PrefetchDone) -> None:
        """Record the blocks that a node has after a prefetch for a waiting request."""
        if request.ahead != event.node_id:
            return
        self.drop(request)
        record = self._fleet.records.get(event.node_id)
        if record is not None and record.serves(request.arrived.model):
            blocks = event.tokens // layout_of(request, record).block_tokens
            known = request.near.get(event.node_id, NOTHING_CACHED)
            request.near[event.node_id] = CachedPrefix(
                max(blocks, known.l1_blocks), max(blocks, known.l2_blocks)
            )

    def drop(self, request: RequestRecord) -> None:
        """Forget the running prefetch of a request."""
        node_id, request.ahead = request.ahead, None
        if node_id is None:
            return
        self.loading[node_id] -= 1
        if not self.loading[node_id]:
            del self.loading[node_id]


def _prefetch(request: RequestRecord, node: NodeRecord, tokens: int) -> Prefetch:
    return Prefetch(request.request_id, node.info.node_id, node.info.incarnation, tokens)
