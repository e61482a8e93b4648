"""The endpoints of OpenAI's API: chat completions, completions and models.

The format follows openai-python: the finish reason has a separate chunk, and so has the usage, if
the client asked for the usage. Each prompt, and each of its ``n`` choices, is a separate call. A
stream merges the calls and marks each chunk with the choice's index. ``max_model_len`` of a model
is an addition of vLLM, which gateways read; Anthropic's clients read ``display_name``.
Log-probabilities are an object per token in chats and columns in completions; bytes that are no
whole character show as U+FFFD in texts, and the ``bytes`` of a chat are exact.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Final

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from tierkv.dbfront.answer_token import AnswerToken, SpelledToken
from tierkv.dbfront.contracts import PreparedCall, TextAnswer, TextEvent
from tierkv.dbfront.http.completion_bodies import ChatBody, CompletionBody, choices_of
from tierkv.dbfront.http.schema import usage_json
from tierkv.dbfront.http.services import Services, caller_of, read_body, until_disconnect
from tierkv.dbfront.http.sse import open_stream
from tierkv.dbfront.http.tool_fields import call_json, delta_json, finish_reason
from tierkv.kvcore.errors import UnknownModelError
from tierkv.kvcore.node import ModelInfo


def models_router(services: Services) -> APIRouter:
    """Create the endpoints."""
    router = APIRouter()

    @router.get("/v1/models", summary="Served models")
    async def list_models() -> dict[str, Any]:
        models = await services.generator.models()
        return {"object": "list", "data": [_model_json(services, model) for model in models]}

    @router.get("/v1/models/{model_id:path}", summary="One served model")
    async def get_model(model_id: str) -> dict[str, Any]:
        models = await services.generator.models()
        for model in models:
            if model.name == model_id:
                return _model_json(services, model)
        names = ", ".join(model.name for model in models)
        raise UnknownModelError(
            f"no model {model_id[:140]!r} is served here", hint=f"The served models are {names}."
        )

    return router


def _model_json(services: Services, model: ModelInfo) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": services.created(),
        "owned_by": "tierkv",
        "max_model_len": model.context_tokens,
        "type": "model",
        "display_name": model.name,
        "max_input_tokens": model.context_tokens,
    }


EVENTS_BUFFERED = 256


def completions_router(services: Services) -> APIRouter:
    """Create the endpoint."""
    router = APIRouter()

    @router.post("/v1/completions", summary="Raw prompts in, continuations out")
    async def completions(request: Request) -> Response:
        body = await read_body(request, CompletionBody)
        calls = body.to_calls(caller_of(request), services.config.default_temperature)
        prompts = [await services.generator.prepare(call) for call in calls]
        prepared = choices_of(prompts, body.choices)
        envelope = _completion_envelope(services, prepared[0])
        if body.stream:
            return await open_stream(
                services, _completion_chunks(services, prepared, envelope, body)
            )
        answers = await until_disconnect(services, request, answer_all(services, prepared))
        return JSONResponse(_completion(answers, envelope, body))

    return router


def _completion_envelope(services: Services, prepared: PreparedCall) -> dict[str, Any]:
    return {
        "id": f"cmpl-{prepared.request.request_id}",
        "object": "text_completion",
        "created": services.created(),
        "model": prepared.model.name,
        "system_fingerprint": f"fp_{prepared.model.revision[:12]}",
    }


async def answer_all(services: Services, prepared: Sequence[PreparedCall]) -> list[TextAnswer]:
    """Answer all prompts concurrently; the first error cancels the rest."""
    tasks = [asyncio.ensure_future(services.generator.answer(one)) for one in prepared]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _completion(
    answers: Sequence[TextAnswer], envelope: dict[str, Any], body: CompletionBody
) -> dict[str, Any]:
    choices = [
        _choice(index, answer.text, answer.finish_reason.value)
        for index, answer in enumerate(answers)
    ]
    if body.asked_logprobs is not None:
        for choice, answer in zip(choices, answers, strict=True):
            choice["logprobs"] = completion_logprobs(answer.tokens)
    return {**envelope, "choices": choices, "usage": usage_json(answers, n=body.choices)}


def _choice(
    index: int,
    text: str,
    finish_reason: str | None = None,
    tokens: Sequence[AnswerToken] = (),
) -> dict[str, Any]:
    return {
        "index": index,
        "text": text,
        "logprobs": completion_logprobs(tokens) if tokens else None,
        "finish_reason": finish_reason,
    }


async def _completion_chunks(
    services: Services,
    prepared: Sequence[PreparedCall],
    envelope: dict[str, Any],
    body: CompletionBody,
) -> AsyncGenerator[Mapping[str, Any], None]:
    base = {**envelope, "usage": None} if body.include_usage else envelope
    ended: dict[int, TextEvent] = {}
    async with aclosing(_merged(services, prepared)) as events:
        async for index, event in events:
            if event.text or event.tokens:
                choice = _choice(index, event.text, tokens=event.tokens)
                yield {**base, "choices": [choice]}
            if event.finish_reason is not None:
                yield {**base, "choices": [_choice(index, "", event.finish_reason.value)]}
                ended[index] = event
    if body.include_usage:
        yield {**base, "choices": [], "usage": _usage_of(ended, n=body.choices)}


def _usage_of(ended: Mapping[int, TextEvent], *, n: int) -> dict[str, Any]:
    """Return the usage of all choices, by index, whichever ended first."""
    return usage_json([ended[index] for index in sorted(ended)], n=n)


async def _merged(
    services: Services, prepared: Sequence[PreparedCall]
) -> AsyncGenerator[tuple[int, TextEvent], None]:
    """Yield the events of all streams in order of arrival; the first error ends all streams."""
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


def chat_router(services: Services) -> APIRouter:
    """Create the endpoint."""
    router = APIRouter()

    @router.post("/v1/chat/completions", summary="A conversation in, a message out")
    async def chat_completions(request: Request) -> Response:
        body = await read_body(request, ChatBody)
        call = body.to_call(caller_of(request), services.config.default_temperature)
        prepared = choices_of([await services.generator.prepare(call)], body.choices)
        envelope = _chat_envelope(services, prepared[0])
        if body.stream:
            return await open_stream(services, _chat_chunks(services, prepared, envelope, body))
        answers = await until_disconnect(services, request, answer_all(services, prepared))
        return JSONResponse(_chat_completion(answers, envelope, body))

    return router


def _chat_envelope(services: Services, prepared: PreparedCall) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{prepared.request.request_id}",
        "created": services.created(),
        "model": prepared.model.name,
        "system_fingerprint": f"fp_{prepared.model.revision[:12]}",
    }


def _chat_completion(
    answers: Sequence[TextAnswer], envelope: dict[str, Any], body: ChatBody
) -> dict[str, Any]:
    choices = [_chat_choice(index, answer) for index, answer in enumerate(answers)]
    if body.logprobs:
        for choice, answer in zip(choices, answers, strict=True):
            choice["logprobs"] = chat_logprobs(answer.tokens)
    usage = usage_json(answers, n=len(answers))
    return {**envelope, "object": "chat.completion", "choices": choices, "usage": usage}


def _chat_choice(index: int, answer: TextAnswer) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
    if answer.tool_calls:
        message["content"] = answer.text or None
        message["tool_calls"] = [call_json(call) for call in answer.tool_calls]
    return {
        "index": index,
        "message": message,
        "logprobs": None,
        "finish_reason": finish_reason(answer.finish_reason, calls=bool(answer.tool_calls)),
    }


async def _chat_chunks(
    services: Services,
    prepared: Sequence[PreparedCall],
    envelope: dict[str, Any],
    body: ChatBody,
) -> AsyncGenerator[Mapping[str, Any], None]:
    base = {**envelope, "object": "chat.completion.chunk"}
    if body.include_usage:
        base["usage"] = None
    begun: set[int] = set()
    calling: set[int] = set()
    ended: dict[int, TextEvent] = {}
    async with aclosing(_merged(services, prepared)) as events:
        async for index, event in events:
            deltas: list[dict[str, Any]] = []
            if index not in begun:
                begun.add(index)
                deltas.append({"role": "assistant", "content": ""})
            if event.text or (event.tokens and not event.calls):
                deltas.append({"content": event.text})
            if event.calls:
                calling.add(index)
                deltas.append({"tool_calls": [delta_json(delta) for delta in event.calls]})
            for delta in deltas:
                told = event.tokens if delta is deltas[-1] else ()
                yield {**base, "choices": [_delta_choice(index, delta, tokens=told)]}
            if event.finish_reason is not None:
                reason = finish_reason(event.finish_reason, calls=index in calling)
                yield {**base, "choices": [_delta_choice(index, {}, reason)]}
                ended[index] = event
    if body.include_usage:
        yield {**base, "choices": [], "usage": _usage_of(ended, n=len(prepared))}


def _delta_choice(
    index: int,
    delta: dict[str, Any],
    finish_reason: str | None = None,
    tokens: Sequence[AnswerToken] = (),
) -> dict[str, Any]:
    return {
        "index": index,
        "delta": delta,
        "logprobs": chat_logprobs(tokens) if tokens else None,
        "finish_reason": finish_reason,
    }


_LEAST: Final = -9_999.0
"""Stands for smaller numbers, as in OpenAI's API and in vLLM."""


