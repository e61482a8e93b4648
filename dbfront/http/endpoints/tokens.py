"""Tokens of a prompt, and the text of tokens, as vLLM's endpoints /tokenize and /detokenize.

Gateways and clients ask here to count or to cut prompts; no model runs.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field

from tierkv.dbfront.contracts import TextCall
from tierkv.dbfront.http.schema import ChatMessage, refuse_fields
from tierkv.dbfront.http.services import FieldError, Services, caller_of, read_body
from tierkv.dbfront.http.tool_fields import ToolField, tool_use, tools_of
from tierkv.kvcore import limits
from tierkv.kvcore.errors import UserError

_ModelName = Annotated[str, Field(max_length=limits.MAX_NAME_CHARS)]
_MODEL: Final = "name of a served model; default: front.default_model, or the only model"

_NEUTRAL: Final[dict[str, tuple[Any, ...]]] = {
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "return_token_strs": (False,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "mm_processor_kwargs": ({},),
}
"""Unsupported fields of vLLM, and the values (besides null) that ask for nothing special."""


class TokenizeBody(BaseModel):
    """POST /tokenize: one of ``prompt`` and ``messages``."""

    model_config = ConfigDict(
        extra="allow", json_schema_extra={"examples": [{"prompt": "Customer: Jonas"}]}
    )

    model: _ModelName | None = Field(default=None, description=_MODEL)
    prompt: str | None = Field(default=None, description="text; no chat template is applied")
    messages: (
        Annotated[list[ChatMessage], Field(min_length=1, max_length=limits.MAX_CHAT_MESSAGES)]
        | None
    ) = Field(default=None, description="a conversation, written by the model's chat template")
    tools: list[ToolField] | None = Field(default=None, description="tools, as in chat")


class DetokenizeBody(BaseModel):
    """POST /detokenize."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"tokens": [1, 2]}]})

    model: _ModelName | None = Field(default=None, description=_MODEL)
    tokens: list[int] = Field(description="token ids of the model")


def tokens_router(services: Services) -> APIRouter:
    """Create the endpoints."""
    router = APIRouter()

    @router.post("/tokenize", summary="Text or a conversation in, token ids out")
    async def tokenize(request: Request) -> dict[str, Any]:
        body = await read_body(request, TokenizeBody)
        refuse_fields(body.model_extra or {}, _NEUTRAL)
        if (body.prompt is None) == (body.messages is None):
            raise FieldError("prompt", UserError("send either prompt or messages"))
        said = body.messages
        call = TextCall(
            prompt=body.prompt,
            messages=None if said is None else tuple(m.to_message(i) for i, m in enumerate(said)),
            tools=tool_use(tools_of(body.tools), None, parallel=True),
            model=body.model,
            tenant=caller_of(request).tenant,
        )
        tokens = await services.generator.token_ids(call)
        context = (await services.generator.count_tokens((), body.model)).context_tokens
        return {"count": len(tokens), "max_model_len": context, "tokens": tokens}

    @router.post("/detokenize", summary="Token ids in, their text out")
    async def detokenize(request: Request) -> dict[str, Any]:
        body = await read_body(request, DetokenizeBody)
        return {"prompt": await services.generator.text_of(body.tokens, body.model)}

    return router
