"""Forecast of a statement's calls: tokens in the cache, tokens to compute, seconds.

``Dispatcher.forecast`` uses it for EXPLAIN (AI_ESTIMATE). Nothing is sent, reserved or remembered.
The directory locates the prompts as for a request, and scheduler/choosing/choice.py computes the
costs as for requests.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from tierkv.costing.node_cost import CachedPrefix
from tierkv.kvcore.clock import Clock
from tierkv.kvcore.ids import NodeId
from tierkv.kvcore.request import HitTokens
from tierkv.metaserver.client import LocateReply
from tierkv.scheduler.choosing.choice import weigh
from tierkv.scheduler.directory_client import NOTHING_FOUND, DirectoryClient
from tierkv.scheduler.events import ChainLocated, RequestArrived, Stage, WantedModel
from tierkv.scheduler.nodes.fleet import Fleet
from tierkv.scheduler.nodes.node_record import NodeRecord
from tierkv.scheduler.plans.plan_tree import PrefixTree, build_tree
from tierkv.scheduler.plans.statement_run import PlannedCall
from tierkv.scheduler.request_record import RequestRecord
from tierkv.scheduler.requests.job import located

MOST_LOOKED_UP: Final = 4096
"""Prompts of a statement that are located in the directory; each other prompt is assumed to be like
its neighbour in prefix order, with which it shares most."""

_AT_ONCE: Final = 32
_SORTED_AT_ONCE: Final = 256
"""Largest number of prompts sorted on the event loop, some milliseconds of work; more are sorted in
a thread."""


@dataclass(frozen=True, slots=True)
class CallForecast:
    """Forecast of one call.

    Attributes:
        prompt_tokens: tokens of the prompt.
        shared_tokens: leading tokens shared with an earlier call of the statement.
        found: leading tokens in the cache now, by the nearest tier from the call's node.
        hits: tokens that need not be computed, including tokens left in L1 by earlier calls.
        busy_s: seconds that the prompt keeps the node busy.
        node_id: the node of the call; empty while no node serves the model.
    """

    prompt_tokens: int
    shared_tokens: int = 0
    found: HitTokens = field(default_factory=HitTokens)
    hits: HitTokens = field(default_factory=HitTokens)
    busy_s: float = 0.0
    node_id: str = ""


@dataclass(frozen=True, slots=True)
class Forecast:
    """Forecast of all calls of a statement.

    Attributes:
        calls: one forecast per call, in the given order.
        looked_up: prompts located in the directory.
        unanswered: located prompts without a reply; these count as not cached.
        nodes: nodes that share the work.
        measured: all nodes have measured prefill rates; otherwise a default is used.
        wait_s: seconds until the first node is free.
        overhead_s: learned seconds of an answer in addition to loading and computing.
        token_s: seconds per token of one answer; without measurements the time of a short step, and
            0.0 while no node has measured steps.
        max_in_flight: calls answered at once.
        front_s: seconds of the front's own work per call.
        apart: the front works in parallel with the nodes; False: all share one process.
    """

    calls: tuple[CallForecast, ...] = ()
    looked_up: int = 0
    unanswered: int = 0
    nodes: int = 0
    measured: bool = False
    wait_s: float = 0.0
    overhead_s: float = 0.0
    token_s: float = 0.0
    max_in_flight: int = 1
    front_s: float = 0.0
    apart: bool = True

    @property
    def prefill_s(self) -> float:
        """Seconds of loading and computing prompts, with all nodes equally busy."""
        return sum(call.busy_s for call in self.calls) / max(self.nodes, 1)

    def decode_s(self, answer_tokens: float) -> float:
        """Return the seconds to generate ``answer_tokens`` in total, with all call places taken.

        No answer is faster than its own tokens one after another.
        """
        together = max(1, min(self.max_in_flight, len(self.calls)))
        return self.token_s * answer_tokens / together

    @property
    def beside_s(self) -> float:
        """Seconds besides loading, computing and generating, with all places for calls taken."""
        return self.overhead_s * -(-len(self.calls) // max(1, self.max_in_flight))

    @property
    def fronts_s(self) -> float:
        """Seconds of the front's own work."""
        return self.front_s * len(self.calls)

    def total_s(self, answer_tokens: float) -> float:
        """Return the seconds until the last answer."""
        nodes_s = self.prefill_s + self.decode_s(answer_tokens) + self.beside_s
        both_s = max(nodes_s, self.fronts_s) if self.apart else nodes_s + self.fronts_s
        return self.wait_s + both_s


