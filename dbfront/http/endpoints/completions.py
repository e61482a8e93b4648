"""POST /v1/completions: raw prompts (text or token ids, one or many) in, continuations out.

Each prompt is a call of its own; their streams are merged as they come and told apart by index.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from tierkv.dbfront.contracts import PreparedCall, TextAnswer, TextEvent
from tierkv.dbfront.http.schema import CompletionBody, read_body, usage_json
from tierkv.dbfront.http.services import Services, tenant_of, until_disconnect
from tierkv.dbfront.http.sse import open_stream
from tierkv.kvcore.request import Usage

EVENTS_BUFFERED = 256


def completions_router(services: Services) -> APIRouter:
    """Make the endpoint."""
    router = APIRouter()

    @router.post("/v1/completions", summary="Raw prompts in, continuations out")
    async def completions(request: Request) -> Response:
        body = await read_body(request, CompletionBody)
        calls = body.to_calls(tenant_of(request), services.config.default_temperature)
        prepared = [await services.generator.prepare(call) for call in calls]
        envelope = _envelope(services, prepared[0])
        if body.stream:
            chunks = _chunks(services, prepared, envelope, include_usage=body.include_usage)
            return await open_stream(services, chunks)
        answers = await until_disconnect(request, _answer_all(services, prepared))
        return JSONResponse(_whole(answers, envelope))

    return router


def _envelope(services: Services, prepared: PreparedCall) -> dict[str, Any]:
    return {
        "id": f"cmpl-{prepared.request.request_id}",
        "object": "text_completion",
        "created": services.created(),
        "model": prepared.model.name,
        "system_fingerprint": f"fp_{prepared.model.revision[:12]}",
    }


async def _answer_all(services: Services, prepared: Sequence[PreparedCall]) -> list[TextAnswer]:
    """Answer all prompts at once; the first error cancels the rest."""
    tasks = [asyncio.ensure_future(services.generator.answer(one)) for one in prepared]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _whole(answers: Sequence[TextAnswer], envelope: dict[str, Any]) -> dict[str, Any]:
    choices = [
        _choice(index, answer.text, answer.finish_reason.value)
        for index, answer in enumerate(answers)
    ]
    return {**envelope, "choices": choices, "usage": usage_json([a.usage for a in answers])}


def _choice(index: int, text: str, finish_reason: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}


async def _chunks(
    services: Services,
    prepared: Sequence[PreparedCall],
    envelope: dict[str, Any],
    *,
    include_usage: bool,
) -> AsyncGenerator[Mapping[str, Any], None]:
    base = {**envelope, "usage": None} if include_usage else envelope
    usages: list[Usage] = []
    async with aclosing(_merged(services, prepared)) as events:
        async for index, event in events:
            if event.text:
                yield {**base, "choices": [_choice(index, event.text, None)]}
            if event.finish_reason is not None:
                yield {**base, "choices": [_choice(index, "", event.finish_reason.value)]}
                usages.extend([event.usage] if event.usage is not None else [])
    if include_usage:
        yield {**base, "choices": [], "usage": usage_json(usages)}


async def _merged(
    services: Services, prepared: Sequence[PreparedCall]
) -> AsyncGenerator[tuple[int, TextEvent], None]:
    """Yield the events of all streams as they come; the first error ends them all."""
    queue: asyncio.Queue[tuple[int, TextEvent | BaseException]] = asyncio.Queue(EVENTS_BUFFERED)

    async def pump(index: int, one: PreparedCall) -> None:
        try:
            async with aclosing(services.generator.stream(one)) as events:  # type: ignore[type-var]
                async for event in events:
                    await queue.put((index, event))
        except Exception as error:  # noqa: BLE001 - handed to the reader, who raises it
            await queue.put((index, error))

    tasks = [asyncio.ensure_future(pump(i, one)) for i, one in enumerate(prepared)]
    unfinished = len(tasks)
    try:
        while unfinished:
            index, event = await queue.get()
            if isinstance(event, BaseException):
                raise event
            unfinished -= event.finish_reason is not None
            yield index, event
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
