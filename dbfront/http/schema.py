"""The JSON format of OpenAI clients, in requests and responses, and its mapping to a TextCall.

No other module knows field names of the OpenAI and vLLM APIs. Unknown fields are accepted, as vLLM
does. A known field is refused by name if the field would change the answer and is not supported.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, create_model, model_validator

from tierkv.dbfront.contracts import Message, TextAnswer, TextEvent
from tierkv.dbfront.http.config import RestCaller
from tierkv.dbfront.http.services import FieldError
from tierkv.dbfront.http.tool_fields import CallField
from tierkv.dbfront.tokens.chunked_prompt import clean_documents
from tierkv.kvcore import limits
from tierkv.kvcore.call_options import OPTIONS, CallOptions, OptionSpec
from tierkv.kvcore.errors import FeatureNotSupportedError, UserError
from tierkv.kvcore.request import HitTokens, ReuseHint
from tierkv.kvcore.value_kinds import Flag, Number, OneOf, Text, Texts, TokenBias, Whole

MetadataKey = Annotated[str, Field(max_length=limits.MAX_METADATA_KEY_CHARS)]
MetadataValue = Annotated[str, Field(max_length=limits.MAX_METADATA_VALUE_CHARS, strict=True)]
Metadata = Annotated[dict[MetadataKey, MetadataValue], Field(max_length=limits.MAX_METADATA_PAIRS)]
_NAME = re.compile(limits.NAME_PATTERN)
_BIAS: Final = TokenBias(limits.MAX_LOGIT_BIAS, limits.MAX_BIASED_TOKENS)

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "logprobs": (False,),
    "response_format": ({"type": "text"},),
    "prompt_logprobs": (0,),
    "echo": (False,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "use_beam_search": (False,),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
    "kv_transfer_params": (),
    "return_token_ids": (False,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "chat_template": (),
    "prompt_embeds": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "web_search_options": (),
    "store": (False,),
    "chat_template_kwargs": ({},),
    "stop_token_ids": ([],),
    "include_stop_str_in_output": (False,),
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "length_penalty": (1,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "input": (),
    "instructions": (),
    "previous_response_id": (),
    "conversation": (),
    "background": (False,),
    "max_completion_tokens": (),
    "max_output_tokens": (),
}
"""Unsupported fields, and the values (besides null) that ask for nothing special.

The last ones belong to other endpoints: an endpoint that reads one of them declares it.
"""

_HINTS: Final = {"store": "POST /v1/responses keeps answers."}


def refuse_fields(given: Mapping[str, Any], neutral: Mapping[str, Sequence[Any]]) -> None:
    """Refuse fields with a value that is not neutral.

    Raises:
        FieldError: names the first one.
    """
    for name, value in given.items():
        if value is None or name not in neutral or value in neutral[name]:
            continue
        message = f"{name}={str(value)[:80]} is not supported"
        hint = _HINTS.get(name, f"Leave {name} out.")
        raise FieldError(name, FeatureNotSupportedError(message, hint=hint))


class StreamOptions(BaseModel):
    """Options for the end of a stream."""

    include_usage: bool = False


class Document(BaseModel):
    """A document, sent as an object or as plain text; a title becomes the first line."""

    model_config = ConfigDict(extra="allow")

    text: str
    title: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        if not isinstance(value, str | dict):
            raise ValueError(
                "a document must be text, or an object with text and an optional title"
            )
        return {"text": value} if isinstance(value, str) else value

    def to_text(self) -> str:
        """Write the document as the model reads it."""
        return f"{self.title}\n{self.text}" if self.title else self.text


class Reuse(BaseModel):
    """The client's hint about its next turn; a time alone means that there will be a next turn."""

    model_config = ConfigDict(extra="forbid")

    next_turn: bool | None = None
    next_turn_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None

    @model_validator(mode="after")
    def _no_time_for_nothing(self) -> Reuse:
        if self.next_turn is False and self.next_turn_s is not None:
            raise ValueError("next_turn_s needs a next turn, but next_turn is false")
        return self

    def to_hint(self) -> ReuseHint:
        """Convert the hint to the cache's type."""
        next_turn = True if self.next_turn_s is not None else self.next_turn
        return ReuseHint(next_turn=next_turn, next_turn_s=self.next_turn_s)


