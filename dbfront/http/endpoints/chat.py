"""POST /v1/chat/completions: a conversation in, a message out, whole or streamed.

Shapes follow what openai-python depends on: a chunk of its own for the finish reason, and one for
the usage when it was asked for.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from tierkv.dbfront.contracts import PreparedCall, TextAnswer
from tierkv.dbfront.http.schema import ChatBody, read_body, usage_json
from tierkv.dbfront.http.services import Services, tenant_of, until_disconnect
from tierkv.dbfront.http.sse import open_stream


def chat_router(services: Services) -> APIRouter:
    """Make the endpoint."""
    router = APIRouter()

    @router.post("/v1/chat/completions", summary="A conversation in, a message out")
    async def chat_completions(request: Request) -> Response:
        body = await read_body(request, ChatBody)
        call = body.to_call(tenant_of(request), services.config.default_temperature)
        prepared = await services.generator.prepare(call)
        envelope = _envelope(services, prepared)
        if body.stream:
            chunks = _chunks(services, prepared, envelope, include_usage=body.include_usage)
            return await open_stream(services, chunks)
        answer = await until_disconnect(request, services.generator.answer(prepared))
        return JSONResponse(_whole(answer, envelope))

    return router


def _envelope(services: Services, prepared: PreparedCall) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{prepared.request.request_id}",
        "created": services.created(),
        "model": prepared.model.name,
        "system_fingerprint": f"fp_{prepared.model.revision[:12]}",
    }


def _whole(answer: TextAnswer, envelope: dict[str, Any]) -> dict[str, Any]:
    message = {"role": "assistant", "content": answer.text, "refusal": None}
    choice = {
        "index": 0,
        "message": message,
        "logprobs": None,
        "finish_reason": answer.finish_reason.value,
    }
    usage = usage_json([answer.usage])
    return {**envelope, "object": "chat.completion", "choices": [choice], "usage": usage}


async def _chunks(
    services: Services, prepared: PreparedCall, envelope: dict[str, Any], *, include_usage: bool
) -> AsyncGenerator[Mapping[str, Any], None]:
    base = {**envelope, "object": "chat.completion.chunk"}
    if include_usage:
        base["usage"] = None

    def chunk(delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
        choice = {
            "index": 0,
            "delta": delta,
            "logprobs": None,
            "finish_reason": finish_reason,
        }
        return {**base, "choices": [choice]}

    begun = False
    async with aclosing(services.generator.stream(prepared)) as events:  # type: ignore[type-var]
        async for event in events:
            if not begun:
                begun = True
                yield chunk({"role": "assistant", "content": ""})
            if event.text:
                yield chunk({"content": event.text})
            if event.finish_reason is not None:
                yield chunk({}, event.finish_reason.value)
                if include_usage and event.usage is not None:
                    yield {**base, "choices": [], "usage": usage_json([event.usage])}
