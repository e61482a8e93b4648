"""Questions about a prompt without free text: the most likely label, or the embedding.

dbfront/generation/generation.py calls this module and streams the result. A label may need several
requests in sequence; each request repeats the prompt, so all but the first find the prompt in the
cache. An engine without token probabilities is constrained to the labels by a JSON schema instead;
the answered label gets probability 1.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace

from tierkv.dbfront.contracts import PreparedCall, TextCall
from tierkv.dbfront.generation.labels import LabelWalk
from tierkv.kvcore.errors import NodeLostError, RowLevelError
from tierkv.kvcore.ids import NodeId, RequestId
from tierkv.kvcore.node import PreferredNode
from tierkv.kvcore.request import FinishReason, GenerateEvent, GenerateRequest, Usage

_AROUND = 8
"""Tokens in addition to the label's own bytes: quotes, an end, a space."""

_SHOWN_CHARS = 80


def label_schema(labels: tuple[str, ...]) -> str:
    """Return the JSON Schema for an answer equal to one of the labels."""
    schema = {"type": "string", "enum": [label.strip() for label in labels]}
    return json.dumps(schema, separators=(",", ":"), ensure_ascii=False)


def most_label_tokens(call: TextCall) -> int:
    """Return the maximum tokens of an answer; a token has at least one byte."""
    return _AROUND + max(len(json.dumps(label).encode()) for label in call.labels)


def read_label(text: str, labels: tuple[str, ...], *, cut: bool = False) -> int:
    """Return the index of the answered label; an engine that ignores the schema may omit quotes.

    Raises:
        RowLevelError: the answer equals no label, or was cut off and may have become another label.
    """
    said = "" if cut else _said(text)
    exact = [number for number, label in enumerate(labels) if label.strip() == said]
    plain = said.strip(" \t\r\n.\"'").casefold()
    alike = [number for number, label in enumerate(labels) if label.strip().casefold() == plain]
    for found in (exact, alike):
        if found:
            return found[0]
    raise RowLevelError(
        f"the model answered {text[:_SHOWN_CHARS]!r}, which is none of the labels",
        hint="The engine must support response_format with a JSON schema.",
    )


def _said(text: str) -> str:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text.strip()
    return value if isinstance(value, str) else text.strip()


Submit = Callable[[GenerateRequest, PreferredNode | None], AsyncGenerator[GenerateEvent, None]]
"""Sends a request, preferably to the given node; yields its events."""


async def read_out(prepared: PreparedCall, submit: Submit) -> GenerateEvent:
    """Ask one question about a prompt; the last event has the answer, unless cancelled."""
    return await _last_event(prepared.request, prepared.preferred_node, submit)


async def walk_labels(prepared: PreparedCall, walk: LabelWalk, submit: Submit) -> GenerateEvent:
    """Ask until ``walk`` knows the most likely label.

    Returns:
        last: the last request's event, with the usage of all requests. The prompt is counted once,
            with the hit tokens of the first request. The reason is FinishReason.CANCELLED if a
            request was cancelled.
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
        if last.node_id:  # The node has the prompt in its cache now.
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
    raise NodeLostError("the answer ended without an end")  # The dispatcher prevents this case.


def _sum(before: Usage | None, more: Usage | None, prompt_tokens: int) -> Usage:
    """Add a step's usage; label tokens after the prompt are not counted."""
    usage = more or Usage(prompt_tokens, 0)
    if before is not None:
        written = before.written_tokens + usage.written_tokens
        return replace(before, written_tokens=written)
    return replace(usage, prompt_tokens=prompt_tokens)
