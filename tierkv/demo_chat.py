"""The demo's chat: ten turns through the openai client, as any chat application would send them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvcore.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ChatRun:
    """A played conversation; times are seconds, tokens are summed over the turns."""

    answers: list[str]
    prompt_tokens: int
    cached_tokens: int
    mean_ttft_s: float
    wall_s: float


def play_chat(base_url: str, questions: Sequence[str], *, use_cache: bool) -> ChatRun:
    """Ask the questions one after the other, each with the whole history.

    Raises:
        ConfigError: the openai package is not installed.
    """
    try:
        import openai  # a development dependency, and a second to import
    except ImportError:
        raise ConfigError("the demo's chat needs openai", hint="pip install openai") from None
    client = openai.OpenAI(base_url=base_url, api_key="none")
    model = client.models.list().data[0].id
    messages: list[Any] = []
    answers: list[str] = []
    first_s, prompt, cached = 0.0, 0, 0
    started = time.monotonic()
    for question in questions:
        messages.append({"role": "user", "content": question})
        asked, answer, first = time.monotonic(), "", 0.0
        stream = client.chat.completions.create(
            model=model, messages=messages, temperature=0, max_tokens=16, stream=True,
            stream_options={"include_usage": True}, extra_body={"use_cache": use_cache},
        )  # fmt: skip
        for chunk in stream:
            if chunk.choices and chunk.choices[0].delta.content:
                first = first or time.monotonic() - asked
                answer += chunk.choices[0].delta.content
            if chunk.usage is not None:
                prompt += chunk.usage.prompt_tokens
                details = chunk.usage.prompt_tokens_details
                cached += (details.cached_tokens or 0) if details else 0
        first_s += first or time.monotonic() - asked
        answers.append(answer)
        messages.append({"role": "assistant", "content": answer})
    client.close()
    wall_s = time.monotonic() - started
    return ChatRun(answers, prompt, cached, first_s / len(questions), wall_s)
