"""Putting questions about a prompt to the scheduler: its likeliest label, its embedding.

Used by dbfront/generation/generation.py, which streams and accounts for what comes of it. A label
may take several requests, one after the other: the same prompt and the tokens walked so far, so
that all but the first find the prompt in the cache.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace

from tierkv.dbfront.contracts import PreparedCall
from tierkv.dbfront.generation.label_trie import LabelWalk
from tierkv.kvcore.errors import NodeLostError
from tierkv.kvcore.ids import NodeId, RequestId
from tierkv.kvcore.preferred_node import PreferredNode
from tierkv.kvcore.request import FinishReason, GenerateEvent, GenerateRequest, Usage

Submit = Callable[[GenerateRequest, PreferredNode | None], AsyncGenerator[GenerateEvent, None]]
"""Sends a request, preferably to a node; yields its events."""


async def read_out(prepared: PreparedCall, submit: Submit) -> GenerateEvent:
    """Ask one question about a prompt; the last event has the answer, unless it was cancelled."""
    return await _last_event(prepared.request, prepared.preferred_node, submit)


async def walk_labels(prepared: PreparedCall, walk: LabelWalk, submit: Submit) -> GenerateEvent:
    """Ask until the likeliest label is known; ``walk`` knows it then.

    Returns:
        last: of the last request, with the usage of all of them: the prompt counts once, with the
        hit tokens of the first; FinishReason.CANCELLED when one was cancelled.
    """
    node, usage, steps = prepared.preferred_node, None, 0
    last = GenerateEvent(finish_reason=FinishReason.STOP, usage=Usage(0, 0))
    while (question := walk.question) is not None:
        request = replace(
            prepared.request,
            request_id=_step_id(prepared.request.request_id, steps),
            token_ids=prepared.request.token_ids + question.prefix,
            score_token_ids=question.token_ids,
        )
        last = await _last_event(request, node, submit)
        usage, steps = _sum(usage, last.usage, len(prepared.request.token_ids)), steps + 1
        last = replace(last, usage=usage)
        if last.finish_reason is FinishReason.CANCELLED:
            return last
        walk.answer(last.scores)
        if last.node_id:  # It has the prompt now.
            node = PreferredNode(NodeId(last.node_id), len(prepared.request.token_ids))
    return last


def _step_id(request_id: RequestId, step: int) -> RequestId:
    return request_id if step == 0 else RequestId(f"{request_id}:label{step}")


async def _last_event(
    request: GenerateRequest, node: PreferredNode | None, submit: Submit
) -> GenerateEvent:
    async with aclosing(submit(request, node)) as events:
        async for event in events:
            if event.finish_reason is not None:
                return event
    raise NodeLostError("the answer ended without an end")  # the dispatcher never lets this be


def _sum(before: Usage | None, more: Usage | None, prompt_tokens: int) -> Usage:
    """Add a step's usage; tokens of labels behind the prompt are not counted."""
    usage = more or Usage(prompt_tokens, 0)
    if before is not None:
        written = before.written_tokens + usage.written_tokens
        return replace(before, written_tokens=written)
    return replace(usage, prompt_tokens=prompt_tokens)
