"""The KV of a prompt over REST: computed ahead, kept or removed, as by ``ai_warm`` in SQL.

A prompt is a conversation, raw text or token ids, and stands for every prompt that begins with it.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Final

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field, JsonValue

from tierkv.dbfront.contracts import TextCall
from tierkv.dbfront.http.endpoints.openai import answer_all
from tierkv.dbfront.http.key_ring import RestCaller
from tierkv.dbfront.http.schema import ChatMessage
from tierkv.dbfront.http.services import (
    FieldError,
    Services,
    caller_of,
    read_body,
    until_disconnect,
)
from tierkv.kvcore import limits
from tierkv.kvcore.call_options import CallOptions, KvAction, Steering
from tierkv.kvcore.errors import UserError

_EXAMPLE: Final[dict[str, JsonValue]] = {
    "messages": [{"role": "user", "content": "Our returns policy: thirty days."}]
}


class KvBody(BaseModel):
    """POST /v1/kv/prefetch, /demote, /forget: one of ``messages``, ``prompt``, ``token_ids``."""

    model_config = ConfigDict(json_schema_extra={"examples": [_EXAMPLE]})

    messages: (
        Annotated[list[ChatMessage], Field(min_length=1, max_length=limits.MAX_CHAT_MESSAGES)]
        | None
    ) = Field(default=None, description="a conversation, written by the model's chat template")
    prompt: str | None = Field(default=None, description="text; no chat template is applied")
    token_ids: list[int] | None = Field(default=None, description="token ids of the model")
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

    def to_call(self, caller: RestCaller, steering: Steering) -> TextCall:
        """Make the call.

        Raises:
            FieldError: none of the three forms of a prompt, or several.
        """
        given = [self.messages, self.prompt, self.token_ids]
        if sum(each is not None for each in given) != 1:
            message = "send one of messages, prompt and token_ids"
            raise FieldError("messages", UserError(message))
        said = self.messages
        return TextCall(
            messages=None if said is None else tuple(m.to_message(i) for i, m in enumerate(said)),
            prompt=self.prompt,
            prompt_token_ids=None if self.token_ids is None else tuple(self.token_ids),
            documents=tuple(self.documents),
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


def kv_router(services: Services) -> APIRouter:
    """Create the endpoints."""
    router = APIRouter()

    async def steer(request: Request, call: TextCall) -> dict[str, Any]:
        prepared = await services.generator.prepare(call)
        answers = await until_disconnect(services, request, answer_all(services, [prepared]))
        told: dict[str, Any] = json.loads(answers[0].text)
        return {"object": f"kv.{call.origin[3:]}", "model": prepared.model.name, **told}

    @router.post("/v1/kv/prefetch", summary="Compute a prompt's KV ahead of its question")
    async def prefetch(request: Request) -> dict[str, Any]:
        body = await read_body(request, KvBody)
        return await steer(request, body.to_call(caller_of(request), Steering(KvAction.WARM)))

    @router.post("/v1/kv/pin", summary="Keep a prompt's KV in memory for a time")
    async def pin(request: Request) -> dict[str, Any]:
        body = await read_body(request, PinBody)
        steering = Steering(KvAction.PIN, body.keep_s)
        return await steer(request, body.to_call(caller_of(request), steering))

    @router.post("/v1/kv/retain", summary="Keep a prompt's KV in memory if there is room")
    async def retain(request: Request) -> dict[str, Any]:
        body = await read_body(request, PinBody)
        steering = Steering(KvAction.RETAIN, body.keep_s)
        return await steer(request, body.to_call(caller_of(request), steering))

    @router.post("/v1/kv/demote", summary="Move a prompt's KV from pages to the pool")
    async def demote(request: Request) -> dict[str, Any]:
        body = await read_body(request, KvBody)
        return await steer(request, body.to_call(caller_of(request), Steering(KvAction.DEMOTE)))

    @router.post("/v1/kv/forget", summary="Remove a prompt's KV from every tier")
    async def forget(request: Request) -> dict[str, Any]:
        body = await read_body(request, KvBody)
        return await steer(request, body.to_call(caller_of(request), Steering(KvAction.FORGET)))

    return router
