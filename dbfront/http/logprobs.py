"""Log-probabilities in the JSON of OpenAI's two APIs.

Chats have an object per token, completions have columns. Bytes that are no whole character show as
U+FFFD in texts; the ``bytes`` of a chat are exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from tierkv.dbfront.answer_token import AnswerToken, SpelledToken

_LEAST: Final = -9_999.0
"""Stands for smaller numbers, as in OpenAI's API and in vLLM."""


def chat_logprobs(tokens: Sequence[AnswerToken]) -> dict[str, Any]:
    """Return ``choices[].logprobs`` of a chat, or of a part of it."""
    content = [
        _token(token) | {"top_logprobs": [_token(one) for one in token.top]} for token in tokens
    ]
    return {"content": content, "refusal": None}


def _token(token: AnswerToken | SpelledToken) -> dict[str, Any]:
    return {
        "token": _text(token),
        "logprob": max(token.logprob, _LEAST),
        "bytes": list(token.spelled),
    }


def completion_logprobs(tokens: Sequence[AnswerToken]) -> dict[str, Any]:
    """Return ``choices[].logprobs`` of a completion, or of a part of it.

    ``top_logprobs`` has the chosen token too, as OpenAI's API does. Of several tokens with equal
    texts, the most likely one is shown.
    """
    return {
        "tokens": [_text(token) for token in tokens],
        "token_logprobs": [max(token.logprob, _LEAST) for token in tokens],
        "top_logprobs": [_alternatives(token) for token in tokens],
        "text_offset": [token.start for token in tokens],
    }


def _alternatives(token: AnswerToken) -> dict[str, float]:
    told: dict[str, float] = {}
    for one in token.top:
        told.setdefault(_text(one), max(one.logprob, _LEAST))
    told.setdefault(_text(token), max(token.logprob, _LEAST))
    return told


def _text(token: AnswerToken | SpelledToken) -> str:
    return token.spelled.decode(errors="replace")
