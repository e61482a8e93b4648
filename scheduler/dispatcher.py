"""Hop 2 of the main job: from a request to a stream of tokens, whatever happens to nodes.

``Dispatcher.submit`` is called by dbfront/generation.py for every AI call and chat request. It
carries out what scheduler/state.py decides; here, and in compute/tiers.py, a CacheError is turned
into "no hits" or "another node" and counted, and nowhere else.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, suppress

from kvcore import limits
from kvcore.block_key import block_keys, namespace_key
from kvcore.clock import Clock, SystemClock
from kvcore.errors import (
    CacheError,
    OverloadedError,
    TierKVError,
    TransportError,
    UdfArgumentError,
)
from kvcore.ids import RequestId
from kvcore.layout import BlockLayout
from kvcore.node import ModelInfo
from kvcore.request import FinishReason, GenerateEvent, GenerateRequest
from metaserver.client import MetaClient, NamespaceGrant
from scheduler.cluster_view import ClusterView
from scheduler.config import SchedulerConfig
from scheduler.events import (
    Abandon,
    ChainLocated,
    Dispatch,
    Event,
    Fail,
    FirstToken,
    HandoffDone,
    Instruction,
    Locate,
    NodeLost,
    NodeRefused,
    NodesSeen,
    Prefetch,
    PrefillProgress,
    RefreshNodes,
    RequestArrived,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
    Wait,
    WaitOver,
    WantedModel,
)
from scheduler.job import Job, failure, located
from scheduler.request_record import Phase
from scheduler.routing_stats import RoutingStats, SchedulerStats
from scheduler.state import SchedulerState

log = logging.getLogger("tierkv.scheduler")

REFRESH_TIMEOUT_S = 5.0
MIN_REFRESH_GAP_S = 0.05


class Dispatcher:
    """Sends requests to nodes and streams back what they answer.

    One per front process; used from one event loop. ``start`` before the first request.

    Attributes:
        view: the nodes and the connections to them.
        state: who runs what; read-only for others.
        stats: counters and decisions.
    """

    def __init__(
        self,
        view: ClusterView,
        *,
        meta: MetaClient | None = None,
        config: SchedulerConfig | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Make a dispatcher; does nothing before ``start``.

        Args:
            view: which nodes there are.
            meta: the directory; None means no hits and tenants keyed by this process alone.
            config: waits, bounds and default rates.
            clock: where ``now`` comes from.
        """
        self.view = view
        self.config = config or SchedulerConfig()
        self.state = SchedulerState(self.config)
        self.stats = RoutingStats(self.config.decisions_logged)
        self._meta = meta
        self._clock = clock or SystemClock()
        self._jobs: dict[RequestId, Job] = {}
        self._prefetching: set[asyncio.Task[None]] = set()
        self._wake = asyncio.Event()
        self._watcher: asyncio.Task[None] | None = None
        self._directory_off_until_s = 0.0
        self._grants: dict[tuple[str, str, bytes], tuple[float, NamespaceGrant]] = {}
        self._own_secret = secrets.token_bytes(32)

    # -- life

    async def start(self) -> None:
        """Look at the nodes once and keep looking."""
        await self.refresh()
        self._watcher = asyncio.create_task(self._watch(), name="scheduler-watch")

    async def stop(self) -> None:
        """Stop looking and close connections; requests in flight lose their nodes."""
        if self._watcher is not None:
            self._watcher.cancel()
            with suppress(asyncio.CancelledError):
                await self._watcher
            self._watcher = None
        for prefetching in tuple(self._prefetching):
            prefetching.cancel()
            with suppress(asyncio.CancelledError):
                await prefetching
        await self.view.close()

    async def refresh(self) -> None:
        """Look at the list of nodes now; when nobody answers, the old list stays."""
        try:
            async with asyncio.timeout(REFRESH_TIMEOUT_S):
                nodes = await self.view.refresh()
        except TimeoutError:
            self.stats.cache_errors["directory_unavailable"] += 1
        except CacheError as error:
            self.stats.cache_errors[error.code] += 1
        else:
            self._handle(NodesSeen(nodes))

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(MIN_REFRESH_GAP_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(self.config.refresh_interval_s):
                    await self._wake.wait()
            self._wake.clear()
            try:
                await self.refresh()
            except Exception:  # the watch must outlive any bug in a look
                log.exception("could not look at the list of nodes")

    # -- requests

    async def submit(
        self, request: GenerateRequest, *, model: ModelInfo | None = None
    ) -> AsyncGenerator[GenerateEvent, None]:
        """Answer a request: yield its tokens as they come, from whichever nodes are needed.

        A node that is lost is replaced; what it generated is not generated again. Closing the
        iterator cancels the request at its node.

        Args:
            request: its id must not be in use.
            model: the very model it was prepared for; None takes any of the request's name.

        Yields:
            events; the last one, and only it, has a finish_reason and a usage.

        Raises:
            UserError: as the node said.
            OverloadedError: too many requests here, or every node's queue is full.
            NoNodeError: no node serves the model, for too long.
            NodeLostError: nodes died under the request again and again.
        """
        if request.request_id in self._jobs:
            raise UdfArgumentError(f"request id {request.request_id} is already in use")
        job = Job(request, _wanted(request, model))
        now = self._clock.now()
        layout = self._layout(job.wanted)
        arrived = RequestArrived(
            request.request_id,
            job.wanted,
            len(request.token_ids),
            session_id=request.session_id,
            locatable=request.use_cache
            and layout is not None
            and len(request.token_ids) > layout.block_tokens,
            splittable=request.blend is None,
        )
        self._jobs[request.request_id] = job
        try:
            self._perform(self.state.handle(arrived, now))
            while job.ending == RequestCancelled(request.request_id):
                dispatch = await self._next_dispatch(job)
                async with aclosing(self._run_stage(job, dispatch)) as events:
                    async for event in events:
                        yield event
        except (GeneratorExit, asyncio.CancelledError):
            raise
        except BaseException:
            job.ending = RequestFailed(request.request_id)
            raise
        finally:
            del self._jobs[request.request_id]
            self._handle(job.ending)

    async def cancel(self, request_id: RequestId) -> bool:
        """Ask the node to end a request now; its stream still ends with a usage.

        Returns:
            False when the request is not running anywhere.
        """
        job = self._jobs.get(request_id)
        if job is None or job.client is None:
            return False
        job.cancel_asked = True
        client, sent_id = job.client
        try:
            return await client.cancel(sent_id)
        except CacheError as error:
            self.stats.cache_errors[error.code] += 1
            return False

    async def _next_dispatch(self, job: Job) -> Dispatch:
        """Do what is to be done before the next send: locate, wait, or give up."""
        while True:
            todo, job.todo = job.todo, None
            match todo:
                case Dispatch():
                    self.stats.record_dispatch(todo, self._clock.now())
                    return todo
                case Locate():
                    self._handle(await self._locate(job))
                case Wait():
                    await self._wait(job, todo.until_s)
                case Fail():
                    raise failure(todo, job.wanted)
                case _:
                    raise AssertionError(f"{job.request_id} has nothing to do")

    async def _wait(self, job: Job, until_s: float) -> None:
        job.woken.clear()
        try:
            async with asyncio.timeout(max(0.0, until_s - self._clock.now())):
                await job.woken.wait()
        except TimeoutError:
            if job.todo is None:
                # A timer may fire a little early; the state must see the time it asked for.
                self._perform(
                    self.state.handle(WaitOver(job.request_id), max(until_s, self._clock.now()))
                )

    async def _run_stage(self, job: Job, dispatch: Dispatch) -> AsyncGenerator[GenerateEvent, None]:
        """Listen to one node until it has done its stage, refuses, or is lost."""
        job.abandoned = False
        try:
            client = self.view.client(dispatch.node_id, dispatch.incarnation)
            part = job.answer.part(dispatch)
            job.client = (client, part.request_id)
            events = client.generate(part)
            try:
                async with aclosing(self._listen(job, dispatch, events)) as heard:
                    async for event in heard:
                        yield event
            finally:
                await _close(events)
        except OverloadedError:
            self._handle(NodeRefused(job.request_id))
        except CacheError as error:
            self.stats.cache_errors[error.code] += 1
            log.warning("%s lost node %s: %s", job.request_id, dispatch.node_id, error)
            if job.answer.exhausted or job.cancel_asked:
                job.ending = RequestFinished(job.request_id)
                yield job.answer.finish_early(dispatch.node_id)
            else:
                self._handle(NodeLost(job.request_id, job.answer.total_tokens))
        finally:
            job.client = None

    async def _listen(
        self, job: Job, dispatch: Dispatch, events: AsyncIterator[GenerateEvent]
    ) -> AsyncGenerator[GenerateEvent, None]:
        answer = job.answer
        heard = False
        while True:
            event = await _next_event(job, events)
            if event.token_ids:
                if not heard:
                    heard = True
                    self._first_token(job, dispatch)
                yield answer.take(event)
            if event.published_tokens:
                self._handle(PrefillProgress(job.request_id, event.published_tokens))
            match event.finish_reason:
                case None:
                    continue
                case FinishReason.HANDOFF if not (answer.exhausted or job.cancel_asked):
                    answer.handed_off(event)
                    self.stats.handoffs += 1
                    self._handle(HandoffDone(job.request_id, answer.total_tokens))
                    return
                case FinishReason.HANDOFF:
                    job.ending = RequestFinished(job.request_id)
                    answer.handed_off(event)
                    yield answer.finish_early(event.node_id)
                    return
                case FinishReason.CANCELLED if not job.cancel_asked:
                    raise TransportError(f"node {dispatch.node_id} dropped the request")
                case _:
                    job.ending = RequestFinished(job.request_id)
                    yield answer.finish(event)
                    return

    def _first_token(self, job: Job, dispatch: Dispatch) -> None:
        self.stats.record_first_token(dispatch, self._clock.now())
        self._handle(FirstToken(job.request_id))

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
                self._prefetch(job, instruction)
            else:
                job.todo = instruction
                job.woken.set()

    def _prefetch(self, job: Job, prefetch: Prefetch) -> None:
        """Ask a node to load ahead, behind everything else; one such question per request."""
        if job.prefetching is None or job.prefetching.done():
            job.prefetching = asyncio.create_task(
                self._ask_prefetch(job.answer.ahead(prefetch), prefetch), name="scheduler-prefetch"
            )
            self._prefetching.add(job.prefetching)
            job.prefetching.add_done_callback(self._prefetching.discard)

    async def _ask_prefetch(self, request: GenerateRequest, prefetch: Prefetch) -> None:
        try:
            client = self.view.client(prefetch.node_id, prefetch.incarnation)
            await client.prefetch(request)
            self.stats.prefetches += 1
        except CacheError as error:
            self.stats.cache_errors[error.code] += 1
        except TierKVError as error:
            log.debug("%s could not load ahead: %s", prefetch.node_id, error)

    # -- the directory

    async def _locate(self, job: Job) -> ChainLocated:
        """Ask where the prompt's blocks are; whatever goes wrong means nowhere."""
        request = job.answer.request
        layout = self._layout(job.wanted)
        if self._meta is None or layout is None or self._directory_is_off():
            return ChainLocated(job.request_id)
        keys = block_keys(
            request.namespace_key, request.token_ids, block_tokens=layout.block_tokens
        )
        self.stats.located += 1
        try:
            async with asyncio.timeout(self.config.locate_timeout_s):
                chain = keys[: limits.MAX_CHAIN_BLOCKS]
                reply = await self._meta.locate(chain, max_replicas=0)
        except TimeoutError:
            self._directory_failed("directory_unavailable")
        except CacheError as error:
            self._directory_failed(error.code)
        else:
            return located(job.request_id, reply)
        return ChainLocated(job.request_id)

    async def namespace(self, tenant: str, model: ModelInfo) -> NamespaceGrant:
        """Return the hash key of a tenant's blocks of a model (cached).

        While the directory is away an expired grant stays good; a tenant never seen before gets
        a key only this process knows, so that it shares with nobody by mistake.
        """
        fingerprint = model.layout.fingerprint()
        key = (tenant, model.revision, fingerprint)
        cached = self._grants.get(key)
        now = self._clock.now()
        if cached is not None and now < cached[0]:
            return cached[1]
        if self._meta is not None and not self._directory_is_off():
            try:
                async with asyncio.timeout(REFRESH_TIMEOUT_S):
                    grant = await self._meta.resolve_namespace(
                        tenant, model_revision=model.revision, layout_fingerprint=fingerprint
                    )
            except TimeoutError:
                self._directory_failed("directory_unavailable")
            except CacheError as error:
                self._directory_failed(error.code)
            else:
                if len(self._grants) >= limits.MAX_NODES:
                    self._grants.clear()
                self._grants[key] = (now + self.config.namespace_ttl_s, grant)
                return grant
        return cached[1] if cached is not None else self._own_grant(tenant, model)

    def _own_grant(self, tenant: str, model: ModelInfo) -> NamespaceGrant:
        key = namespace_key(
            self._own_secret,
            tenant=tenant,
            model_revision=model.revision,
            layout_fingerprint=model.layout.fingerprint(),
        )
        return NamespaceGrant(key, domain=tenant, cache_enabled=True)

    def _directory_is_off(self) -> bool:
        return self._clock.now() < self._directory_off_until_s

    def _directory_failed(self, kind: str) -> None:
        self.stats.cache_errors[kind] += 1
        self._directory_off_until_s = self._clock.now() + self.config.directory_backoff_s

    # -- what others read

    def models(self) -> tuple[ModelInfo, ...]:
        """Models that live nodes serve, by name."""
        return self.state.models()

    def _layout(self, wanted: WantedModel) -> BlockLayout | None:
        if wanted.layout is not None:
            return wanted.layout
        return next((m.layout for m in self.models() if wanted.matches(m)), None)

    def snapshot(self) -> SchedulerStats:
        """Counters for the views and /metrics."""
        records = self.state.fleet.records.values()
        return SchedulerStats(
            arrived=self.state.arrived,
            live=len(self.state.requests),
            finished=self.state.ended[Phase.FINISHED],
            failed=self.state.ended[Phase.FAILED],
            cancelled=self.state.ended[Phase.CANCELLED],
            dispatched=self.stats.dispatched,
            resent=self.stats.resent,
            handoffs=self.stats.handoffs,
            located=self.stats.located,
            prefetches=self.stats.prefetches,
            nodes_alive=sum(r.state == "alive" for r in records),
            nodes_suspended=sum(r.failures > 0 for r in records),
            cache_errors=tuple(sorted(self.stats.cache_errors.items())),
        )


def _wanted(request: GenerateRequest, model: ModelInfo | None) -> WantedModel:
    if model is None:
        return WantedModel(request.model)
    return WantedModel(model.name, model.revision, model.layout)


async def _next_event(job: Job, events: AsyncIterator[GenerateEvent]) -> GenerateEvent:
    """Wait for the node's next event, unless the node's life ends first."""
    if job.abandoned:
        raise TransportError("the node's life ended")
    try:
        async with asyncio.timeout(None) as job.timer:
            return await anext(events)
    except TimeoutError:
        raise TransportError("the node's life ended") from None
    except asyncio.CancelledError:
        # grpc raises this too when its channel is closed; only our own task's end is an end.
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise TransportError("the connection to the node was closed") from None
    except StopAsyncIteration:
        raise TransportError("the node's stream ended without a last event") from None
    finally:
        job.timer = None


async def _close(events: AsyncIterator[GenerateEvent]) -> None:
    """Close a node's stream, which cancels the request there if it has not ended."""
    close = getattr(events, "aclose", None)
    if close is not None:
        await close()
