"""Hop 2 of the main job: from a request to a stream of tokens, despite failures of nodes.

``Dispatcher.submit`` is called by dbfront/generation/generation.py for every AI call and chat
request. It carries out the decisions of scheduler/requests/state.py. A CacheError is turned into
"no hits" or "another node" and counted here, in directory_client.py, requests/stage_runner.py and
plans/planner.py, and in compute/tiers/tiers.py; nowhere else.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from functools import partial
from uuid import uuid4

from tierkv.kvcore.clock import Clock, SystemClock
from tierkv.kvcore.errors import CacheError, TransportError, UdfArgumentError
from tierkv.kvcore.ids import NodeId, RequestId, tenant_of
from tierkv.kvcore.layout import BlockLayout
from tierkv.kvcore.node import ModelInfo, PreferredNode
from tierkv.kvcore.request import GenerateEvent, GenerateRequest
from tierkv.metaserver.client import LocateReply, MetaClient
from tierkv.scheduler.choosing.admission import WaitingCall
from tierkv.scheduler.config import SchedulerConfig
from tierkv.scheduler.directory_client import DirectoryClient
from tierkv.scheduler.events import (
    Abandon,
    ChainLocated,
    Dispatch,
    Event,
    Fail,
    Instruction,
    Locate,
    NodesSeen,
    OthersSeen,
    Prefetch,
    RefreshNodes,
    RequestArrived,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
    Stage,
    Wait,
    WaitOver,
    WantedModel,
)
from tierkv.scheduler.nodes.cluster_view import ClusterView
from tierkv.scheduler.plans.forecast import Forecast, Forecaster
from tierkv.scheduler.plans.planner import LoadAhead, Planner
from tierkv.scheduler.plans.statement_run import PlannedCall
from tierkv.scheduler.request_record import RequestPhase
from tierkv.scheduler.requests.job import Job, failure, located
from tierkv.scheduler.requests.returns import MOST_SHARE, ReturnKeeper
from tierkv.scheduler.requests.stage_runner import RequestLeases, StageRunner
from tierkv.scheduler.requests.state import SchedulerState
from tierkv.scheduler.routing_stats import (
    Affinity,
    RoutingStats,
    RoutingView,
    SchedulerStats,
    node_costs,
)
from tierkv.scheduler.scale_signals import ScaleSignals, scale_signals
from tierkv.scheduler.shared_state.contract import FrontWork, SharedState, WorkExchange

log = logging.getLogger("tierkv.scheduler")

REFRESH_TIMEOUT_S = 5.0
CANCEL_TIMEOUT_S = 1.0
"""If a node does not confirm a cancel in this time, its stream is dropped."""

MIN_REFRESH_GAP_S = 0.05


@dataclass(frozen=True, slots=True)
class WaitingRequest:
    """A request waiting for a node, with its tenant and model, which only the shell knows."""

    tenant: str
    model: str
    call: WaitingCall


class Dispatcher:
    """Sends requests to nodes and streams back the answers.

    One per front process; used from one event loop. Call ``start`` before the first request.

    Attributes:
        view: the nodes and the connections to the nodes.
        state: the pure core, with all live requests; read-only for other modules.
        stats: counters and decisions.
        affinity: counters of where prompts went.
        directory: locations of blocks, and the hash keys of tenants.
        planner: plans the calls of a statement; each call is submitted later, in its turn.
        exchange: tells other fronts of this front's work; None without shared state.
        weight_of: returns a tenant's share of the turns of waiting calls.
    """

    def __init__(
        self,
        view: ClusterView,
        *,
        meta: MetaClient | None = None,
        config: SchedulerConfig | None = None,
        clock: Clock | None = None,
        shared: SharedState | None = None,
    ) -> None:
        """Make a dispatcher; does nothing before ``start``.

        Args:
            view: the available nodes.
            meta: the directory; None means no hits and tenant keys known to this process alone.
            config: waits, bounds and default rates.
            clock: source of ``now``.
            shared: what the fronts share; left by ``stop``. None: other fronts are known from the
                nodes' heartbeats only.
        """
        self.view = view
        self.weight_of: Callable[[str], float] = lambda tenant: 1.0
        self.config = config or SchedulerConfig()
        self.state = SchedulerState(self.config)
        self.stats = RoutingStats(self.config.decisions_logged)
        self.affinity = Affinity()
        self._clock = clock or SystemClock()
        self.directory = DirectoryClient(
            meta, config=self.config, stats=self.stats, clock=self._clock
        )
        self._leases = RequestLeases(self.directory, self.stats, lease_s=self.config.lease_s)
        self._ahead = LoadAhead(view, self.stats, self._handle)
        self.planner = Planner(
            self.state.fleet, self.directory, self._ahead, config=self.config, clock=self._clock
        )
        self.returns = ReturnKeeper(
            partial(self.planner.load, most_share=MOST_SHARE),
            self._clock,
            bytes_per_s=self.config.l4_bytes_per_s,
        )
        self._forecaster = Forecaster(self.state.fleet, self.directory, self._clock)
        self._stages = StageRunner(
            view,
            stats=self.stats,
            leases=self._leases,
            clock=self._clock,
            handle=self._handle,
        )
        self.exchange = (
            WorkExchange(shared, uuid4().hex, self._own_work, lambda w: self._handle(OthersSeen(w)))
            if shared is not None
            else None
        )
        self._jobs: dict[RequestId, Job] = {}
        self._wake = asyncio.Event()
        self._watcher: asyncio.Task[None] | None = None

    # -- life

    async def start(self) -> None:
        """Refresh the node list once and start the periodic refresh."""
        await self.refresh()
        self._watcher = asyncio.create_task(self._watch(), name="scheduler-watch")
        if self.exchange is not None:
            self.exchange.start()

    async def stop(self) -> None:
        """Stop refreshing and close connections; requests in flight lose their nodes."""
        if self._watcher is not None:
            self._watcher.cancel()
            with suppress(asyncio.CancelledError):
                await self._watcher
            self._watcher = None
        if self.exchange is not None:
            await self.exchange.stop()
        await self.returns.stop()
        await self._ahead.stop()
        await self._leases.stop(timeout_s=self.config.locate_timeout_s)
        await self.view.close()

    async def wake(self) -> None:
        """Prepare for a call to a node: start the nodes of this process and refresh the list.

        Raises:
            TierKVError: the nodes can't start.
        """
        await self.view.wake()
        await self.refresh()

    async def refresh(self) -> None:
        """Refresh the list of nodes now; without an answer the old list stays."""
        try:
            async with asyncio.timeout(REFRESH_TIMEOUT_S):
                nodes = await self.view.refresh()
        except TimeoutError:
            self.stats.cache_errors["directory_unavailable"] += 1
        except CacheError as error:
            self.stats.cache_errors[error.code] += 1
        else:
            self._handle(NodesSeen(nodes, pool_nodes=self.view.pool_nodes))

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(MIN_REFRESH_GAP_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(self.config.refresh_interval_s):
                    await self._wake.wait()
            self._wake.clear()
            try:
                await self.refresh()
            except Exception:  # The watch must outlive any bug in a refresh.
                log.exception("could not look at the list of nodes")

    # -- requests

    async def forecast(self, calls: Sequence[PlannedCall], *, max_in_flight: int) -> Forecast:
        """Predict the cost of a statement's calls; sends and reserves nothing."""
        await self.refresh()  # Current rates and queues; a forecast is not urgent.
        return await self._forecaster.forecast(calls, max_in_flight=max_in_flight)

    async def submit(
        self,
        request: GenerateRequest,
        *,
        model: ModelInfo | None = None,
        preferred_node: PreferredNode | None = None,
    ) -> AsyncGenerator[GenerateEvent, None]:
        """Answer a request: yield its tokens as they come, from as many nodes as needed.

        A lost node is replaced, and tokens generated before the loss are not generated again.
        Closing the iterator cancels the request at its node.

        Args:
            request: its id must not be in use.
            model: the exact model that the request was prepared for; None accepts any with the
                request's model name.
            preferred_node: used unless the call takes much more time from other calls at this node.

        Yields:
            events; only the last event has a finish_reason and a usage.

        Raises:
            UserError: as reported by the node.
            OverloadedError: too many requests are live or waiting, the request would miss the
                target for its first token, or every node's queue is full.
            NoNodeError: no node has served the model for too long.
            NodeLostError: nodes died repeatedly while serving the request.
        """
        if request.request_id in self._jobs:
            raise UdfArgumentError(f"request id {request.request_id} is already in use")
        job = Job(request, _wanted(request, model))
        self.returns.came(request)
        layout = self._layout(job.wanted)
        arrived = self._arrived(job, layout, preferred_node)
        self._jobs[request.request_id] = job
        finished = RequestFinished(request.request_id)
        dispatch: Dispatch | None = None
        try:
            self._handle(arrived)
            while isinstance(job.ending, RequestCancelled):
                dispatch = await self._next_dispatch(job)
                if dispatch is None:
                    yield job.answer.finish_early(node_id="")
                    return
                async with aclosing(self._stages.run(job, dispatch)) as events:
                    async for event in events:
                        yield event
        except (GeneratorExit, asyncio.CancelledError):
            raise
        except BaseException:
            job.ending = RequestFailed(request.request_id)
            raise
        finally:
            del self._jobs[request.request_id]
            if job.prefetching is not None:
                job.prefetching.cancel()
            self._leases.abort(job.lease)
            self._handle(job.ending)
            if layout is not None and dispatch is not None and job.ending == finished:
                self.returns.left(request, tuple(job.answer.tokens), layout, dispatch.node_id)

    def _arrived(
        self, job: Job, layout: BlockLayout | None, preferred_node: PreferredNode | None
    ) -> RequestArrived:
        request = job.answer.request
        tenant = tenant_of(request.tenant)
        return RequestArrived(
            request.request_id,
            job.wanted,
            len(request.token_ids),
            session_id=request.session_id,
            locatable=request.use_cache
            and layout is not None
            and len(request.token_ids) > layout.block_tokens,
            splittable=request.blend is None and not request.reads_out,
            priority=request.priority,
            preferred_node=preferred_node,
            tenant=tenant,
            weight=self.weight_of(tenant),
        )

    async def cancel(self, request_id: RequestId) -> bool:
        """End a request now, in any phase; its stream still ends with a usage.

        Returns:
            False when the request is not known.
        """
        job = self._jobs.get(request_id)
        if job is None:
            return False
        job.cancel_asked = True
        if job.client is None:
            job.interrupt()
            return True
        client, sent_id = job.client
        found = False
        try:
            async with asyncio.timeout(CANCEL_TIMEOUT_S):
                found = await client.cancel(sent_id)
        except TimeoutError:
            self.stats.cache_errors[TransportError.code] += 1
        except CacheError as error:
            self.stats.cache_errors[error.code] += 1
        if not found and job.client == (client, sent_id):
            job.drop()
        return True

    async def _next_dispatch(self, job: Job) -> Dispatch | None:
        """Carry out instructions until the next send: locate, wait, or give up.

        Returns:
            None when the caller cancelled the request meanwhile.
        """
        while not job.cancel_asked:
            todo, job.todo = job.todo, None
            match todo:
                case Dispatch():
                    self._before_send(job, todo)
                    return todo
                case Locate():
                    self._handle(await self._locate(job))
                case Wait():
                    await self._wait(job, todo.until_s)
                case Fail():
                    raise failure(todo, job.wanted)
                case _:
                    raise AssertionError(f"{job.request_id} has nothing to do")
        return None

    def _before_send(self, job: Job, dispatch: Dispatch) -> None:
        self.stats.record_dispatch(
            dispatch,
            self._clock.now(),
            unix_s=self._clock.wall(),
            model=job.wanted.name,
            prompt_tokens=job.answer.total_tokens,
        )
        layout = self._layout(job.wanted)
        if layout is not None and dispatch.stage is not Stage.DECODE:
            self.affinity.of(job.wanted.name).decided(dispatch.candidates, layout.block_tokens)
        if not dispatch.candidates[0].cost.service.load_s:
            # Reused blocks, if any, lie in the node's own pages: nothing needs a lease.
            self._leases.abort(job.lease)

    async def _locate(self, job: Job) -> ChainLocated:
        """Locate and lease the prompt's blocks; a cancelled request stops waiting."""
        request, layout = job.answer.request, self._layout(job.wanted)
        reply = LocateReply()
        with suppress(TimeoutError):
            async with asyncio.timeout(None) as job.timer:
                reply = await self.directory.locate(request, layout, reserve_s=self.config.lease_s)
        job.timer = None
        job.lease = reply.lease
        self._leases.keep(job.lease)
        return located(job.request_id, reply)

    async def _wait(self, job: Job, until_s: float) -> None:
        job.woken.clear()
        began_s = self._clock.now()
        try:
            async with asyncio.timeout(max(0.0, until_s - began_s)):
                await job.woken.wait()
        except TimeoutError:
            if job.todo is None:
                # A timer may fire a little early; the state must see the time given in Wait.
                self._perform(
                    self.state.handle(WaitOver(job.request_id), max(until_s, self._clock.now()))
                )
        finally:
            self.affinity.of(job.wanted.name).waited(self._clock.now() - began_s)

    # -- the state and its instructions

    def _handle(self, event: Event) -> None:
        self._perform(self.state.handle(event, self._clock.now()))

    def _perform(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            if isinstance(instruction, RefreshNodes):
                self._wake.set()
                continue
            job = self._jobs.get(instruction.request_id)
            if job is None:
                continue
            if isinstance(instruction, Abandon):
                job.abandon()
            elif isinstance(instruction, Prefetch):
                self._ahead.ask(job, instruction)
            else:
                job.todo = instruction
                job.woken.set()

    # -- what others read

    def models(self) -> tuple[ModelInfo, ...]:
        """Return the models that live nodes serve, by name."""
        return self.state.fleet.models()

    def _layout(self, wanted: WantedModel) -> BlockLayout | None:
        if wanted.layout is not None:
            return wanted.layout
        return next((m.layout for m in self.models() if wanted.matches(m)), None)

    def _own_work(self) -> dict[NodeId, FrontWork]:
        return {
            node_id: FrontWork(record.in_flight, record.waiting_tokens)
            for node_id, record in self.state.fleet.records.items()
            if record.in_flight
        }

    def snapshot(self) -> SchedulerStats:
        """Return the counters for the views and /metrics."""
        records = self.state.fleet.records.values()
        return SchedulerStats(
            arrived=self.state.arrived,
            live=len(self.state.requests),
            finished=self.state.ended[RequestPhase.FINISHED],
            failed=self.state.ended[RequestPhase.FAILED],
            cancelled=self.state.ended[RequestPhase.CANCELLED],
            dispatched=self.stats.dispatched,
            resent=self.stats.resent,
            handoffs=self.stats.handoffs,
            located=self.stats.located,
            prefetches=self.stats.prefetches,
            nodes_alive=sum(r.state == "alive" for r in records),
            nodes_suspended=sum(r.failures > 0 for r in records),
            cache_errors=tuple(sorted(self.stats.cache_errors.items())),
            waiting=len(self.state.queue),
            queued=self.state.placement.queued,
            rejected=self.state.placement.rejected,
            leases_reserved=self.stats.leases_reserved,
            leases_committed=self.stats.leases_committed,
            leases_aborted=self.stats.leases_aborted,
            leases_lost=self.stats.leases_lost,
        )

    def scale(self) -> ScaleSignals:
        """Return what an autoscaler has to know."""
        return scale_signals(
            self.state.fleet.records.values(),
            self.view.nodes,
            tuple(self.stats.decisions()),
            (waiting.model for waiting in self.waiting()),
            self._clock.now(),
        )

    def routing(self) -> RoutingView:
        """Return the logged decisions and the data behind predictions."""
        return RoutingView(
            tuple(self.stats.decisions()), node_costs(self.state.fleet.records.values())
        )

    def waiting(self) -> tuple[WaitingRequest, ...]:
        """Return the requests waiting for a node, by rank."""
        return tuple(
            WaitingRequest(job.answer.request.tenant, job.wanted.name, call)
            for call in self.state.queue.calls(self._clock.now())
            if (job := self._jobs.get(call.request_id)) is not None
        )


def _wanted(request: GenerateRequest, model: ModelInfo | None) -> WantedModel:
    if model is None:
        return WantedModel(request.model)
    return WantedModel(model.name, model.revision, model.layout)
