"""Runs stages of requests on nodes, and keeps the leases of requests.

Used by scheduler/dispatcher.py. A node's messages become events of scheduler/requests/state.py and
tokens of the answer; a lost node becomes a NodeLost event, whatever the node had sent before.
Leases are extended while requests wait and ended in the background: no request waits for the
directory. A lease whose end does not reach the directory expires.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import suppress

from tierkv.kvcore.block_event import NO_LEASE, LeaseId
from tierkv.kvcore.clock import Clock
from tierkv.kvcore.errors import CacheError, OverloadedError, TransportError
from tierkv.kvcore.request import FinishReason, GenerateEvent
from tierkv.scheduler.directory_client import DirectoryClient
from tierkv.scheduler.events import (
    Dispatch,
    Event,
    FirstToken,
    HandoffDone,
    NodeLost,
    NodeRefused,
    PrefillProgress,
    RequestFinished,
)
from tierkv.scheduler.nodes.cluster_view import ClusterView
from tierkv.scheduler.requests.job import Job
from tierkv.scheduler.routing_stats import RoutingStats

QUESTIONS_AT_ONCE = 16
MAX_ENDINGS = 10_000
"""Pending ends of leases; beyond this number the oldest leases are left to expire."""


class RequestLeases:
    """The live leases of one dispatcher's requests."""

    def __init__(self, directory: DirectoryClient, stats: RoutingStats, *, lease_s: float) -> None:
        self._directory = directory
        self._stats = stats
        self._lease_s = lease_s
        self._live: set[LeaseId] = set()
        self._endings: deque[tuple[LeaseId, bool]] = deque(maxlen=MAX_ENDINGS)
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._stopped = False

    def __len__(self) -> int:
        return len(self._live)

    def keep(self, lease: LeaseId) -> None:
        """Extend a lease periodically until it is ended."""
        if lease == NO_LEASE or self._stopped:
            return
        self._stats.leases_reserved += 1
        self._live.add(lease)
        if self._task is None:
            self._task = asyncio.create_task(self._work(), name="scheduler-leases")

    def commit(self, lease: LeaseId) -> None:
        """End a lease whose blocks are being read: the node itself now holds the blocks."""
        if lease in self._live:
            self._stats.leases_committed += 1
            self._end(lease, used=True)

    def abort(self, lease: LeaseId) -> None:
        """End a lease whose blocks are no longer needed."""
        if lease in self._live:
            self._stats.leases_aborted += 1
            self._end(lease, used=False)

    def _end(self, lease: LeaseId, *, used: bool) -> None:
        self._live.discard(lease)
        self._endings.append((lease, used))
        self._wake.set()

    async def stop(self, *, timeout_s: float) -> None:
        """Abort all live leases within ``timeout_s``; leases not ended in time expire."""
        self._stopped = True
        for lease in tuple(self._live):
            self.abort(lease)
        if self._task is None:
            return
        task, self._task = self._task, None
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._tell_endings()

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()
        due_s = loop.time() + self._lease_s / 3
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout_at(due_s):
                    await self._wake.wait()
            self._wake.clear()
            await self._tell_endings()
            if loop.time() >= due_s:
                await self._prolong()
                due_s = loop.time() + self._lease_s / 3

    async def _tell_endings(self) -> None:
        while self._endings:
            count = min(len(self._endings), QUESTIONS_AT_ONCE)
            some = [self._endings.popleft() for _ in range(count)]
            told = await asyncio.gather(
                *(self._directory.end_lease(lease, used=used) for lease, used in some)
            )
            self._stats.leases_lost += told.count(False)

    async def _prolong(self) -> None:
        leases = list(self._live)
        for start in range(0, len(leases), QUESTIONS_AT_ONCE):
            some = leases[start : start + QUESTIONS_AT_ONCE]
            known = await asyncio.gather(
                *(self._directory.extend_lease(lease, ttl_s=self._lease_s) for lease in some)
            )
            for lease, is_known in zip(some, known, strict=True):
                if not is_known and lease in self._live:
                    self._live.discard(lease)
                    self._stats.leases_lost += 1


log = logging.getLogger("tierkv.scheduler")


