"""Any server with OpenAI's API: text in, text out; the only cache report is a count of tokens.

The front's ids are bytes here (integrations/remote/text_tokens.py). A conversation is sent to
``/v1/chat/completions`` as messages, a raw prompt to ``/v1/completions``. Sampling parameters
without a name in OpenAI's API are not sent.

The replies that several engines share are read here: OpenAI's JSON (models, choices, usage), and
pages of metrics. Content of an unexpected form raises a RemoteProtocolError with the engine's name.
Pages in Prometheus' text format come from many versions, so unreadable lines are skipped.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final

from tierkv.integrations.remote.door import AnswerPiece, Counts, EngineLook, EngineRequest
from tierkv.integrations.remote.http import EngineHttp
from tierkv.integrations.remote.text_tokens import Spoken, messages_of, tokens_of
from tierkv.kvcore.errors import (
    FeatureNotSupportedError,
    RemoteProtocolError,
    UnknownModelError,
    UserError,
)
from tierkv.kvcore.request import HitTokens

_MOST_ID: Final = 1 << 31


def listed_model(reply: dict[str, Any], served: str, where: str) -> dict[str, Any]:
    """Return the model's entry in ``GET /v1/models``: the named model, or the first.

    Raises:
        UnknownModelError: the named model is missing, or the list is empty.
    """
    listed = reply.get("data")
    if not isinstance(listed, list) or not all(isinstance(m, dict) and "id" in m for m in listed):
        raise RemoteProtocolError(f"{where}: GET /v1/models did not return a list of models")
    found = next((model for model in listed if served in ("", model["id"])), None)
    if found is None:
        names = ", ".join(str(model["id"]) for model in listed) or "none"
        raise UnknownModelError(
            f"{where} serves no model {served!r}" if served else f"{where} serves no model",
            hint=f"The engine serves {names}; select one with engine.served_model.",
        )
    return dict(found)


def only_choice(event: dict[str, Any], where: str) -> dict[str, Any] | None:
    """Return the first choice of a reply or event; None without choices (usage alone)."""
    choices = event.get("choices")
    if not choices:
        return None
    if not isinstance(choices, list) or not isinstance(choices[0], dict):
        raise RemoteProtocolError(f"{where}: choices are not a list of objects")
    return dict(choices[0])


def token_ids(value: Any, where: str) -> tuple[int, ...]:
    """Return the tokens of a piece of an answer; null means no tokens."""
    ids = value if value is not None else []
    if not isinstance(ids, list) or not all(type(t) is int and 0 <= t < _MOST_ID for t in ids):
        raise RemoteProtocolError(f"{where}: token ids are not a list of numbers")
    return tuple(ids)


def counts_of(event: dict[str, Any]) -> Counts | None:
    """Return the token counts of an event's ``usage``; None without ``usage``."""
    usage = event.get("usage")
    if not isinstance(usage, dict):
        return None
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else 0
    return Counts(
        whole(usage.get("prompt_tokens")),
        whole(usage.get("completion_tokens")),
        HitTokens(l1=whole(cached)),
    )


def whole(value: Any) -> int:
    """Return a count; 0 if the value is not a positive integer."""
    return value if isinstance(value, int) and value > 0 else 0


_LINE = re.compile(r"^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})?\s+(\S+)")
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True)
class Sample:
    """One line: labels and value."""

    labels: Mapping[str, str]
    value: float


class MetricsPage:
    """The samples of a page, by name."""

    def __init__(self, text: str) -> None:
        """Parse a page; O(length of the page)."""
        self._samples: dict[str, list[Sample]] = {}
        for line in text.splitlines():
            found = _LINE.match(line)
            if found is None:
                continue
            name, labels, value = found.groups()
            try:
                number = float(value)
            except ValueError:
                continue
            if math.isfinite(number):
                sample = Sample(dict(_LABEL.findall(labels or "")), number)
                self._samples.setdefault(name, []).append(sample)

    def total(self, name: str) -> float:
        """Return the sum of a metric over all labels (ranks, models); 0.0 for an unknown metric."""
        return math.fsum(sample.value for sample in self._samples.get(name, ()))

    def most(self, name: str) -> float:
        """Return the largest value of a metric; 0.0 for an unknown metric."""
        return max((sample.value for sample in self._samples.get(name, ())), default=0.0)

    def labels(self, name: str) -> Mapping[str, str]:
        """Return the labels of a metric's first sample; empty for an unknown metric."""
        samples = self._samples.get(name)
        return samples[0].labels if samples else {}


