"""The demo's chat: ten turns through the openai client, as a chat application would send them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tierkv.kvcore.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ChatTurn:
    """One turn as seen by the client.

    Attributes:
        answer: the whole answer.
        prompt_tokens: tokens of the history and the question.
        cached_tokens: tokens of the prompt that were loaded instead of computed.
        ttft_s: seconds from sending the request to the first piece of the answer.
        wall_s: seconds to the end of the answer.
    """

    answer: str
    prompt_tokens: int
    cached_tokens: int
    ttft_s: float
    wall_s: float


def play_chat(base_url: str, questions: Sequence[str], *, use_cache: bool) -> list[ChatTurn]:
    """Ask the questions one after the other, each with the whole history.

    Raises:
        ConfigError: the openai package is not installed.
    """
    try:
        import openai  # a development dependency, and takes a second to import
    except ImportError:
        raise ConfigError("the demo's chat needs openai", hint="pip install openai") from None
    messages: list[Any] = []
    turns: list[ChatTurn] = []
    with openai.OpenAI(base_url=base_url, api_key="none") as client:
        model = client.models.list().data[0].id
        for question in questions:
            messages.append({"role": "user", "content": question})
            turns.append(_ask(client, model, messages, use_cache=use_cache))
            messages.append({"role": "assistant", "content": turns[-1].answer})
    return turns


def _ask(client: Any, model: str, messages: list[Any], *, use_cache: bool) -> ChatTurn:
    answer, prompt, cached, first_s = "", 0, 0, 0.0
    asked = time.monotonic()
    stream = client.chat.completions.create(
        model=model, messages=messages, temperature=0, max_tokens=16, stream=True,
        stream_options={"include_usage": True}, extra_body={"use_cache": use_cache},
    )  # fmt: skip
    for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content:
            first_s = first_s or time.monotonic() - asked
            answer += chunk.choices[0].delta.content
        if chunk.usage is not None:
            prompt = chunk.usage.prompt_tokens
            details = chunk.usage.prompt_tokens_details
            cached = (details.cached_tokens or 0) if details else 0
    wall_s = time.monotonic() - asked
    return ChatTurn(answer, prompt, cached, first_s or wall_s, wall_s)
