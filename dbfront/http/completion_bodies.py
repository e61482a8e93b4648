"""Bodies of chat completions and completions, and their mapping to a TextCall.

dbfront/http/endpoints/openai.py reads them. Fields of both APIs and of others' are in
dbfront/http/schema.py. An answer may have several choices, JSON of a form, and log-probabilities.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Final

from pydantic import ConfigDict, Field, StrictBool

from tierkv.dbfront.contracts import PreparedCall, TextCall
from tierkv.dbfront.http.config import RestCaller
from tierkv.dbfront.http.schema import CallBody, ChatMessage
from tierkv.dbfront.http.services import FieldError
from tierkv.dbfront.http.tool_fields import ToolField, tool_use, tools_of
from tierkv.kvcore import limits
from tierkv.kvcore.call_options import CallOptions
from tierkv.kvcore.errors import FeatureNotSupportedError, UserError
from tierkv.kvcore.ids import new_request_id

ANY_OBJECT: Final = '{"type":"object"}'
"""JSON Schema of any JSON object."""


class ChoicesBody(CallBody):
    """Fields of the endpoints that return choices."""

    n: Annotated[int, Field(ge=1, le=limits.MAX_CHOICES)] | None = Field(
        default=None, description="number of answers to each prompt; default 1"
    )
    best_of: int | None = Field(default=None, description="only the same as n")
    response_format: dict[str, Any] | None = Field(
        default=None,
        description='{"type": "text"}, {"type": "json_object"}, or {"type": "json_schema", '
        '"json_schema": {"schema": {...}}}',
    )

    @property
    def choices(self) -> int:
        """Return the number of answers to each prompt."""
        return self.n or 1

    def common_call(self, caller: RestCaller, options: CallOptions) -> dict[str, Any]:
        """Return the arguments of TextCall that do not depend on the endpoint."""
        if self.best_of is not None and self.best_of != self.choices:
            message = f"best_of={self.best_of} is not supported: every answer is returned"
            raise FieldError("best_of", FeatureNotSupportedError(message, hint="Use n instead."))
        schema = _schema_of(self.response_format)
        return super().common_call(caller, options) | {"json_schema": schema}


class ChatBody(ChoicesBody):
    """POST /v1/chat/completions."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "messages": [
                        {"role": "user", "content": "Mia bought a kettle. Question: What is it?"}
                    ],
                    "temperature": 0,
                    "max_tokens": 16,
                }
            ]
        }
    )

    messages: Annotated[
        list[ChatMessage], Field(min_length=1, max_length=limits.MAX_CHAT_MESSAGES)
    ] = Field(description="the conversation so far; the last message is answered")
    max_completion_tokens: Annotated[int, Field(ge=1, le=limits.MAX_COMPLETION_TOKENS)] | None = (
        Field(
            default=None, description="maximum number of tokens of the answer; default: what fits"
        )
    )

    tools: list[ToolField] | None = Field(
        default=None, description="functions that the model may call; the client executes them"
    )
    tool_choice: str | dict[str, Any] | None = Field(
        default=None,
        description="auto (default), none, required, or the function to call; also allowed_tools",
    )
    parallel_tool_calls: bool | None = Field(
        default=None, description="false: at most one call per answer; default true"
    )

    logprobs: bool | None = Field(
        default=None, description="report the log-probability of each token of the answer"
    )
    top_logprobs: Annotated[int, Field(ge=0, le=limits.MAX_TOP_LOGPROBS)] | None = Field(
        default=None, description="alternatives to report with each token; needs logprobs"
    )

    def to_call(self, caller: RestCaller, default_temperature: float) -> TextCall:
        """Make the call; without a limit the answer may fill the context."""
        if self.top_logprobs and not self.logprobs:
            message = "top_logprobs needs logprobs"
            raise FieldError("top_logprobs", UserError(message, hint='Send "logprobs": true.'))
        asked = CallOptions(max_tokens=self.max_completion_tokens)
        options = asked.over(self.options(CallOptions(temperature=default_temperature)))
        tools = tools_of(self.tools)
        parallel = self.parallel_tool_calls is not False
        return TextCall(
            messages=tuple(m.to_message(i) for i, m in enumerate(self.messages)),
            tools=tool_use(tools, self.tool_choice, parallel=parallel),
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            origin="chat.completions",
            **self.common_call(caller, options),
        )


