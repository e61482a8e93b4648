"""Opens plans: provides a statement's plan with node data, and selects the nodes of the plan.

Used by scheduler/dispatcher.py only. Everything here is best effort: without a directory nothing is
held or loaded ahead, and calls go to the cheapest node. Nodes are asked to load blocks before the
request comes; after a failed prefetch the request loads or computes for itself.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from tierkv.costing.correction import speeds
from tierkv.kvcore.clock import Clock
from tierkv.kvcore.errors import CacheError, TierKVError
from tierkv.kvcore.ids import NodeId, RequestId
from tierkv.kvcore.layout import BlockLayout
from tierkv.kvcore.request import GenerateRequest
from tierkv.metaserver.client import LocateReply
from tierkv.scheduler.config import SchedulerConfig
from tierkv.scheduler.directory_client import DirectoryClient
from tierkv.scheduler.events import Event, Prefetch, PrefetchDone, WantedModel
from tierkv.scheduler.nodes.cluster_view import ClusterView
from tierkv.scheduler.nodes.fleet import ALIVE, Fleet
from tierkv.scheduler.nodes.node_record import NodeRecord
from tierkv.scheduler.plans.hold_keeper import HoldKeeper
from tierkv.scheduler.plans.plan_events import PlanNode
from tierkv.scheduler.plans.plan_runs import Effort
from tierkv.scheduler.plans.statement_run import C, StatementRun
from tierkv.scheduler.requests.job import Job
from tierkv.scheduler.routing_stats import RoutingStats

log = logging.getLogger("tierkv.scheduler")


class LoadAhead:
    """Running prefetches; at most one per request."""

    def __init__(
        self, view: ClusterView, stats: RoutingStats, handle: Callable[[Event], None]
    ) -> None:
        self._view = view
        self._stats = stats
        self._handle = handle
        self._asking: set[asyncio.Task[None]] = set()

    def ask(self, job: Job, prefetch: Prefetch) -> None:
        """Start a prefetch in the background, unless the job has a running prefetch."""
        if job.prefetching is not None and not job.prefetching.done():
            self._handle(PrefetchDone(prefetch.request_id, prefetch.node_id, tokens=0))
            return
        job.prefetching = asyncio.create_task(
            self._ask(job.answer.ahead(prefetch), prefetch), name="scheduler-prefetch"
        )
        self._asking.add(job.prefetching)
        job.prefetching.add_done_callback(self._asking.discard)

    async def _ask(self, request: GenerateRequest, prefetch: Prefetch) -> None:
        tokens = 0
        try:
            tokens = await self.load(request, prefetch)
        finally:
            self._handle(PrefetchDone(prefetch.request_id, prefetch.node_id, tokens))

    async def load(self, request: GenerateRequest, prefetch: Prefetch) -> int:
        """Have a node load the beginning of a prompt; never fails.

        Returns:
            number of the prompt's tokens in the node's pages now.
        """
        try:
            client = self._view.client(prefetch.node_id, prefetch.incarnation)
            tokens = await client.prefetch(request)
            self._stats.prefetches += 1
        except CacheError as error:
            self._stats.cache_errors[error.code] += 1
        except TierKVError as error:
            log.debug("%s could not load ahead: %s", prefetch.node_id, error)
        else:
            return tokens
        return 0

    async def stop(self) -> None:
        """Cancel all running prefetches."""
        for asking in tuple(self._asking):
            asking.cancel()
            with suppress(asyncio.CancelledError):
                await asking


ROOM_SHARE = 0.75
"""Share of a node's pages that a plan uses at once; the rest is for answers and other callers."""

EXPECTED_ANSWER_TOKENS = 16
"""Answer lengths are unknown; most calls over tables are classifications."""


def home(reply: LocateReply) -> NodeId | None:
    """Return the node with most of a chain in its pages; None for a tie."""
    by_blocks = sorted(reply.coverage, key=lambda each: each.l1_blocks, reverse=True)
    if not by_blocks or not by_blocks[0].l1_blocks:
        return None
    tie = len(by_blocks) > 1 and by_blocks[1].l1_blocks == by_blocks[0].l1_blocks
    return None if tie else by_blocks[0].node_id


class _Remembered:
    """Nodes of a plan, searched again only after the fleet has changed."""

    def __init__(self, fleet: Fleet, find: Callable[[], tuple[PlanNode, ...]]) -> None:
        self._fleet = fleet
        self._find = find
        self._changes = -1
        self._nodes: tuple[PlanNode, ...] = ()

    def nodes(self) -> tuple[PlanNode, ...]:
        """Return the current nodes."""
        changes = self._fleet.changes
        if changes != self._changes:
            self._nodes, self._changes = self._find(), changes
        return self._nodes