class StageRunner:
    """Runs stages at nodes, for all requests of one dispatcher."""

    def __init__(
        self,
        view: ClusterView,
        *,
        stats: RoutingStats,
        leases: RequestLeases,
        clock: Clock,
        handle: Callable[[Event], None],
    ) -> None:
        """Make a runner.

        Args:
            view: connections to the nodes.
            stats: counts losses, handoffs and first tokens.
            leases: a request's lease ends here when the node has the blocks.
            clock: source of ``now``.
            handle: passes an event to the state and carries out the returned instructions.
        """
        self._view = view
        self._stats = stats
        self._leases = leases
        self._clock = clock
        self._handle = handle

    async def run(self, job: Job, dispatch: Dispatch) -> AsyncGenerator[GenerateEvent, None]:
        """Stream a node's events until the stage is done, or the node refuses or is lost."""
        job.abandoned = False
        try:
            client = self._view.client(dispatch.node_id, dispatch.incarnation)
            part = job.answer.part(dispatch)
            job.client = (client, part.request_id)
            events = client.generate(part)
            heard = False
            try:
                while (event := await _next_event(job, events)) is not None:
                    if not heard and (event.token_ids or event.scores or event.embedding):
                        heard = True
                        self._first_token(job, dispatch)
                    if event.token_ids:
                        yield job.answer.take(event)
                    if event.published_tokens:
                        self._handle(PrefillProgress(job.request_id, event.published_tokens))
                    if event.finish_reason is not None:
                        last = self._stage_ended(job, dispatch, event)
                        if last is not None:
                            yield last
                        return
                job.ending = RequestFinished(job.request_id)
                yield job.answer.finish_early(dispatch.node_id)
            finally:
                await _close(events)
        except OverloadedError:
            self._handle(NodeRefused(job.request_id))
        except CacheError as error:
            self._stats.cache_errors[error.code] += 1
            log.warning("%s lost node %s: %s", job.request_id, dispatch.node_id, error)
            if job.answer.exhausted or job.cancel_asked:
                job.ending = RequestFinished(job.request_id)
                yield job.answer.finish_early(dispatch.node_id)
            else:
                self._handle(NodeLost(job.request_id, job.answer.total_tokens))
        finally:
            job.client = None

    def _stage_ended(
        self, job: Job, dispatch: Dispatch, event: GenerateEvent
    ) -> GenerateEvent | None:
        """Process a node's last event; return the answer's last event; None if a stage follows.

        Raises:
            TransportError: the node cancelled the request without a cancel from the caller.
        """
        answer = job.answer
        match event.finish_reason:
            case FinishReason.HANDOFF if not (answer.exhausted or job.cancel_asked):
                answer.handed_off(event)
                self._stats.handoffs += 1
                self._handle(HandoffDone(job.request_id, answer.total_tokens))
                return None
            case FinishReason.HANDOFF:
                job.ending = RequestFinished(job.request_id)
                answer.handed_off(event)
                return answer.finish_early(event.node_id)
            case FinishReason.CANCELLED if not job.cancel_asked:
                raise TransportError(f"node {dispatch.node_id} dropped the request")
            case _:
                job.ending = RequestFinished(job.request_id)
                return answer.finish(event)

    def _first_token(self, job: Job, dispatch: Dispatch) -> None:
        self._leases.commit(job.lease)
        self._stats.record_first_token(dispatch, self._clock.now())
        self._handle(FirstToken(job.request_id))


async def _next_event(job: Job, events: AsyncIterator[GenerateEvent]) -> GenerateEvent | None:
    """Wait for the node's next event; None if the caller drops the node first."""
    if job.dropped or job.abandoned:
        _check_abandoned(job)
        return None
    try:
        async with asyncio.timeout(None) as job.timer:
            return await anext(events)
    except TimeoutError:
        _check_abandoned(job)
        return None
    except asyncio.CancelledError:
        # grpc raises this too when its channel is closed; only a cancellation of our own task is
        # real.
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise TransportError("the connection to the node was closed") from None
    except StopAsyncIteration:
        raise TransportError("the node's stream ended before the last event") from None
    finally:
        job.timer = None


def _check_abandoned(job: Job) -> None:
    """Raise if the wait ended because of the node, not because of the caller."""
    if not job.dropped:
        raise TransportError("the node stopped or was restarted") from None


async def _close(events: AsyncIterator[GenerateEvent]) -> None:
    """Close a node's stream, which cancels a request still running on the node."""
    close = getattr(events, "aclose", None)
    if close is not None:
        await close()