LogprobsCount = Annotated[int, Field(strict=True, ge=0, le=limits.MAX_TOP_LOGPROBS)]


class CompletionBody(ChoicesBody):
    """POST /v1/completions."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"prompt": "Customer: Jonas", "max_tokens": 4, "temperature": 0}]
        }
    )

    prompt: str | list[int] | list[str] | list[list[int]] = Field(
        description="text or token ids, one or up to 1,024; no chat template is applied"
    )

    logprobs: LogprobsCount | StrictBool | None = Field(
        default=None,
        description="report the log-probability of each token, and of so many alternatives",
    )

    @property
    def asked_logprobs(self) -> int | None:
        """Return the number of alternatives to report; None without a report.

        Raises:
            FieldError: the field is true, as chats have it.
        """
        if self.logprobs is True:
            message = "logprobs must be a number of alternatives, not true"
            raise FieldError("logprobs", UserError(message, hint="Send 0 for none."))
        return None if self.logprobs is False else self.logprobs

    def to_calls(self, caller: RestCaller, default_temperature: float) -> list[TextCall]:
        """Make one call per prompt; the default limit is 16 tokens, as in OpenAI's API."""
        options = self.options(CallOptions(temperature=default_temperature, max_tokens=16))
        common = self.common_call(caller, options) | {
            "origin": "completions",
            "logprobs": self.asked_logprobs,
        }
        prompts = self._prompts()
        check_choices(len(prompts), self.choices)
        return [
            TextCall(prompt=prompt, **common)
            if isinstance(prompt, str)
            else TextCall(prompt_token_ids=tuple(prompt), **common)
            for prompt in prompts
        ]

    def _prompts(self) -> list[str | list[int]]:
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if not prompt:
            raise FieldError("prompt", UserError("prompt is an empty list"))
        if isinstance(prompt[0], int):
            return [prompt]
        return list(prompt)


def _schema_of(response_format: dict[str, Any] | None) -> str:
    """Return the JSON Schema that an answer is held to; empty for text.

    Raises:
        FieldError: a format that is none of OpenAI's, or a schema that is missing.
    """
    kind = "text" if response_format is None else response_format.get("type")
    if response_format is None or kind == "text":
        return ""
    if kind == "json_object":
        return ANY_OBJECT
    if kind != "json_schema":
        message = f"response_format of type {str(kind)[:80]!r} is not supported"
        hint = "Use text, json_object or json_schema."
        raise FieldError("response_format", FeatureNotSupportedError(message, hint=hint))
    named = response_format.get("json_schema")
    schema = named.get("schema") if isinstance(named, dict) else None
    if not isinstance(schema, dict):
        message = "response_format has no JSON object json_schema.schema"
        hint = 'Write {"type": "json_schema", "json_schema": {"name": "a", "schema": {...}}}.'
        raise FieldError("response_format", UserError(message, hint=hint))
    return json.dumps(schema, ensure_ascii=False)


_SEEDS = 1 << 63


def check_choices(prompts: int, n: int) -> None:
    """Refuse more answers than one request may ask for.

    Raises:
        FieldError: names ``prompt`` or ``n``, whichever has to be smaller.
    """
    if prompts > limits.MAX_HTTP_PROMPTS:
        message = f"{prompts} prompts, at most {limits.MAX_HTTP_PROMPTS} are allowed"
        raise FieldError("prompt", UserError(message))
    if prompts * n > limits.MAX_HTTP_PROMPTS:
        message = f"{prompts} prompts with n = {n} ask for {prompts * n} answers"
        hint = f"At most {limits.MAX_HTTP_PROMPTS} are allowed: lower n, or send fewer prompts."
        raise FieldError("n", UserError(message, hint=hint))


def choices_of(prepared: Sequence[PreparedCall], n: int) -> list[PreparedCall]:
    """Return ``n`` calls for each call; the first of each is the call itself."""
    return [call if not i else _choice(call, i) for call in prepared for i in range(n)]


def _choice(call: PreparedCall, number: int) -> PreparedCall:
    sampling = call.request.sampling
    if sampling.seed is not None:
        sampling = replace(sampling, seed=(sampling.seed + number) % _SEEDS)
    request = replace(call.request, request_id=new_request_id(), sampling=sampling)
    return replace(call, request=request)
