"""The shell's side of one request: what is to be done next, and whom it is listening to.

Used by scheduler/dispatcher.py only. Also the translations at its edges: a directory's answer into
block counts, a decision to give up into the error a caller sees.
"""

from __future__ import annotations

import asyncio
import math

from tierkv.compute.client import ComputeClient
from tierkv.kvcore.errors import NodeLostError, NoNodeError, OverloadedError, RetryableError
from tierkv.kvcore.hold import NO_LEASE
from tierkv.kvcore.ids import NodeId, RequestId
from tierkv.kvcore.request import GenerateRequest
from tierkv.metaserver.client import LocateReply
from tierkv.scheduler.cost import NOTHING_CACHED, CachedPrefix
from tierkv.scheduler.events import (
    ChainLocated,
    Event,
    Fail,
    Failure,
    Instruction,
    RequestCancelled,
    WantedModel,
)
from tierkv.scheduler.requests.answer import Answer

_ERRORS: dict[Failure, type[RetryableError]] = {
    Failure.OVERLOADED: OverloadedError,
    Failure.NO_NODE: NoNodeError,
    Failure.NODE_LOST: NodeLostError,
}


class Job:
    """The shell's side of one live request.

    Attributes:
        answer: what was generated so far.
        wanted: which model, weights and layout.
        todo: the newest instruction about it that was not carried out yet.
        woken: set when ``todo`` changes while the request waits.
        client: the node that is being listened to, and under which id it knows the request.
        timer: interrupts the wait for the directory or for the node's next event.
        abandoned: the node's life ended.
        prefetching: the question to a node to load ahead; None before the first.
        lease: keeps the prompt's blocks where they were found; NO_LEASE: nothing is kept.
        cancel_asked: the caller asked for an early end by ``Dispatcher.cancel``.
        dropped: the node is not to be listened to any more, whatever it says.
        ending: what the state will be told when the caller's iterator closes.
    """

    def __init__(self, request: GenerateRequest, wanted: WantedModel) -> None:
        self.answer = Answer(request)
        self.wanted = wanted
        self.todo: Instruction | None = None
        self.woken = asyncio.Event()
        self.client: tuple[ComputeClient, RequestId] | None = None
        self.timer: asyncio.Timeout | None = None
        self.abandoned = False
        self.prefetching: asyncio.Task[None] | None = None
        self.lease = NO_LEASE
        self.cancel_asked = False
        self.dropped = False
        self.ending: Event = RequestCancelled(request.request_id)

    @property
    def request_id(self) -> RequestId:
        """The request's own id."""
        return self.answer.request.request_id

    def abandon(self) -> None:
        """Stop waiting for the node: its life ended."""
        self.abandoned = True
        self.interrupt()

    def drop(self) -> None:
        """Stop waiting for the node: the caller wants no more, and the node did not end it."""
        self.dropped = True
        self.interrupt()

    def interrupt(self) -> None:
        """End whatever wait is going on."""
        self.woken.set()
        if self.timer is not None and not self.timer.expired():
            self.timer.reschedule(asyncio.get_running_loop().time())


def located(request_id: RequestId, reply: LocateReply) -> ChainLocated:
    """Reduce the directory's answer to counts of blocks."""
    near: dict[NodeId, CachedPrefix] = {
        c.node_id: CachedPrefix(c.l1_blocks, c.l2_blocks) for c in reply.coverage
    }
    pool = (
        CachedPrefix(l3_blocks=reply.memory_blocks, l4_blocks=reply.prefix_blocks)
        if reply.prefix_blocks
        else NOTHING_CACHED
    )
    return ChainLocated(request_id, near, pool)


def failure(fail: Fail, wanted: WantedModel) -> RetryableError:
    """Make the error a caller sees when the scheduler gives up."""
    hint = "try again later; see tierkv status"
    match fail.failure:
        case Failure.OVERLOADED:
            message = f"too many requests: {fail.reason}"
            after = f"after {fail.retry_after_s:.1f} s" if fail.retry_after_s >= 1 else "soon"
            hint = f"try again {after}; tierkv.queue shows who waits"
        case Failure.NO_NODE:
            message = f"no live node can serve model {wanted.name}: {fail.reason}"
        case Failure.NODE_LOST:
            message = f"the node that answered was lost and could not be replaced: {fail.reason}"
    retry_after_ms = math.ceil(fail.retry_after_s * 1_000)
    return _ERRORS[fail.failure](message, hint=hint, retry_after_ms=retry_after_ms)
