"""The shell's side of one request: next instruction, current node, and answer.

Used by scheduler/dispatcher.py only. This module also translates a directory's reply into block
counts, and a Fail into the error for the caller. The answer is assembled from all nodes that worked
on the request: no token is lost or counted twice, and one usage covers the whole answer.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from hashlib import blake2b
from typing import Final

from tierkv.compute.client import ComputeClient
from tierkv.costing.node_cost import NOTHING_CACHED, CachedPrefix
from tierkv.kvcore.block_event import NO_LEASE
from tierkv.kvcore.errors import NodeLostError, NoNodeError, OverloadedError, RetryableError
from tierkv.kvcore.ids import NodeId, RequestId
from tierkv.kvcore.request import (
    FinishReason,
    GenerateEvent,
    GenerateRequest,
    HitTokens,
    SamplingParams,
    Usage,
)
from tierkv.metaserver.client import LocateReply
from tierkv.scheduler.events import (
    ChainLocated,
    Dispatch,
    Event,
    Fail,
    Failure,
    Instruction,
    Prefetch,
    RequestCancelled,
    Stage,
    WantedModel,
)


class AnswerSoFar:
    """The answer of a request so far.

    Attributes:
        request: the request as it arrived, except for a drawn seed.
        tokens: all tokens generated and passed on.
    """

    def __init__(self, request: GenerateRequest) -> None:
        self.request = _with_seed(request)
        self.tokens: list[int] = []
        self._prefill: GenerateEvent | None = None
        self._written_tokens = 0

    @property
    def total_tokens(self) -> int:
        """Prompt and generated tokens."""
        return len(self.request.token_ids) + len(self.tokens)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the original prompt."""
        return len(self.request.token_ids) - self.request.resumed_tokens

    @property
    def completion_tokens(self) -> int:
        """Generated tokens, including tokens generated before the request came here."""
        return self.request.resumed_tokens + len(self.tokens)

    @property
    def exhausted(self) -> bool:
        """Return whether ``max_tokens`` tokens exist and no node needs to generate more."""
        return self.completion_tokens >= self.request.sampling.max_tokens

    def part(self, dispatch: Dispatch) -> GenerateRequest:
        """Make the request for the next node: the prompt and the tokens generated so far.

        Each later send has a separate id, because a node may still hold an earlier send.
        """
        request = self.request
        first = dispatch.attempt == 1 and dispatch.stage is not Stage.PREFILL
        if first and not self.tokens and not request.handoff:
            return request  # As it arrived.
        suffix = "" if dispatch.attempt == 1 else f":{dispatch.attempt}"
        return replace(
            request,
            request_id=RequestId(request.request_id + suffix),
            token_ids=request.token_ids + tuple(self.tokens),
            resumed_tokens=self.completion_tokens,
            handoff=dispatch.stage is Stage.PREFILL,
        )

    def ahead(self, prefetch: Prefetch) -> GenerateRequest:
        """Make the request to load the prompt's first tokens; no token has to be computed."""
        request = self.request
        tokens = (request.token_ids + tuple(self.tokens))[: prefetch.tokens + 1]
        return replace(
            request,
            request_id=RequestId(f"{request.request_id}:ahead"),
            token_ids=tokens,
            sampling=SamplingParams(max_tokens=1),
            resumed_tokens=1,
            handoff=False,
            guide="",
            score_token_ids=(),
            embed=False,
        )

    def take(self, event: GenerateEvent) -> GenerateEvent:
        """Keep an event's tokens; return the tokens as an event without an end."""
        self.tokens.extend(event.token_ids)
        return GenerateEvent(
            token_ids=event.token_ids, node_id=event.node_id, logprobs=event.logprobs
        )

    def handed_off(self, event: GenerateEvent) -> None:
        """Keep the usage of the prefill stage; its hits and ttft hold for the whole answer."""
        if self._prefill is None:
            self._prefill = event
        if event.usage is not None:
            self._written_tokens += event.usage.written_tokens

    def finish(self, event: GenerateEvent) -> GenerateEvent:
        """Turn a node's last event, its tokens taken already, into the answer's last event."""
        first = self._prefill or event
        usage = event.usage or Usage(self.prompt_tokens, self.completion_tokens)
        reused = first.usage or usage
        if usage.counted_there:
            return replace(event, token_ids=(), logprobs=())
        whole = self._whole(usage, reused)
        return replace(
            event,
            token_ids=(),
            logprobs=(),
            usage=whole,
            queue_s=first.queue_s,
            ttft_s=first.ttft_s,
        )

    def _whole(self, usage: Usage, reused: Usage) -> Usage:
        """Combine the usage of all stages; most answers have only one stage."""
        prompt_tokens = self.prompt_tokens
        completion_tokens = max(usage.completion_tokens, self.completion_tokens)
        if (
            usage is reused
            and not self._written_tokens
            and usage.prompt_tokens == prompt_tokens
            and usage.completion_tokens == completion_tokens
            and usage.hit_tokens.total <= prompt_tokens
        ):
            return usage
        return replace(
            reused,
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            hit_tokens=_capped(reused.hit_tokens, prompt_tokens),
            written_tokens=usage.written_tokens + self._written_tokens,
        )

    def finish_early(self, node_id: str) -> GenerateEvent:
        """End a complete or cancelled answer although the last node sent no end.

        The answer has all tokens, or the caller cancelled the request.
        """
        reason = FinishReason.LENGTH if self.exhausted else FinishReason.CANCELLED
        return self.finish(GenerateEvent(finish_reason=reason, node_id=node_id))


