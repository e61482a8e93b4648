"""The JSON format of Anthropic clients, in requests, and its mapping to a TextCall.

No other module knows the field names of the Messages API. Unknown fields are accepted; a known
field that would change the answer and is not supported is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from tierkv.dbfront.contracts import Message, TextCall
from tierkv.dbfront.http.config import RestCaller
from tierkv.dbfront.http.schema import refuse_fields, session_name
from tierkv.dbfront.http.services import FieldError
from tierkv.dbfront.http.tool_fields import FunctionName, check_parameters, tool_use
from tierkv.dbfront.tokens.chunked_prompt import clean_documents
from tierkv.dbfront.tool_calls.tool import Tool, ToolCall
from tierkv.kvcore import limits
from tierkv.kvcore.call_options import CallOptions, KvAction, Steering
from tierkv.kvcore.errors import FeatureNotSupportedError, UserError
from tierkv.kvcore.request import ReuseHint

SHORT_S: Final = 300.0
"""The usual time for which ``cache_control`` keeps KV."""
_LIFETIMES_S: Final = {"5m": SHORT_S, "1h": 3_600.0}
_NOT_TEXT: Final = "only text, tool calls, tool results and plain-text documents are supported"
_NEUTRAL: Final[dict[str, tuple[Any, ...]]] = {
    "container": (),
    "mcp_servers": ([],),
    "output_format": (),
    "context_management": ({}, {"edits": []}),
}
_TOOL_NEUTRAL: Final[dict[str, tuple[Any, ...]]] = {
    "defer_loading": (False,),
    "input_examples": ([],),
    "allowed_callers": (["direct"],),
}
"""Unsupported fields, and the values (besides null) that ask for nothing special."""

_THOUGHTLESS: Final = ("disabled", "adaptive")
_EFFORTS: Final = ("low", "medium", "high", "xhigh", "max")
"""Wishes of clients that always send one; a model that does not think answers all alike."""


class CacheControl(BaseModel):
    """Asks to keep the KV of everything up to here."""

    model_config = ConfigDict(extra="allow")

    type: Literal["ephemeral"] = "ephemeral"
    ttl: Literal["5m", "1h"] = "5m"


class ContentBlock(BaseModel):
    """A piece of a message: text, a tool call, a tool's result, or a document."""

    model_config = ConfigDict(extra="allow")

    type: str
    text: str | None = None
    id: Annotated[str, Field(max_length=limits.MAX_NAME_CHARS)] | None = None
    name: FunctionName | None = None
    input: dict[str, Any] | None = None
    tool_use_id: Annotated[str, Field(max_length=limits.MAX_NAME_CHARS)] | None = None
    content: str | list[ContentBlock] | None = None
    is_error: bool | None = None
    source: dict[str, Any] | None = None
    title: str | None = None
    context: str | None = None
    citations: dict[str, Any] | list[Any] | None = None
    cache_control: CacheControl | None = None

    def to_text(self, where: str) -> str:
        """Return the text of a block that is no call and no result.

        Raises:
            FieldError: the block has no text.
        """
        if self.type == "text":
            if self.text is None:
                raise FieldError(f"{where}.text", UserError(f"{where}: a text block has no text"))
            return self.text
        if self.type == "document" and (text := self._document_text()) is not None:
            if isinstance(self.citations, dict) and self.citations.get("enabled"):
                error = FeatureNotSupportedError("citations are not supported")
                raise FieldError(f"{where}.citations", error)
            return "\n".join(part for part in (self.title, self.context, text) if part)
        error = FeatureNotSupportedError(f"{where}: {self.type!r} is not supported", hint=_HINT)
        raise FieldError(where, error)

    def ttls(self) -> list[float]:
        """Return the seconds for which the block and blocks inside it ask to keep KV."""
        inside = self.content if isinstance(self.content, list) else ()
        return [_ttl(self.cache_control), *(each for block in inside for each in block.ttls())]

    def _document_text(self) -> str | None:
        source = self.source or {}
        if source.get("type") == "text" and isinstance(source.get("data"), str):
            return str(source["data"])
        if source.get("type") == "content" and isinstance(source.get("content"), str):
            return str(source["content"])
        return None


_HINT: Final = _NOT_TEXT[0].upper() + _NOT_TEXT[1:] + "."

Blocks = str | list[ContentBlock]