def _field_type(option: OptionSpec) -> Any:
    """Return the type of an option's field, with the bounds that pydantic checks."""
    match option.rest_kind or option.kind:
        case Number(low, high, above_low):
            bound = Field(gt=low, le=high) if above_low else Field(ge=low, le=high)
            return Annotated[float, bound]
        case Whole(low, high):
            return Annotated[int, Field(ge=low, le=high)]
        case Flag():
            return bool
        case Texts():
            return str | list[str]
        case TokenBias(most, most_tokens):
            bias = Annotated[float, Field(ge=-most, le=most)]
            return Annotated[dict[str, bias], Field(max_length=most_tokens)]
        case Text(pattern):
            return Annotated[str, Field(pattern=f"^(?:{pattern})$")] if pattern else str
        case OneOf(choices):
            return type(choices[0])  # An enumeration: its error lists the words.
        case _:
            return _OWN_SHAPES[option.name]


_OWN_SHAPES: Final[dict[str, Any]] = {"hint": Reuse}
_REST_OPTIONS: Final = tuple(option for option in OPTIONS if option.rest)

if TYPE_CHECKING:
    OptionFields = BaseModel
else:
    OptionFields = create_model(
        "OptionFields",
        **{
            option.rest: (_field_type(option) | None, Field(default=None, description=option.doc))
            for option in _REST_OPTIONS
        },
    )


class CallBody(OptionFields):
    """Common fields of chat and completion requests; options come from their table."""

    model_config = ConfigDict(extra="allow")

    model: Annotated[str, Field(max_length=limits.MAX_NAME_CHARS)] | None = Field(
        default=None,
        description="name of a served model; default: front.default_model, or the only model",
    )
    stream: bool | None = Field(
        default=None, description="send server-sent events while the model generates"
    )
    stream_options: StreamOptions | None = Field(
        default=None, description="include_usage: the last event carries the usage"
    )
    user: str | None = Field(default=None, description="names the conversation, as session_id does")
    safety_identifier: str | None = Field(
        default=None, description="names the conversation, as session_id does"
    )
    prompt_cache_key: str | None = Field(
        default=None, description="names the conversation, as session_id does"
    )
    metadata: Metadata | None = Field(
        default=None, description="up to 16 names of 64 characters with values of 512"
    )
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] | None = Field(
        default=None, description="ignored: all requests have one tier; see priority"
    )
    documents: Annotated[list[Document], Field(max_length=limits.MAX_CHUNKS)] | None = Field(
        default=None,
        description="texts, or objects with text and title; they are placed before the prompt",
    )

    @property
    def include_usage(self) -> bool:
        """Return True if the stream ends with a usage chunk."""
        return self.stream_options is not None and self.stream_options.include_usage

    def refuse_unsupported(self) -> None:
        """Refuse fields that would otherwise be silently ignored.

        Raises:
            FieldError: a field asks for an unsupported feature.
        """
        refuse_fields(self.model_extra or {}, NEUTRAL)

    def common_call(self, caller: RestCaller, options: CallOptions) -> dict[str, Any]:
        """Return the arguments of TextCall that do not depend on the endpoint."""
        self.refuse_unsupported()
        return {
            "model": self.model,
            "options": options,
            "tenant": caller.tenant,
            "key": caller.key,
            "session": options.session_id or "",
            "documents": clean_documents(d.to_text() for d in self.documents or ()),
        }

    def options(self, defaults: CallOptions) -> CallOptions:
        """Collect the option fields; ``defaults`` replace missing fields."""
        given = {option.name: getattr(self, option.rest) for option in _REST_OPTIONS}
        given["stop"] = _as_tuple(given["stop"])
        given["logit_bias"] = _biases(given["logit_bias"])
        given["hint"] = given["hint"] and given["hint"].to_hint()
        given["session_id"] = self._session(given["session_id"])
        return CallOptions(**given).over(defaults)

    def _session(self, session_id: str | None) -> str | None:
        """Return the client's name of a conversation, for affinity only."""
        given = session_id or self.prompt_cache_key or self.user or self.safety_identifier
        return session_name(given)


def session_name(given: str | None) -> str | None:
    """Return a client's name of a conversation as a valid name: hashed if it is none."""
    if not given or _NAME.fullmatch(given):
        return given or None
    return f"h-{blake2b(given.encode(errors='replace'), digest_size=16).hexdigest()}"


class TextPart(BaseModel):
    """A part of a message; types that are not text are refused."""

    model_config = ConfigDict(extra="allow")

    type: str
    text: str | None = None
    refusal: str | None = None


_MESSAGE_REFUSED: Final = ("function_call", "audio", "prefix")


