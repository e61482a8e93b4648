"""Listening to one node while it runs one stage of a request.

Used by scheduler/dispatcher.py. What a node says becomes events of scheduler/requests/state.py and
tokens of the answer; a node that is lost is a NodeLost event, whatever it had said before.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable

from tierkv.kvcore.clock import Clock
from tierkv.kvcore.errors import CacheError, OverloadedError, TransportError
from tierkv.kvcore.request import FinishReason, GenerateEvent
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
from tierkv.scheduler.requests.request_leases import RequestLeases
from tierkv.scheduler.routing_stats import RoutingStats

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
            stats: where losses, handoffs and first tokens are counted.
            leases: where a request's lease ends when its node has the blocks.
            clock: where ``now`` comes from.
            handle: takes what happened to the state, and carries out what it answers.
        """
        self._view = view
        self._stats = stats
        self._leases = leases
        self._clock = clock
        self._handle = handle

    async def run(self, job: Job, dispatch: Dispatch) -> AsyncGenerator[GenerateEvent, None]:
        """Listen to one node until it has done its stage, refuses, or is lost."""
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
        """Take in a node's last event; return the answer's last one, None when others go on.

        Raises:
            TransportError: the node ended what nobody had asked it to end.
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
    """Wait for the node's next event, unless its life ends or the caller drops it (None) first."""
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
        # grpc raises this too when its channel is closed; only our own task's end is an end.
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise TransportError("the connection to the node was closed") from None
    except StopAsyncIteration:
        raise TransportError("the node's stream ended without a last event") from None
    finally:
        job.timer = None


def _check_abandoned(job: Job) -> None:
    """Tell a node's end from a caller's wish."""
    if not job.dropped:
        raise TransportError("the node's life ended") from None


async def _close(events: AsyncIterator[GenerateEvent]) -> None:
    """Close a node's stream, which cancels the request there if it has not ended."""
    close = getattr(events, "aclose", None)
    if close is not None:
        await close()