class MessageField(BaseModel):
    """One turn."""

    model_config = ConfigDict(extra="allow")

    role: Literal["user", "assistant"]
    content: Blocks


class MessagesTool(BaseModel):
    """A tool of the client, or a tool of Anthropic's servers, which is refused."""

    model_config = ConfigDict(extra="allow")

    type: str | None = None
    name: FunctionName
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None

    def to_tool(self, where: str) -> Tool:
        """Convert to the front's value."""
        if self.type not in (None, "custom") or self.input_schema is None:
            error = FeatureNotSupportedError(
                f"{where} is {self.type or 'a tool without input_schema'}: only tools with an "
                "input_schema are supported",
                hint="Leave it out, or give its schema.",
            )
            raise FieldError(where, error)
        refuse_fields(self.model_extra or {}, _TOOL_NEUTRAL)
        check_parameters(self.name, self.input_schema)
        schema = json.dumps(self.input_schema, ensure_ascii=False)
        return Tool(self.name, self.description or "", schema, bool(self.strict))


class PromptBody(BaseModel):
    """The prompt of a message: POST /v1/messages/count_tokens."""

    model_config = ConfigDict(extra="allow")

    model: Annotated[str, Field(max_length=limits.MAX_NAME_CHARS)] | None = Field(
        default=None, description="name of a served model; default: the only model"
    )
    messages: Annotated[
        list[MessageField], Field(min_length=1, max_length=limits.MAX_CHAT_MESSAGES)
    ] = Field(description="turns of user and assistant; the last one is the user's")
    system: Blocks | None = Field(default=None, description="the system prompt")
    tools: list[MessagesTool] | None = Field(
        default=None, description="functions that the model may call; the client executes them"
    )
    tool_choice: dict[str, Any] | None = Field(
        default=None, description='{"type": "auto" | "any" | "tool" | "none", "name": ...}'
    )

    output_config: dict[str, Any] | None = Field(
        default=None, description='{"format": {"type": "json_schema", "schema": ...}}'
    )
    cache_control: CacheControl | None = Field(
        default=None, description="keep the KV of all of the prompt for its ttl"
    )

    def to_call(self, caller: RestCaller, options: CallOptions) -> TextCall:
        """Make the call.

        Raises:
            FieldError: a field is not supported, or makes no sense.
        """
        refuse_fields(self.model_extra or {}, _NEUTRAL)
        if self.messages[-1].role == "assistant":
            error = FeatureNotSupportedError(
                "the last message is the assistant's: an answer can't be begun by the client",
                hint="End the conversation with a message of the user.",
            )
            raise FieldError("messages", error)
        documents, messages = _conversation(self.system, self.messages)
        _check_pairs(self.messages)
        tools = [tool.to_tool(f"tools.{i}") for i, tool in enumerate(self.tools or ())]
        choice, parallel = _choice(self.tool_choice)
        return TextCall(
            messages=messages,
            documents=clean_documents(documents),
            model=self.model,
            options=options,
            tools=tool_use(tools, choice, parallel=parallel),
            json_schema=_answer_schema(self.output_config),
            tenant=caller.tenant,
            key=caller.key,
            session=options.session_id or "",
            origin="messages",
        )


class MessagesMetadata(BaseModel):
    """About the request; nothing is kept."""

    user_id: str | None = None


