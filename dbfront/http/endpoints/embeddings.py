"""The endpoint of OpenAI's API for embeddings: texts or token ids in, a unit vector for each out.

The vectors are those of ``ai_embed``: the model's last hidden state, normalised. No chat template
is applied. openai-python asks for base64, which is the vector as little-endian float32.
"""

from __future__ import annotations

import base64
import sys
from array import array
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from tierkv.dbfront.contracts import TextAnswer, TextCall
from tierkv.dbfront.http.config import RestCaller
from tierkv.dbfront.http.endpoints.openai import answer_all
from tierkv.dbfront.http.services import (
    FieldError,
    Services,
    caller_of,
    read_body,
    until_disconnect,
)
from tierkv.kvcore import limits
from tierkv.kvcore.call_options import AnswerScope, CallOptions
from tierkv.kvcore.errors import FeatureNotSupportedError, UserError


class EmbeddingBody(BaseModel):
    """A request to /v1/embeddings."""

    model_config = ConfigDict(
        extra="allow", json_schema_extra={"examples": [{"input": "Customer: Jonas"}]}
    )

    input: str | list[int] | list[str] | list[list[int]] = Field(
        description="text or token ids, one or up to 1,024"
    )
    model: Annotated[str, Field(max_length=limits.MAX_NAME_CHARS)] | None = Field(
        default=None,
        description="name of a served model; default: front.default_model, or the only model",
    )
    encoding_format: Literal["float", "base64"] | None = Field(
        default=None, description="base64: the vector as little-endian float32"
    )
    dimensions: int | None = Field(
        default=None, description="only the model's own number: vectors are not shortened"
    )

    use_cache: bool | None = Field(default=None, description="false: neither read nor publish KV")
    cache_salt: Annotated[str, Field(pattern=f"^(?:{limits.NAME_PATTERN})$")] | None = Field(
        default=None, description="only requests with the same key and salt share blocks"
    )
    session_id: str | None = Field(default=None, description="session of the answer cache")
    priority: int | None = Field(default=None, description="lower runs earlier")
    user: str | None = Field(default=None, description="ignored")
    answer_cache: AnswerScope | None = Field(
        default=None, description="reuse the vector of an equal earlier request"
    )

    def to_calls(self, caller: RestCaller) -> list[TextCall]:
        """Make one call per input.

        Raises:
            FieldError: no input, too many, or an empty one.
        """
        texts = self._inputs()
        if len(texts) > limits.MAX_HTTP_PROMPTS:
            message = f"{len(texts)} inputs, at most {limits.MAX_HTTP_PROMPTS} are allowed"
            raise FieldError("input", UserError(message))
        if not all(texts):
            raise FieldError("input", UserError("an empty text has no embedding"))
        options = CallOptions(
            max_tokens=1,
            priority=self.priority,
            cache=self.use_cache,
            cache_salt=self.cache_salt,
            answer_cache=self.answer_cache,
        )
        common: dict[str, Any] = {
            "model": self.model,
            "options": options,
            "tenant": caller.tenant,
            "key": caller.key,
            "session": self.session_id or "",
            "origin": "embeddings",
            "embed": True,
        }
        return [
            TextCall(prompt=one, **common)
            if isinstance(one, str)
            else TextCall(prompt_token_ids=tuple(one), **common)
            for one in texts
        ]

    def _inputs(self) -> Sequence[str | list[int]]:
        given = self.input
        if isinstance(given, str):
            return [given]
        if not given:
            raise FieldError("input", UserError("input is an empty list"))
        return [given] if isinstance(given[0], int) else given


def embeddings_router(services: Services) -> APIRouter:
    """Create the endpoint."""
    router = APIRouter()

    @router.post("/v1/embeddings", summary="Texts in, vectors out")
    async def embeddings(request: Request) -> Response:
        body = await read_body(request, EmbeddingBody)
        prepared = [
            await services.generator.prepare(call) for call in body.to_calls(caller_of(request))
        ]
        answers = await until_disconnect(services, request, answer_all(services, prepared))
        width = len(answers[0].embedding)
        if body.dimensions not in (None, width):
            message = f"the model's vectors have {width} dimensions"
            raise FieldError(
                "dimensions", FeatureNotSupportedError(message, hint="Leave dimensions out.")
            )
        return JSONResponse(_embedding_list(answers, prepared[0].model.name, body))

    return router


def _embedding_list(
    answers: Sequence[TextAnswer], model: str, body: EmbeddingBody
) -> dict[str, Any]:
    tokens = sum(answer.usage.prompt_tokens for answer in answers)
    data = [
        {
            "object": "embedding",
            "index": index,
            "embedding": _packed(answer.embedding)
            if body.encoding_format == "base64"
            else list(answer.embedding),
        }
        for index, answer in enumerate(answers)
    ]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"object": "list", "data": data, "model": model, "usage": usage}


def _packed(vector: Sequence[float]) -> str:
    """Return a vector as base64 of little-endian float32."""
    floats = array("f", vector)
    if sys.byteorder == "big":
        floats.byteswap()
    return base64.b64encode(floats).decode()
