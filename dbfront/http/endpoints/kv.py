"""The KV of a prompt over REST: computed ahead, kept, located or removed, as by ``ai_warm`` in SQL.

A prompt is a conversation, raw text, token ids, or a kept conversation or response by its id. It
stands for every prompt that begins with it.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Annotated, Any, Final

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field, JsonValue

from tierkv.dbfront.contracts import Message, TextCall
from tierkv.dbfront.http.config import RestCaller
from tierkv.dbfront.http.endpoints.openai import answer_all
from tierkv.dbfront.http.schema import ChatMessage
from tierkv.dbfront.http.services import (
    FieldError,
    Services,
    caller_of,
    read_body,
    until_disconnect,
)
from tierkv.dbfront.http.tool_fields import ToolField, tool_use, tools_of
from tierkv.dbfront.sessions.conversations import Conversations
from tierkv.kvcore import limits
from tierkv.kvcore.call_options import CallOptions, KvAction, Steering
from tierkv.kvcore.errors import UnknownSessionError, UserError

_EXAMPLE: Final[dict[str, JsonValue]] = {
    "messages": [{"role": "user", "content": "Our returns policy: thirty days."}]
}


class KvBody(BaseModel):
    """POST /v1/kv/prefetch, /demote, /locate, /forget: one of the four forms of a prompt."""

    model_config = ConfigDict(json_schema_extra={"examples": [_EXAMPLE]})

    messages: (
        Annotated[list[ChatMessage], Field(min_length=1, max_length=limits.MAX_CHAT_MESSAGES)]
        | None
    ) = Field(default=None, description="a conversation, written by the model's chat template")
    prompt: str | None = Field(default=None, description="text; no chat template is applied")
    token_ids: list[int] | None = Field(default=None, description="token ids of the model")
    conversation: Annotated[str, Field(max_length=limits.MAX_NAME_CHARS)] | None = Field(
        default=None, description="id of a kept conversation, or of a response: all its turns"
    )
    tools: list[ToolField] | None = Field(
        default=None, description="tools of the conversation, as in chat: they stand before it"
    )
    documents: list[str] = Field(
        default=[], description="texts placed before the first message of a user"
    )
    model: Annotated[str, Field(max_length=limits.MAX_NAME_CHARS)] | None = Field(
        default=None,
        description="name of a served model; default: front.default_model, or the only model",
    )
    cache_salt: Annotated[str, Field(pattern=f"^(?:{limits.NAME_PATTERN})$")] | None = Field(
        default=None, description="only requests with the same key and salt share blocks"
    )
    priority: int | None = Field(default=None, description="lower runs earlier")

    def to_call(
        self, caller: RestCaller, steering: Steering, kept: tuple[Message, ...] | None
    ) -> TextCall:
        """Make the call; ``kept`` are the messages of ``conversation``.

        Raises:
            FieldError: none of the four forms of a prompt, or several.
        """
        given = [self.messages, self.prompt, self.token_ids, self.conversation]
        if sum(each is not None for each in given) != 1:
            message = "send one of messages, prompt, token_ids and conversation"
            raise FieldError("messages", UserError(message))
        said = kept
        if self.messages is not None:
            said = tuple(m.to_message(i) for i, m in enumerate(self.messages))
        return TextCall(
            messages=said,
            prompt=self.prompt,
            prompt_token_ids=None if self.token_ids is None else tuple(self.token_ids),
            documents=tuple(self.documents),
            tools=tool_use(tools_of(self.tools), None, parallel=True),
            model=self.model,
            options=CallOptions(
                temperature=0.0, max_tokens=1, cache_salt=self.cache_salt, priority=self.priority
            ),
            steering=steering,
            tenant=caller.tenant,
            key=caller.key,
            origin=f"kv.{steering.action}",
        )


class PinBody(KvBody):
    """POST /v1/kv/pin and /v1/kv/retain."""

    model_config = ConfigDict(json_schema_extra={"examples": [_EXAMPLE | {"keep_s": 3600}]})

    keep_s: Annotated[float, Field(ge=0, le=limits.MAX_PIN_S)] = Field(
        description="seconds to keep the KV in the pool's memory; 0 ends the pin"
    )


def kv_router(services: Services, conversations: Conversations) -> APIRouter:
    """Create the endpoints."""
    router = APIRouter()

    async def steer(request: Request, body: KvBody, steering: Steering) -> dict[str, Any]:
        caller, kept, model = caller_of(request), None, ""
        if body.conversation is not None:
            try:
                kept, model = await conversations.kept(caller.tenant, body.conversation)
            except UnknownSessionError as error:
                raise FieldError("conversation", error) from None
        call = body.to_call(caller, steering, kept)
        call = replace(call, model=call.model or model or None)
        prepared = await services.generator.prepare(call)
        answers = await until_disconnect(services, request, answer_all(services, [prepared]))
        told: dict[str, Any] = json.loads(answers[0].text)
        return {"object": f"kv.{call.origin[3:]}", "model": prepared.model.name, **told}

    @router.post("/v1/kv/prefetch", summary="Compute a prompt's KV ahead of its question")
    async def prefetch(request: Request) -> dict[str, Any]:
        body = await read_body(request, KvBody)
        return await steer(request, body, Steering(KvAction.WARM))

    @router.post("/v1/kv/pin", summary="Keep a prompt's KV in memory for a time")
    async def pin(request: Request) -> dict[str, Any]:
        body = await read_body(request, PinBody)
        return await steer(request, body, Steering(KvAction.PIN, body.keep_s))

    @router.post("/v1/kv/retain", summary="Keep a prompt's KV in memory if there is room")
    async def retain(request: Request) -> dict[str, Any]:
        body = await read_body(request, PinBody)
        return await steer(request, body, Steering(KvAction.RETAIN, body.keep_s))

    @router.post("/v1/kv/demote", summary="Move a prompt's KV from pages to the pool")
    async def demote(request: Request) -> dict[str, Any]:
        body = await read_body(request, KvBody)
        return await steer(request, body, Steering(KvAction.DEMOTE))

    @router.post("/v1/kv/locate", summary="Tell where a prompt's KV is now")
    async def locate(request: Request) -> dict[str, Any]:
        body = await read_body(request, KvBody)
        return await steer(request, body, Steering(KvAction.LOCATE))

    @router.post("/v1/kv/forget", summary="Remove a prompt's KV from every tier")
    async def forget(request: Request) -> dict[str, Any]:
        body = await read_body(request, KvBody)
        return await steer(request, body, Steering(KvAction.FORGET))

    return router