class MessagesBody(PromptBody):
    """POST /v1/messages."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "max_tokens": 16,
                    "temperature": 0,
                    "messages": [
                        {"role": "user", "content": "Mia bought a kettle. Question: What is it?"}
                    ],
                }
            ]
        }
    )

    max_tokens: Annotated[int, Field(ge=1, le=limits.MAX_COMPLETION_TOKENS)] = Field(
        description="most tokens of the answer; less if the context ends before"
    )
    temperature: Annotated[float, Field(ge=0, le=1)] | None = Field(
        default=None, description="sampling temperature; 0 is greedy; default 1"
    )
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, le=limits.MAX_TOP_K)] | None = Field(
        default=None, description="sample among this many most likely tokens; 0: among all"
    )
    stop_sequences: list[str] | None = Field(
        default=None, description="strings at which the answer ends"
    )
    stream: bool | None = None
    metadata: MessagesMetadata | None = Field(
        default=None, description="user_id names the conversation"
    )
    thinking: dict[str, Any] | None = None
    service_tier: Literal["auto", "standard_only"] | None = Field(
        default=None, description="ignored: all requests have one tier"
    )

    def to_options(self, default_temperature: float) -> CallOptions:
        """Collect the options of the call.

        Raises:
            FieldError: a field is not supported.
        """
        if self.thinking and self.thinking.get("type") not in _THOUGHTLESS:
            error = FeatureNotSupportedError("thinking is not supported", hint="Leave it out.")
            raise FieldError("thinking", error)
        user = self.metadata.user_id if self.metadata else None
        temperature = default_temperature if self.temperature is None else self.temperature
        return CallOptions(
            temperature=temperature,
            top_p=self.top_p,
            max_tokens=self.max_tokens,
            top_k=self.top_k,
            stop=tuple(self.stop_sequences or ()) or None,
            session_id=session_name(user),
            hint=ReuseHint(next_turn=True) if self.kept_s() else None,
        )

    def kept_s(self) -> float:
        """Return the longest time for which a block asks to keep KV; 0.0 if none asks."""
        return max((each.seconds for each in self.marks()), default=0.0)

    def marks(self) -> list[CacheMark]:
        """Return the places with ``cache_control``, in order."""
        marks = [CacheMark(0, _ttl(tool.cache_control)) for tool in self.tools or ()]
        if isinstance(self.system, list):
            marks += [CacheMark(0, _ttl(block.cache_control)) for block in self.system]
        for number, message in enumerate(self.messages, start=1):
            if isinstance(message.content, list):
                marks += [
                    CacheMark(number, seconds) for b in message.content for seconds in b.ttls()
                ]
        marks.append(CacheMark(len(self.messages), _ttl(self.cache_control)))
        return [mark for mark in marks if mark.seconds]

    def retained(self, call: TextCall) -> list[TextCall]:
        """Return the calls that retain the KV up to the marks: one per lifetime, at its last mark.

        A mark inside a message stands for the whole message, because blocks of KV are larger than
        most pieces of messages.
        """
        last: dict[float, int] = {}
        for mark in self.marks():
            last[mark.seconds] = max(last.get(mark.seconds, 0), mark.messages)
        calls = []
        for seconds, count in last.items():
            _, messages = _conversation(self.system, self.messages[:count])
            if messages:
                steering = Steering(KvAction.RETAIN, seconds)
                calls.append(_steered(call, messages, steering))
        return calls


@dataclass(frozen=True, slots=True)
class CacheMark:
    """A place with ``cache_control``: behind so many messages (0: behind the system prompt)."""

    messages: int
    seconds: float


def _steered(call: TextCall, messages: tuple[Message, ...], steering: Steering) -> TextCall:
    return TextCall(
        messages=messages,
        documents=call.documents,
        model=call.model,
        options=CallOptions(temperature=0.0, max_tokens=1),
        tools=call.tools,
        steering=steering,
        tenant=call.tenant,
        key=call.key,
        origin="messages.retain",
    )


def _ttl(control: CacheControl | None) -> float:
    return 0.0 if control is None else _LIFETIMES_S[control.ttl]


def _choice(choice: dict[str, Any] | None) -> tuple[str | dict[str, Any] | None, bool]:
    """Return the choice in OpenAI's form, and whether calls may be parallel."""
    if choice is None:
        return None, True
    alone = choice.get("disable_parallel_tool_use") or False
    if not isinstance(alone, bool):
        raise FieldError(
            "tool_choice", UserError("disable_parallel_tool_use must be true or false")
        )
    kind, parallel = choice.get("type"), not alone
    if kind in ("auto", "none"):
        return kind, parallel
    if kind == "any":
        return "required", parallel
    if kind == "tool" and isinstance(choice.get("name"), str):
        return {"type": "function", "function": {"name": choice["name"]}}, parallel
    message = f"tool_choice {json.dumps(choice)[:80]} is not known"
    error = UserError(message, hint='Use {"type": "auto" | "any" | "tool" | "none"}.')
    raise FieldError("tool_choice", error)