_CONTEXT_NAMES: Final = ("max_model_len", "context_length", "context_window", "max_context_length")
_SCHEMA_NAME: Final = "answer"


class OpenAiDoor:
    """Implements EngineDoor."""

    score_refusal = "the engine returns only text"
    sampling_fields: tuple[str, ...] = ("presence_penalty", "frequency_penalty", "logit_bias")
    speaks_text = True

    def __init__(self, http: EngineHttp, *, served: str = "") -> None:
        """Create a door; ``served`` names the model if the server has several."""
        self.http = http
        self._served = served
        self._limit_name = "max_tokens"

    async def look(self) -> EngineLook:
        """Ask for the models; OpenAI servers have no common API for load or restarts."""
        model = listed_model(await self.http.get_json("/v1/models"), self._served, self.http.where)
        context = next((n for name in _CONTEXT_NAMES if isinstance(n := model.get(name), int)), 0)
        return EngineLook(served=str(model["id"]), context_tokens=max(0, context))

    async def answer(self, ask: EngineRequest) -> AsyncGenerator[AnswerPiece, None]:
        """Stream an answer; see EngineDoor."""
        if ask.request.resumed_tokens:
            raise FeatureNotSupportedError(
                f"{self.http.where} can't continue an answer that another node began",
                hint="Send the request again.",
            )
        path, body = self._body(ask)
        try:
            async with aclosing(self._pieces(path, body)) as pieces:
                async for piece in pieces:
                    yield piece
        except UserError as error:
            if "max_completion_tokens" not in error.message or "max_tokens" not in body:
                raise
            # OpenAI's newer models use another name for the limit, and refuse this one at once.
            self._limit_name = "max_completion_tokens"
            path, body = self._body(ask)
            async with aclosing(self._pieces(path, body)) as pieces:
                async for piece in pieces:
                    yield piece

    async def _pieces(self, path: str, body: dict[str, Any]) -> AsyncGenerator[AnswerPiece, None]:
        ended, counts = "", None
        async with aclosing(self.http.events(path, body)) as events:
            async for event in events:
                counts = counts_of(event) or counts
                choice = only_choice(event, self.http.where)
                if choice is None:
                    continue
                if text := _text(choice, self.http.where):
                    yield AnswerPiece(tokens_of(text))
                ended = str(choice.get("finish_reason") or ended)
        if not ended:
            raise RemoteProtocolError(f"{self.http.where}: an answer has no finish_reason")
        yield AnswerPiece(ended=ended, counts=counts)

    def _body(self, ask: EngineRequest) -> tuple[str, dict[str, Any]]:
        request, sampling = ask.request, ask.request.sampling
        body: dict[str, Any] = {
            "model": ask.served,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if ask.max_tokens:
            body[self._limit_name] = ask.max_tokens
        if sampling.seed is not None:
            body["seed"] = sampling.seed % (1 << 63)
        if sampling.presence_penalty:
            body["presence_penalty"] = sampling.presence_penalty
        if sampling.frequency_penalty:
            body["frequency_penalty"] = sampling.frequency_penalty
        if sampling.logit_bias:  # The ids are the engine's own.
            body["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias}
        if request.guide:
            body["response_format"] = _response_format(request.guide)
        spoken = messages_of(request.token_ids)
        if spoken[0].role:
            return "/v1/chat/completions", body | {"messages": [_message(one) for one in spoken]}
        return "/v1/completions", body | {"prompt": spoken[0].content}


def _message(spoken: Spoken) -> dict[str, str]:
    return {"role": spoken.role, "content": spoken.content}


def _response_format(schema: str) -> dict[str, Any]:
    named = {"name": _SCHEMA_NAME, "schema": json.loads(schema), "strict": True}
    return {"type": "json_schema", "json_schema": named}


def _text(choice: dict[str, Any], where: str) -> str:
    """Return the new text in the choice of a chat or a completion."""
    delta = choice.get("delta")
    text = delta.get("content") if isinstance(delta, dict) else choice.get("text")
    if text is None:
        return ""
    if not isinstance(text, str):
        raise RemoteProtocolError(f"{where}: the text of an answer is not a string")
    return text