class Forecaster:
    """Computes costs of prompts without sending any."""

    def __init__(self, fleet: Fleet, directory: DirectoryClient, clock: Clock) -> None:
        self._fleet = fleet
        self._directory = directory
        self._clock = clock

    async def forecast(self, calls: Sequence[PlannedCall], *, max_in_flight: int) -> Forecast:
        """Forecast the calls as if all were sent now, as one statement."""
        tree = await _tree(calls)
        shared = shared_before(tree)
        step = -(-len(calls) // MOST_LOOKED_UP) or 1
        positions = range(0, len(calls), step)
        asked = [calls[tree.order[at]] for at in positions]
        replies = await self._locate(asked)
        chains = [
            located(call.request.request_id, reply)
            for call, reply in zip(asked, replies, strict=True)
        ]
        found: dict[int, CallForecast] = {}
        for at, chain in zip(positions, chains, strict=True):
            if at % _AT_ONCE == 0:
                await asyncio.sleep(0)
            weighed = self._weighed(calls[tree.order[at]], chain, shared[at])
            found[tree.order[at]] = _to_the_token(weighed, tree.common[at])
        for at in range(len(calls)):
            index, like = tree.order[at], found[tree.order[at - at % step]]
            if index not in found:
                found[index] = _alike(like, tree.tokens[at], tree.common[at])
        ordered = [found[index] for index in range(len(calls))]
        summed = self._summed(ordered, calls, len(positions), max_in_flight)
        return replace(summed, unanswered=sum(reply is NOTHING_FOUND for reply in replies))

    async def _locate(self, calls: Sequence[PlannedCall]) -> list[LocateReply]:
        replies: list[LocateReply] = []
        for first in range(0, len(calls), _AT_ONCE):
            some = calls[first : first + _AT_ONCE]
            replies += await asyncio.gather(*map(self._reply, some))
        return replies

    async def _reply(self, call: PlannedCall) -> LocateReply:
        if not call.request.use_cache:
            return LocateReply()
        return await self._directory.locate(call.request, call.model.layout)

    def _candidates(self, call: PlannedCall) -> list[NodeRecord]:
        wanted = WantedModel(call.model.name, call.model.revision, call.model.layout)
        return self._fleet.candidates(wanted, Stage.WHOLE, refused=(), now=self._clock.now())

    def _weighed(self, call: PlannedCall, chain: ChainLocated, shared: int) -> CallForecast:
        """Forecast a call; an earlier call leaves ``shared`` leading blocks on its node."""
        layout, tokens = call.model.layout, len(call.request.token_ids)
        candidates = self._candidates(call)
        forecast = CallForecast(tokens, shared * layout.block_tokens)
        if not candidates:
            return forecast
        wanted = WantedModel(call.model.name, call.model.revision, layout)
        arrived = RequestArrived(call.request.request_id, wanted, tokens)
        record = RequestRecord(arrived, total_tokens=tokens, pool=chain.pool)
        record.near = {
            node.info.node_id: _with_shared(chain, node.info.node_id, shared) for node in candidates
        }
        costs = weigh(record, candidates, fleet=self._fleet, now=self._clock.now())
        at = int(costs.total_s.argmin())
        node_id, service = candidates[at].info.node_id, costs[at].service
        work = costs.work(at, tokens, layout)
        most = (tokens - 1) // layout.block_tokens
        return replace(
            forecast,
            found=_hit_tokens(_found_blocks(chain, node_id, most), layout.block_tokens),
            hits=_hit_tokens(service.tier_blocks, layout.block_tokens),
            busy_s=max(work.compute_s, service.load_s),
            node_id=node_id,
        )

    def _summed(
        self,
        found: list[CallForecast],
        calls: Sequence[PlannedCall],
        looked_up: int,
        max_in_flight: int,
    ) -> Forecast:
        nodes = {
            record.info.node_id: record
            for model in {call.model.identity: call for call in calls}.values()
            for record in self._candidates(model)
        }
        tokens_s = [s for record in nodes.values() if (s := _token_s(record))]
        return Forecast(
            calls=tuple(found),
            looked_up=looked_up,
            nodes=len(nodes),
            measured=all(_is_measured(record) for record in nodes.values()),
            wait_s=self._shortest_wait_s(list(nodes.values())),
            overhead_s=_mean([record.correction.overhead_s for record in nodes.values()]),
            token_s=statistics.harmonic_mean(tokens_s) if tokens_s else 0.0,
            max_in_flight=max_in_flight,
            apart=any(record.info.control_address for record in nodes.values()),
        )

    def _shortest_wait_s(self, nodes: Sequence[NodeRecord]) -> float:
        """Return the seconds of computing before the first node is free."""
        waits = [
            (node.waiting_tokens + node.others_waiting_tokens) / node.rates.prefill_tokens_per_s
            for node in nodes
        ]
        return min(waits, default=0.0)


async def _tree(calls: Sequence[PlannedCall]) -> PrefixTree:
    prompts = [call.request for call in calls]
    block_tokens = [call.model.layout.block_tokens for call in calls]
    if len(prompts) <= _SORTED_AT_ONCE:
        return build_tree(prompts, block_tokens)
    return await asyncio.to_thread(build_tree, prompts, block_tokens)


def shared_before(tree: PrefixTree) -> list[int]:
    """Return per position the number of leading blocks shared with an earlier position."""
    shared: list[int] = []
    for position in range(len(tree.order)):
        stems = (tree.stems[number] for number in tree.path(position))
        shared.append(next((s.end_block for s in stems if s.first < position), 0))
    return shared


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _token_s(record: NodeRecord) -> float:
    """Return measured seconds per answer token of a node, or the time of its shortest step."""
    if record.load.decode_tokens_per_s:
        return 1.0 / record.load.decode_tokens_per_s
    return (
        record.rates.cost.per_step_s + record.load.prefill_token_s if _is_measured(record) else 0.0
    )


def _is_measured(record: NodeRecord) -> bool:
    load = record.load
    return bool(load.prefill_token_s or load.prefill_step_s or load.prefill_tokens_per_s)


def _with_shared(chain: ChainLocated, node_id: NodeId, shared: int) -> CachedPrefix:
    near = chain.near.get(node_id, CachedPrefix())
    return CachedPrefix(max(near.l1_blocks, shared), max(near.l2_blocks, shared))


def _found_blocks(chain: ChainLocated, node_id: NodeId, most: int) -> tuple[int, int, int, int]:
    """Split cached blocks by the nearest tier from a node; at most ``most`` blocks."""
    near = chain.near.get(node_id, CachedPrefix())
    ends, before = [], 0
    for blocks in (near.l1_blocks, near.l2_blocks, chain.pool.l3_blocks, chain.pool.l4_blocks):
        before = max(before, min(blocks, most))
        ends.append(before)
    return ends[0], ends[1] - ends[0], ends[2] - ends[1], ends[3] - ends[2]


def _hit_tokens(blocks: tuple[int, int, int, int], block_tokens: int) -> HitTokens:
    return HitTokens(*(count * block_tokens for count in blocks))


def _to_the_token(call: CallForecast, common: int) -> CallForecast:
    """Add the tokens copied in L1 from the block where a call diverges from the previous call."""
    hits = call.hits
    part = min(common, call.prompt_tokens - 1) - (hits.l1 + hits.l2 + hits.l3 + hits.l4)
    more = HitTokens(max(0, part), 0, 0, 0) if call.node_id else HitTokens()
    return replace(call, shared_tokens=common, hits=hits + more)


def _alike(like: CallForecast, tokens: int, shared_tokens: int) -> CallForecast:
    """Scale the forecast of a similar call to another prompt length."""
    share = tokens / like.prompt_tokens
    found, hits = (
        HitTokens(*(int(count * share) for count in (of.l1, of.l2, of.l3, of.l4)))
        for of in (like.found, like.hits)
    )
    return replace(
        like,
        prompt_tokens=tokens,
        shared_tokens=shared_tokens,
        found=found,
        hits=hits,
        busy_s=like.busy_s * share,
    )