def _with_seed(request: GenerateRequest) -> GenerateRequest:
    """Draw the seed of a sampled answer here, so a second node continues the same draw.

    The seed is derived from the request id, which is unique and random; greedy answers need no
    seed.
    """
    if request.sampling.temperature == 0.0 or request.sampling.seed is not None:
        return request
    digest = blake2b(request.request_id.encode(), digest_size=7).digest()
    seed = int.from_bytes(digest, "little")
    return replace(request, sampling=replace(request.sampling, seed=seed))


def _capped(hits: HitTokens, prompt_tokens: int) -> HitTokens:
    """Cap hits at the prompt, farthest tier first: a resumed stage also hits generated tokens."""
    excess = hits.total - prompt_tokens
    kept = [hits.l1, hits.l2, hits.l3, hits.l4]
    for tier in (3, 2, 1, 0):
        cut = min(max(excess, 0), kept[tier])
        kept[tier] -= cut
        excess -= cut
    return HitTokens(*kept)


_ERRORS: dict[Failure, type[RetryableError]] = {
    Failure.OVERLOADED: OverloadedError,
    Failure.NO_NODE: NoNodeError,
    Failure.NODE_LOST: NodeLostError,
}


class Job:
    """The shell's side of one live request.

    Attributes:
        answer: tokens generated so far.
        wanted: the model, weights and layout.
        todo: the newest instruction for the request, not carried out yet.
        woken: set when ``todo`` changes while the request waits.
        client: the current node's client, and the request's id at this node.
        timer: interrupts the wait for the directory or for the node's next event.
        abandoned: the node's incarnation ended.
        prefetching: the task of the last prefetch; None before the first.
        lease: lease on the located blocks of the prompt; NO_LEASE: nothing is leased.
        cancel_asked: the caller asked for an early end by ``Dispatcher.cancel``.
        dropped: ignore all further events of the node.
        ending: the event for the state when the caller's iterator closes.
    """

    def __init__(self, request: GenerateRequest, wanted: WantedModel) -> None:
        self.answer = AnswerSoFar(request)
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
        """Return the request's own id."""
        return self.answer.request.request_id

    def abandon(self) -> None:
        """Stop waiting for the node: its incarnation ended."""
        self.abandoned = True
        self.interrupt()

    def drop(self) -> None:
        """Stop waiting for the node: the caller cancelled, and the node did not end the request."""
        self.dropped = True
        self.interrupt()

    def interrupt(self) -> None:
        """End any wait in progress."""
        self.woken.set()
        if self.timer is not None and not self.timer.expired():
            self.timer.reschedule(asyncio.get_running_loop().time())


def located(request_id: RequestId, reply: LocateReply) -> ChainLocated:
    """Reduce the directory's reply to counts of blocks."""
    near: dict[NodeId, CachedPrefix] = {
        c.node_id: CachedPrefix(c.l1_blocks, c.l2_blocks) for c in reply.coverage
    }
    pool = (
        CachedPrefix(l3_blocks=reply.memory_blocks, l4_blocks=reply.prefix_blocks)
        if reply.prefix_blocks
        else NOTHING_CACHED
    )
    return ChainLocated(request_id, near, pool)


_NO_NODE_HINT: Final = (
    "Try again later, start a compute node with {}, or name another model: tierkv.nodes shows "
    "which nodes are alive, and what they serve."
)


def failure(fail: Fail, wanted: WantedModel) -> RetryableError:
    """Make the error for the caller when the scheduler gives up."""
    hint = "Try again later; see tierkv status."
    match fail.failure:
        case Failure.OVERLOADED:
            message = f"too many requests: {fail.reason}"
            after = f"after {fail.retry_after_s:.1f} s" if fail.retry_after_s >= 1 else "soon"
            hint = f"Try again {after}; view tierkv.queue shows the waiting requests."
        case Failure.NO_NODE:
            message = f"no live node can serve model {wanted.name}: {fail.reason}"
            hint = _NO_NODE_HINT.format(wanted.name)
        case Failure.NODE_LOST:
            message = (
                f"the node of model {wanted.name} was lost and could not be replaced: {fail.reason}"
            )
            hint = _NO_NODE_HINT.format(wanted.name)
    retry_after_ms = math.ceil(fail.retry_after_s * 1_000)
    return _ERRORS[fail.failure](message, hint=hint, retry_after_ms=retry_after_ms)
