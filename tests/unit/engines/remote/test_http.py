"""Events out of bytes, however they are cut; HTTP errors of engines become errors of ours."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.integrations.remote.http import EventDecoder, refusal, stream_error
from tierkv.kvcore import limits
from tierkv.kvcore.errors import (
    ConfigError,
    ContextTooLongError,
    OverloadedError,
    RemoteProtocolError,
    TierKVError,
    TransportError,
    UnknownModelError,
    UserError,
)

TEXTS = st.text(st.characters(exclude_characters="\n\r", exclude_categories=["Cs"]), min_size=1)


@given(st.lists(TEXTS, max_size=5), st.data())
def test_events_come_out_whole_however_bytes_are_cut(texts: list[str], data: st.DataObject) -> None:
    stream = b"".join(f"data: {text}\n\n".encode() for text in texts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6)))
    decoder, got = EventDecoder(), []
    for start, stop in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        got += decoder.push(stream[start:stop])
    assert got == texts


def test_other_line_ends_are_text() -> None:
    assert EventDecoder().push("data: a\u2028b\x85c\x0bd\n\n".encode()) == ["a\u2028b\x85c\x0bd"]


def test_comments_names_and_carriage_returns_are_passed_over() -> None:
    sent = b": ping\r\n\r\nevent: x\r\nid: 7\r\ndata:1\r\ndata: 2\r\n\r\n"
    assert EventDecoder().push(sent) == ["1\n2"]


def test_what_never_ends_or_is_no_text_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_ENGINE_REPLY_BYTES", 64)
    with pytest.raises(RemoteProtocolError, match="exceeds 64 bytes"):
        EventDecoder().push(b"data: " + b"x" * 100)
    decoder = EventDecoder()
    with pytest.raises(RemoteProtocolError, match="exceeds"):
        for _ in range(20):
            decoder.push(b"data: 12345678\n")
    with pytest.raises(RemoteProtocolError, match="UTF-8"):
        EventDecoder().push(b"data: \xff\n\n")


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
