"""HTTP errors of engines become errors of ours, by who must act."""

from __future__ import annotations

import json

import pytest

from tierkv.integrations.remote.refusals import refusal, stream_error
from tierkv.kvcore.errors import (
    ConfigError,
    ContextTooLongError,
    OverloadedError,
    TierKVError,
    TransportError,
    UnknownModelError,
    UserError,
)

VLLM_CONTEXT = {
    "error": {
        "message": "max_tokens=3000 cannot be greater than max_model_len=2048. Please request "
        "fewer output tokens. (parameter=max_tokens, value=3000)",
        "type": "BadRequestError",
        "code": 400,
    }
}


@pytest.mark.parametrize(
    ("status", "body", "kind", "words"),
    [
        (400, json.dumps(VLLM_CONTEXT), ContextTooLongError, "max_model_len=2048"),
        (400, '{"error": {"message": "bad top_p"}}', UserError, "bad top_p"),
        (400, '{"error": "plain words"}', UserError, "plain words"),
        (422, '{"detail": [{"loc": ["body"]}]}', UserError, "loc"),
        (400, "no JSON at all", UserError, "no JSON at all"),
        (404, '{"message": "The model `x` does not exist"}', UnknownModelError, "`x`"),
        (401, '{"error": "Unauthorized"}', ConfigError, "Unauthorized"),
        (403, "", ConfigError, "HTTP 403"),
        (429, '{"error": {"message": "slow down"}}', OverloadedError, "slow down"),
        (503, "", OverloadedError, "HTTP 503"),
        (500, '{"error": {"message": "EngineCore died"}}', TransportError, "EngineCore died"),
        (504, "", TransportError, "HTTP 504"),
        (400, "[" * 100_000, UserError, "[["),
    ],
)
def test_an_http_error_is_one_of_ours(
    status: int, body: str, kind: type[TierKVError], words: str
) -> None:
    error = refusal(status, body, where="engine at http://e")
    assert type(error) is kind
    assert error.message.startswith("engine at http://e: ") and words in error.message
    assert len(error.message) < 600


def test_a_path_that_is_not_there_asks_whether_the_kind_is_right() -> None:
    error = refusal(404, '{"detail": "Not Found"}', where="engine at http://e")
    assert isinstance(error, UnknownModelError) and "--engine" in error.hint
    lacks_model = refusal(404, '{"message": "The model `x` does not exist"}', where="e")
    assert lacks_model.hint == ""


def test_a_busy_engine_says_when_to_come_again() -> None:
    error = refusal(429, "", where="e", retry_after_s=2.5)
    assert isinstance(error, OverloadedError) and error.retry_after_ms == 2_500
    endless = refusal(503, "", where="e", retry_after_s=1e9)
    assert isinstance(endless, OverloadedError) and endless.retry_after_ms == 60_000


def test_errors_within_a_stream_are_told_from_answers() -> None:
    assert stream_error({"choices": []}, where="e") is None
    refused = stream_error({"error": {"message": "context length", "code": 400}}, where="e")
    assert isinstance(refused, ContextTooLongError)
    lost = stream_error({"error": {"message": "died", "code": "internal"}}, where="e")
    assert isinstance(lost, TransportError)