def chat_logprobs(tokens: Sequence[AnswerToken]) -> dict[str, Any]:
    """Return ``choices[].logprobs`` of a chat, or of a part of it."""
    content = [
        _token(token) | {"top_logprobs": [_token(one) for one in token.top]} for token in tokens
    ]
    return {"content": content, "refusal": None}


def _token(token: AnswerToken | SpelledToken) -> dict[str, Any]:
    return {
        "token": _text(token),
        "logprob": max(token.logprob, _LEAST),
        "bytes": list(token.spelled),
    }


def completion_logprobs(tokens: Sequence[AnswerToken]) -> dict[str, Any]:
    """Return ``choices[].logprobs`` of a completion, or of a part of it.

    ``top_logprobs`` has the chosen token too, as OpenAI's API does. Of several tokens with equal
    texts, the most likely one is shown.
    """
    return {
        "tokens": [_text(token) for token in tokens],
        "token_logprobs": [max(token.logprob, _LEAST) for token in tokens],
        "top_logprobs": [_alternatives(token) for token in tokens],
        "text_offset": [token.start for token in tokens],
    }


def _alternatives(token: AnswerToken) -> dict[str, float]:
    told: dict[str, float] = {}
    for one in token.top:
        told.setdefault(_text(one), max(one.logprob, _LEAST))
    told.setdefault(_text(token), max(token.logprob, _LEAST))
    return told


def _text(token: AnswerToken | SpelledToken) -> str:
    return token.spelled.decode(errors="replace")