class ChatMessage(BaseModel):
    """One message of a conversation."""

    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    tool_calls: Annotated[list[CallField], Field(max_length=limits.MAX_TOOL_CALLS)] | None = None
    tool_call_id: Annotated[str, Field(max_length=limits.MAX_NAME_CHARS)] | None = None
    refusal: str | None = None
    name: str | None = None

    def to_message(self, index: int) -> Message:
        """Join the parts of the message; OpenAI's role ``developer`` becomes ``system``."""
        where = f"messages[{index}]"
        for name in _MESSAGE_REFUSED:
            if (self.model_extra or {}).get(name) is not None:
                error = FeatureNotSupportedError(f"{where}.{name} is not supported")
                raise FieldError(f"{where}.{name}", error)
        role = "system" if self.role == "developer" else self.role
        calls = tuple(call.to_call() for call in self.tool_calls or ())
        if calls and role != "assistant":
            wrong = UserError(f"{where} has tool_calls, but only the assistant calls tools")
            raise FieldError(f"{where}.tool_calls", wrong)
        if self.role != "assistant" and (self.content is None or self.content == []):
            raise FieldError(f"{where}.content", UserError(f"{where} has no content"))
        if role == "tool" and not self.tool_call_id:
            nameless = UserError(f"{where} answers a call, but has no tool_call_id")
            raise FieldError(f"{where}.tool_call_id", nameless)
        answers = (self.tool_call_id or "") if role == "tool" else ""
        return Message(role, self._text(where), calls, answers)

    def _text(self, where: str) -> str:
        if self.content is None or isinstance(self.content, str):
            return self.content or self.refusal or ""
        texts = []
        for part in self.content:
            text = part.refusal if part.type == "refusal" else part.text
            if part.type not in ("text", "input_text", "refusal") or text is None:
                error = FeatureNotSupportedError(
                    f"{where}: parts of type {part.type!r} are not text"
                )
                raise FieldError(f"{where}.content", error)
            texts.append(text)
        return "".join(texts)


def usage_json(answers: Sequence[TextAnswer | TextEvent], *, n: int = 1) -> dict[str, Any]:
    """Add up usages to OpenAI's object; cached and written tokens are always present.

    The ``answers`` are in the order of their choices, ``n`` to each prompt; a prompt counts once.

    ``cached_answers`` is the number of answers that came from the answer cache, if any.
    ``kv_codec`` is present if reused KV may have passed through a lossy codec, ``selector`` if
    chunks were blended. In both cases the answer may differ from an answer without a cache.
    """
    counted = of_one_prompt(answers, n) if n > 1 else answers
    usages = [answer.usage for answer in counted if answer.usage is not None]
    prompt = sum(u.prompt_tokens for u in usages)
    completion = sum(u.completion_tokens for u in usages)
    details: dict[str, Any] = {
        "cached_tokens": sum(u.hit_tokens.total for u in usages),
        "cache_write_tokens": sum(u.written_tokens for u in usages),
        "blended_tokens": sum(u.blended_tokens for u in usages),
        "recomputed_tokens": sum(u.recomputed_tokens for u in usages),
    }
    if selectors := sorted({str(u.selector) for u in usages if u.selector is not None}):
        details["selector"] = ",".join(selectors)
    if lossy := sorted({str(u.kv_codec) for u in usages if u.kv_codec.is_lossy}):
        details["kv_codec"] = ",".join(lossy)
    if cached := sum(answer.cached for answer in answers):
        details["cached_answers"] = cached
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": details,
    }


def _biases(logit_bias: dict[str, float] | None) -> tuple[tuple[int, float], ...] | None:
    """Return the biases by token id.

    Raises:
        FieldError: a key is not a token id, or two keys are the same id.
    """
    if logit_bias is None:
        return None
    try:
        return _BIAS.from_json(logit_bias)
    except ValueError as error:
        raise FieldError("logit_bias", UserError(f"logit_bias {error}")) from None


def _as_tuple(stop: str | list[str] | None) -> tuple[str, ...]:
    if stop is None:
        return ()
    return (stop,) if isinstance(stop, str) else tuple(stop)


def of_one_prompt(
    answers: Sequence[TextAnswer | TextEvent], n: int
) -> list[TextAnswer | TextEvent]:
    """Return the answers with the usage of a prompt counted once, at its first choice.

    Later choices reuse the prompt; hits of later choices say nothing about the cache.
    """
    return [answer if at % n == 0 else _without_prompt(answer) for at, answer in enumerate(answers)]


def _without_prompt(answer: TextAnswer | TextEvent) -> TextAnswer | TextEvent:
    if answer.usage is None:
        return answer
    usage = replace(
        answer.usage,
        prompt_tokens=0,
        hit_tokens=HitTokens(),
        blended_tokens=0,
        recomputed_tokens=0,
    )
    return replace(answer, usage=usage)