class Planner:
    """Makes a StatementRun for each statement."""

    def __init__(
        self,
        fleet: Fleet,
        directory: DirectoryClient,
        ahead: LoadAhead,
        *,
        config: SchedulerConfig,
        clock: Clock,
    ) -> None:
        self._fleet = fleet
        self._directory = directory
        self._ahead = ahead
        self._config = config
        self._clock = clock

    def open(self, calls: Sequence[C], *, max_in_flight: int) -> StatementRun[C]:
        """Plan the calls of a statement; the caller closes the returned run.

        May run in another thread than the plan's event loop: many calls take a while.

        Args:
            calls: all calls, prepared.
            max_in_flight: number of calls sent at once.
        """
        wanted = {WantedModel(c.model.name, c.model.revision, c.model.layout) for c in calls}
        block_bytes = max((c.model.layout.payload_bytes for c in calls), default=1)

        def nodes() -> tuple[PlanNode, ...]:
            found = self._serving(wanted)
            return tuple(
                PlanNode(r.info.node_id, self._room_blocks(r, block_bytes), speed)
                for r, speed in zip(found, self._speeds(found), strict=True)
            )

        seen = _Remembered(self._fleet, nodes)
        layouts = {c.request.model: c.model.layout for c in calls}

        async def prefetch(request: GenerateRequest, node_id: NodeId) -> None:
            await self.load(request, layouts[request.model], node_id)

        async def find_homes(requests: Mapping[int, GenerateRequest]) -> dict[int, NodeId]:
            return await self._homes(requests, layouts) if len(seen.nodes()) > 1 else {}

        return StatementRun(
            calls,
            max_in_flight=max_in_flight,
            nodes=seen.nodes,
            effort=self._effort(self._serving(wanted)),
            find_homes=find_homes,
            keeper=HoldKeeper(self._directory, self._clock),
            prefetch=prefetch,
        )

    async def _homes(
        self, requests: Mapping[int, GenerateRequest], layouts: Mapping[str, BlockLayout]
    ) -> dict[int, NodeId]:
        """Find the node with most of a call's KV; calls with a tie or no KV are missing."""
        asked = {call: request for call, request in requests.items() if request.use_cache}
        replies = await asyncio.gather(
            *(self._directory.locate(each, layouts[each.model]) for each in asked.values())
        )
        homes = zip(asked, map(home, replies), strict=True)
        return {call: node for call, node in homes if node is not None}

    def _serving(self, wanted: Collection[WantedModel]) -> list[NodeRecord]:
        """Return the nodes that can begin every call of the statement, by name."""
        found = [
            r
            for r in list(self._fleet.records.values())  # At once: nodes may come meanwhile.
            if r.state == ALIVE
            and r.info.role.prefills
            and not r.failures
            and all(r.serves(model) for model in wanted)
        ]
        return sorted(found, key=lambda r: r.info.node_id)

    def _speeds(self, nodes: Sequence[NodeRecord]) -> list[float]:
        if len(nodes) < 2:
            return [1.0] * len(nodes)
        figures = self._fleet.table.figures(self._fleet.group(nodes).rows)
        found: list[float] = speeds(figures.speeds.cost, figures.learned).tolist()
        return found

    @staticmethod
    def _room_blocks(record: NodeRecord, block_bytes: int) -> int:
        return int(record.info.capacity_bytes * ROOM_SHARE) // block_bytes

    def _effort(self, nodes: Sequence[NodeRecord]) -> Effort:
        """Return the cost of a call on the average node; only proportions matter."""
        prefill = [r.load.prefill_tokens_per_s for r in nodes if r.load.prefill_tokens_per_s]
        decode = [r.load.decode_tokens_per_s for r in nodes if r.load.decode_tokens_per_s]
        rate = sum(prefill) / len(prefill) if prefill else self._config.prefill_tokens_per_s
        answer_s = EXPECTED_ANSWER_TOKENS * len(decode) / sum(decode) if decode else 0.0
        return Effort(1.0 / rate, answer_s)

    async def load(
        self,
        request: GenerateRequest,
        layout: BlockLayout,
        node_id: NodeId,
        *,
        most_share: float | None = None,
    ) -> None:
        """Have the node load a prefix, if the pool has more of the prefix than the node.

        Args:
            request: its prompt is the prefix.
            layout: layout of the model's blocks.
            node_id: the node.
            most_share: load only what takes at most this share of the node's pages; None: all.
        """
        owner = self._fleet.records.get(node_id)
        size_bytes = len(request.token_ids) // layout.block_tokens * layout.payload_bytes
        if owner is None or (most_share and size_bytes > most_share * owner.info.capacity_bytes):
            return
        reply = await self._directory.locate(request, layout)
        near = next((c.l1_blocks for c in reply.coverage if c.node_id == node_id), 0)
        record = self._fleet.records.get(node_id)
        if record is None or reply.prefix_blocks <= near:
            return
        asked = replace(request, request_id=RequestId(f"{request.request_id}:ahead"))
        prefetch = Prefetch(
            asked.request_id, node_id, record.info.incarnation, len(request.token_ids)
        )
        await self._ahead.load(asked, prefetch)