def _answer_schema(output: dict[str, Any] | None) -> str:
    """Return the JSON Schema of the answer; empty for text."""
    effort = (output or {}).get("effort")
    if effort not in (None, *_EFFORTS):
        unable = FeatureNotSupportedError(f"effort {str(effort)[:80]} is not supported")
        raise FieldError("output_config.effort", unable)
    form = (output or {}).get("format")
    if form is None:
        return ""
    schema = form.get("schema") if isinstance(form, dict) else None
    if isinstance(schema, dict) and form.get("type") == "json_schema":
        return json.dumps(schema, ensure_ascii=False)
    error = FeatureNotSupportedError(
        "this output_config.format is not supported",
        hint='Use {"type": "json_schema", "schema": {...}}.',
    )
    raise FieldError("output_config", error)


def _conversation(
    system: Blocks | None, turns: Sequence[MessageField]
) -> tuple[list[str], tuple[Message, ...]]:
    """Return the documents of the first turn, and all messages.

    Documents of later turns stay where they are: a document that moved to the front would change
    the beginning of the prompt, and with it the KV of all that follows.
    """
    documents: list[str] = []
    messages: list[Message] = []
    if system and (text := _joined(system, "system")):
        messages.append(Message("system", text))
    for number, turn in enumerate(turns):
        where = f"messages.{number}.content"
        if turn.role == "user" and not turn.content:
            raise FieldError(where, UserError(f"{where}: a message of the user must not be empty"))
        if isinstance(turn.content, str):
            messages.append(Message(turn.role, turn.content))
            continue
        blocks = [(f"{where}.{i}", block) for i, block in enumerate(turn.content)]
        if turn.role == "assistant":
            messages.append(_answer(blocks))
            continue
        if number == 0:
            documents = [b.to_text(at) for at, b in blocks if b.type == "document"]
            blocks = [(at, b) for at, b in blocks if b.type != "document"]
        messages += _results(blocks)
    return documents, tuple(messages)


def _answer(blocks: Sequence[tuple[str, ContentBlock]]) -> Message:
    texts, calls = [], []
    for where, block in blocks:
        if block.type in ("thinking", "redacted_thinking"):
            continue  # Templates leave out the thoughts of earlier turns.
        if block.type == "tool_use":
            for name in ("id", "name"):
                if not getattr(block, name):
                    wrong = UserError(f"{where}.{name}: a tool_use must have it")
                    raise FieldError(f"{where}.{name}", wrong)
            arguments = json.dumps(block.input or {}, ensure_ascii=False)
            calls.append(ToolCall(block.id or "", block.name or "", arguments))
        else:
            texts.append(block.to_text(where))
    return Message("assistant", "\n\n".join(texts), tuple(calls))


def _results(blocks: Sequence[tuple[str, ContentBlock]]) -> list[Message]:
    """Return the results of tools, and then the text of a user's turn."""
    messages, texts = [], []
    for where, block in blocks:
        if block.type == "tool_result":
            if not block.tool_use_id:
                raise FieldError(where, UserError(f"{where}: a tool_result has no tool_use_id"))
            text = _joined(block.content or "", f"{where}.content")
            if block.is_error:
                text = f"Error: {text}"
            messages.append(Message("tool", text, tool_call_id=block.tool_use_id))
            continue
        text = block.to_text(where)
        if not text:
            raise FieldError(where, UserError(f"{where}: a block of text must not be empty"))
        texts.append(text)
    if texts or not messages:
        messages.append(Message("user", "\n\n".join(texts)))
    return messages


def _check_pairs(turns: Sequence[MessageField]) -> None:
    """Refuse results without their calls in the turn before, and calls without results behind.

    Raises:
        FieldError: names the turn.
    """
    called: set[str] = set()
    for number, turn in enumerate(turns):
        where = f"messages.{number}.content"
        blocks = turn.content if isinstance(turn.content, list) else []
        told = {b.tool_use_id for b in blocks if b.type == "tool_result" and b.tool_use_id}
        if unknown := sorted(told - called):
            wrong = f"{where}: tool_result {unknown[0][:80]!r} has no tool_use in the turn before"
            raise FieldError(where, UserError(wrong))
        if lacking := sorted(called - told):
            wrong = f"{where}: tool_use {lacking[0][:80]!r} has no tool_result in the next turn"
            raise FieldError(where, UserError(wrong))
        called = {b.id for b in blocks if b.type == "tool_use" and b.id}


def _joined(blocks: Blocks, where: str) -> str:
    if isinstance(blocks, str):
        return blocks
    return "\n\n".join(block.to_text(f"{where}.{i}") for i, block in enumerate(blocks))
