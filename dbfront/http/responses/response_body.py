"""The body of POST /v1/responses, and the mapping to a TextCall.

Fields of chat (options, ``documents``, ``session_id``, ``reuse``) are accepted as well. A known
field that would change the answer and is not supported is refused by name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from tierkv.dbfront.contracts import Message, TextCall
from tierkv.dbfront.http.completion_bodies import ANY_OBJECT
from tierkv.dbfront.http.config import RestCaller
from tierkv.dbfront.http.schema import CallBody
from tierkv.dbfront.http.services import FieldError
from tierkv.dbfront.http.tool_fields import FUNCTION_NAME, FunctionField, tool_use
from tierkv.dbfront.sessions.items import ItemError, parse_items
from tierkv.dbfront.sessions.session_store import SessionItem
from tierkv.dbfront.tool_calls.tool import Tool
from tierkv.kvcore import limits
from tierkv.kvcore.call_options import CallOptions
from tierkv.kvcore.errors import FeatureNotSupportedError, UserError

SessionName = Annotated[str, Field(pattern=f"^(?:{limits.NAME_PATTERN})$")]

_REFUSED: Final[Mapping[str, tuple[Any, ...]]] = {
    "prompt": (),
    "messages": (),
    "moderation": (),
    "context_management": ([],),
    "reasoning": ({}, {"effort": "none"}),
}
"""Unsupported fields, and the values (besides null) that ask for nothing special."""

_LOGPROBS: Final = "message.output_text.logprobs"
_INCLUDABLE: Final = frozenset(
    {
        "reasoning.encrypted_content",
        "web_search_call.results",
        "web_search_call.action.sources",
        "code_interpreter_call.outputs",
        "computer_call_output.output.image_url",
        "file_search_call.results",
        "message.input_image.image_url",
        _LOGPROBS,
    }
)
"""Values of ``include``; but for the last one, they are about items that no response has."""


class ConversationName(BaseModel):
    """A conversation, named by an object or by the id alone."""

    id: SessionName

    @model_validator(mode="before")
    @classmethod
    def _from_id(cls, value: Any) -> Any:
        return {"id": value} if isinstance(value, str) else value


class TextFormat(BaseModel):
    """The form of the answer: text, or JSON of a schema."""

    model_config = ConfigDict(populate_by_name=True)

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    json_schema: dict[str, Any] | None = Field(default=None, alias="schema")
    description: str | None = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> TextFormat:
        if self.type == "json_schema" and self.json_schema is None:
            raise ValueError("type json_schema needs a schema")
        return self


class TextConfig(BaseModel):
    """How the answer is written."""

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class FunctionTool(FunctionField):
    """One tool, in the flat form of responses; only functions are supported."""

    name: Annotated[str, Field(max_length=limits.MAX_NAME_CHARS)] = ""
    type: str

    def checked(self, where: str) -> Tool:
        """Convert to the front's value.

        Raises:
            FieldError: the tool is no function, or has no valid name.
        """
        if self.type != "function":
            error = FeatureNotSupportedError(
                f"{where} has type {self.type[:80]!r}; only functions are supported",
                hint='Send {"type": "function", "name": ..., "parameters": ...}.',
            )
            raise FieldError(where, error)
        if not re.fullmatch(FUNCTION_NAME, self.name):
            raise FieldError(f"{where}.name", UserError(f"{where} has no valid name"))
        return self.to_tool()


class ResponseBody(CallBody):
    """POST /v1/responses."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"input": "Mia bought a kettle. Question: What is it?", "temperature": 0}]
        }
    )

    input: Any = Field(
        description="text, or items: messages of role user, assistant, system or developer"
    )
    instructions: str | None = Field(
        default=None, description="system message of this response; not kept for the next one"
    )
    previous_response_id: str | None = Field(
        default=None, description="a stored response that this one follows"
    )
    conversation: ConversationName | None = Field(
        default=None, description="a conversation, whose items come first and which gets the new"
    )
    store: bool | None = Field(default=None, description="keep the response; default: true")
    background: bool | None = Field(
        default=None, description="answer at once with status queued; GET tells the progress"
    )
    max_output_tokens: Annotated[int, Field(ge=1, le=limits.MAX_COMPLETION_TOKENS)] | None = Field(
        default=None, description="maximum number of tokens of the answer; default: what fits"
    )
    text: TextConfig | None = Field(
        default=None,
        description="format: {type: text | json_object} or {type: json_schema, name, schema}",
    )
    truncation: Literal["auto", "disabled"] | None = Field(
        default=None,
        description="auto: leave out the oldest turns of a history that does not fit the context; "
        "default: refuse it",
    )
    tools: list[FunctionTool] | None = Field(
        default=None, description="functions that the model may call; the client executes them"
    )
    tool_choice: str | dict[str, Any] | None = Field(
        default=None, description="as in chat: auto (default), none, required, or a function"
    )
    parallel_tool_calls: bool | None = Field(
        default=None, description="false: at most one call per answer; default true"
    )
    max_tool_calls: Annotated[int, Field(ge=1)] | None = Field(
        default=None, description="limits OpenAI's own tools, of which there are none here"
    )
    include: list[str] | None = Field(
        default=None, description=f"{_LOGPROBS}: log-probabilities of the tokens of the text"
    )
    top_logprobs: Annotated[int, Field(ge=0, le=limits.MAX_TOP_LOGPROBS)] | None = Field(
        default=None, description="alternatives to report with each token; needs include"
    )

    @property
    def stores(self) -> bool:
        """Return True if the response is kept."""
        return self.store is not False

    @property
    def conversation_id(self) -> str:
        """Return the id of the conversation; empty without one."""
        return "" if self.conversation is None else self.conversation.id

    def check(self) -> None:
        """Refuse combinations and values that can't be served.

        Raises:
            FieldError: names the field.
        """
        for name, neutral in _REFUSED.items():
            value = (self.model_extra or {}).get(name)
            plain = value
            if isinstance(value, dict):
                plain = {key: each for key, each in value.items() if each is not None}
            if value is not None and plain not in neutral:
                message = f"{name}={json.dumps(value)[:80]} is not supported"
                error = FeatureNotSupportedError(message, hint=f"Leave {name} out.")
                raise FieldError(name, error)
        for value in self.include or ():
            if value not in _INCLUDABLE:
                error = FeatureNotSupportedError(f"include={value[:80]!r} is not supported")
                raise FieldError("include", error)
        if self.top_logprobs and _LOGPROBS not in (self.include or ()):
            raise _refused("top_logprobs", f"needs {_LOGPROBS!r} in include")
        if self.conversation_id and self.previous_response_id:
            raise _refused("previous_response_id", "can't be used together with conversation")
        if self.conversation_id and not self.stores:
            raise _refused("store", "must be true with a conversation, which keeps its turns")
        if self.background and not self.stores:
            raise _refused("store", "must be true with background, since GET returns the response")

    def items(self) -> list[SessionItem]:
        """Return the items of ``input``.

        Raises:
            FieldError: names the field of the item.
        """
        if self.input in ("", []):
            raise FieldError("input", UserError("input is empty"))
        return items_of("input", self.input)

    def to_call(self, caller: RestCaller, default_temperature: float) -> TextCall:
        """Make the call, with the instructions as the only message."""
        asked = CallOptions(max_tokens=self.max_output_tokens)
        options = asked.over(self.options(CallOptions(temperature=default_temperature)))
        known = self.common_call(caller, options) | {"json_schema": self._schema()}
        given = self.instructions
        messages = () if given is None else (Message("system", given),)
        tools = [tool.checked(f"tools[{i}]") for i, tool in enumerate(self.tools or ())]
        parallel = self.parallel_tool_calls is not False
        use = tool_use(tools, self.tool_choice, parallel=parallel)
        logprobs = (self.top_logprobs or 0) if _LOGPROBS in (self.include or ()) else None
        return TextCall(
            messages=messages, tools=use, logprobs=logprobs, origin="responses", **known
        )

    def fields(self, call: TextCall) -> dict[str, Any]:
        """Return the fields of the response determined by the request."""
        wanted = self.text.format if self.text is not None else None
        told = wanted or TextFormat()
        return {
            "background": bool(self.background),
            "conversation": {"id": self.conversation_id} if self.conversation_id else None,
            "instructions": self.instructions,
            "max_output_tokens": call.options.max_tokens,
            "max_tool_calls": self.max_tool_calls,
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "previous_response_id": self.previous_response_id,
            "prompt_cache_key": self.prompt_cache_key,
            "safety_identifier": self.safety_identifier,
            "store": self.stores,
            "temperature": call.options.temperature,
            "text": {"format": told.model_dump(by_alias=True, exclude_none=True)},
            "tool_choice": self.tool_choice or "auto",
            "tools": [tool.model_dump(exclude_none=True) for tool in self.tools or ()],
            "top_logprobs": self.top_logprobs or 0,
            "top_p": 1.0 if call.options.top_p is None else call.options.top_p,
            "truncation": self.truncation or "disabled",
            "user": self.user,
        }

    def _schema(self) -> str:
        wanted = self.text.format if self.text is not None else None
        if wanted is None or wanted.type == "text":
            return ""
        if wanted.type == "json_object":
            return ANY_OBJECT
        return json.dumps(wanted.json_schema, ensure_ascii=False)


def items_of(field: str, given: Any) -> list[SessionItem]:
    """Return the items of a field.

    Raises:
        FieldError: names the field of the item.
    """
    try:
        return parse_items(given)
    except ItemError as error:
        error.error.message = f"{field}{error.where}: {error.error.message}"
        raise FieldError(f"{field}{error.where}", error.error) from error


def _refused(field: str, reason: str) -> FieldError:
    return FieldError(field, UserError(f"{field} {reason}"))
