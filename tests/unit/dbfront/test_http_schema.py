"""Bodies as clients send them, and what becomes of their fields."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

import pytest
from pydantic import ValidationError
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request

from tests.fix_accounts import make_answer
from tests.fix_scheduler import make_model, make_request
from tests.fix_text import text_call
from tierkv.dbfront.contracts import Message, PreparedCall, TextAnswer
from tierkv.dbfront.generation.call_checks import salted_tenant
from tierkv.dbfront.http.app import _answer_error, admit
from tierkv.dbfront.http.completion_bodies import ChatBody, CompletionBody, choices_of
from tierkv.dbfront.http.config import HttpConfig, KeyRing, RestCaller, is_loopback
from tierkv.dbfront.http.endpoints.sql import StatementError
from tierkv.dbfront.http.responses.response_body import ResponseBody
from tierkv.dbfront.http.schema import usage_json
from tierkv.dbfront.http.services import FieldError
from tierkv.kvcore import limits
from tierkv.kvcore.access import ApiKey
from tierkv.kvcore.errors import AuthenticationError, ConfigError, NoNodeError
from tierkv.kvcore.layout import KvCodec
from tierkv.kvcore.request import BlendSelector, HitTokens, ReuseHint, SamplingParams, Usage

USER = [{"role": "user", "content": "Hi"}]


def chat(**fields: object) -> ChatBody:
    return ChatBody.model_validate({"messages": USER, **fields})


def test_openai_fields_become_a_call() -> None:
    body = chat(
        model="m", temperature=0.5, top_p=0.9, max_completion_tokens=7, max_tokens=9, stop="x",
        seed=3, user="someone@example.com", priority=-1, unknown_field={"a": 1},
    )  # fmt: skip
    call = body.to_call(T, 1.0)
    asked = call.options
    assert call.messages == (Message("user", "Hi"),)
    assert (call.model, call.tenant, call.key) == ("m", "t", "k")
    assert (asked.temperature, asked.top_p, asked.seed) == (0.5, 0.9, 3)
    assert (asked.max_tokens, asked.stop, asked.priority) == (7, ("x",), -1)
    assert asked.session_id is not None
    assert re.fullmatch(limits.NAME_PATTERN, asked.session_id)


def test_defaults_are_openais() -> None:
    asked = chat().to_call(T, 1.0).options
    assert (asked.temperature, asked.max_tokens, asked.session_id) == (1.0, None, None)
    completion = CompletionBody.model_validate({"prompt": "x"}).to_calls(T, 1.0)
    assert completion[0].options.max_tokens == 16


def test_prompt_cache_key_is_the_session() -> None:
    asked = chat(prompt_cache_key="conv-1", user="u").to_call(T, 1.0).options
    assert asked.session_id == "conv-1"


@pytest.mark.parametrize(
    ("reuse", "hint"),
    [
        ({"next_turn": True, "next_turn_s": 30}, ReuseHint(next_turn=True, next_turn_s=30.0)),
        ({"next_turn_s": 2.5}, ReuseHint(next_turn=True, next_turn_s=2.5)),
        ({"next_turn": False}, ReuseHint(next_turn=False)),
        ({}, ReuseHint()),
        (None, None),
    ],
)
def test_what_the_client_knows_of_its_next_turn_is_a_hint(
    reuse: dict[str, object] | None, hint: ReuseHint | None
) -> None:
    assert chat(reuse=reuse).to_call(T, 1.0).options.hint == hint
    completion = CompletionBody.model_validate({"prompt": "x", "reuse": reuse})
    assert completion.to_calls(T, 1.0)[0].options.hint == hint


@pytest.mark.parametrize(
    "reuse",
    [
        {"next_turn": "soon"},
        {"next_turn_s": -1},
        {"next_turn_s": "inf"},
        {"next_turn": False, "next_turn_s": 5},
        {"next": True},
        True,
    ],
)
def test_a_next_turn_that_can_not_be_is_refused(reuse: object) -> None:
    with pytest.raises(ValidationError, match="reuse"):
        chat(reuse=reuse)


def test_a_salt_isolates_inside_its_tenant_only() -> None:
    names = {
        salted_tenant("a", None), salted_tenant("a", "s"), salted_tenant("b", "s"),
        salted_tenant("a", "r"), salted_tenant("x" * 128, "s"),
    }  # fmt: skip
    assert len(names) == 5
    assert all(re.fullmatch(limits.NAME_PATTERN, name) for name in names)


def test_parts_are_joined_and_developer_is_system() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": parts}, {"role": "assistant", "content": None}]
    call = ChatBody.model_validate({"messages": messages}).to_call(T, 1.0)
    assert call.messages == (Message("system", "ab"), Message("assistant", ""))


def test_a_refusal_is_read_and_what_no_template_reads_is_refused() -> None:
    parts = [{"type": "refusal", "refusal": "no"}, {"type": "text", "text": "!"}]
    said = [{"role": "assistant", "refusal": "No."}, {"role": "assistant", "content": parts}]
    call = ChatBody.model_validate({"messages": said}).to_call(T, 1.0)
    assert call.messages == (Message("assistant", "No."), Message("assistant", "no!"))
    old = {"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}}
    with pytest.raises(FieldError) as caught:
        ChatBody.model_validate({"messages": [*USER, old]}).to_call(T, 1.0)
    assert caught.value.param == "messages[1].function_call"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("best_of", 2),
        ("top_logprobs", 2),
        ("response_format", {"type": "grammar"}),
        ("response_format", {}),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "a"}}),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"5": 1, "05": 2}),
        ("guided_json", {}),
        ("reasoning_effort", "high"),
        ("store", True),
        ("chat_template_kwargs", {"enable_thinking": False}),
        ("stop_token_ids", [3]),
        ("skip_special_tokens", False),
    ],
)
def test_what_we_do_not_do_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(FieldError, match=field) as caught:
        chat(**{field: value}).to_call(T, 1.0)
    assert caught.value.param == field


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 1),
        ("tools", []),
        ("logprobs", None),
        ("top_k", -1),
        ("store", False),
        ("reasoning_effort", "none"),
    ],
)
def test_neutral_values_are_accepted(field: str, value: object) -> None:
    assert chat(**{field: value}).to_call(T, 1.0)


def test_sampling_fields_become_options() -> None:
    asked = chat(
        top_k=-1, min_p=0.1, presence_penalty=0.5, frequency_penalty=-0.5,
        repetition_penalty=1.1, logit_bias={"7": -100, "5": 1}, min_tokens=2,
    ).to_call(T, 1.0).options  # fmt: skip
    assert (asked.top_k, asked.min_p, asked.min_tokens) == (-1, 0.1, 2)
    assert (asked.presence_penalty, asked.frequency_penalty) == (0.5, -0.5)
    assert (asked.repetition_penalty, asked.logit_bias) == (1.1, ((5, 1.0), (7, -100.0)))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("top_k", -2),
        ("min_p", 1.1),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("repetition_penalty", 0),
        ("logit_bias", {"5": 101}),
        ("logit_bias", {str(i): 1 for i in range(1_025)}),
        ("min_tokens", -1),
    ],
)
def test_sampling_out_of_bounds_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ValidationError, match=field):
        chat(**{field: value})


def test_a_json_schema_holds_the_answer() -> None:
    schema = {"type": "string", "enum": ["é"]}
    asked = {"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": schema}}
    call = chat(response_format=asked).to_call(T, 1.0)
    assert json.loads(call.json_schema) == schema
    assert chat(response_format={"type": "text"}).to_call(T, 1.0).json_schema == ""
    response = ResponseBody.model_validate(
        {"input": "x", "text": {"format": {"type": "json_object"}}}
    )
    for body in (chat(response_format={"type": "json_object"}), response):
        assert json.loads(body.to_call(T, 1.0).json_schema) == {"type": "object"}


def test_a_response_has_one_choice() -> None:
    for field, value in (("n", 2), ("response_format", {"type": "json_object"})):
        body = ResponseBody.model_validate({"input": "x", field: value})
        with pytest.raises(FieldError, match=field):
            body.to_call(T, 1.0)


def test_logprobs_of_both_apis() -> None:
    assert chat(logprobs=True, top_logprobs=20).to_call(T, 1.0).logprobs == 20
    assert chat(logprobs=True).to_call(T, 1.0).logprobs == 0
    assert chat(logprobs=False, top_logprobs=0).to_call(T, 1.0).logprobs is None
    for given, want in ((0, 0), (20, 20), (False, None), (None, None)):
        body = CompletionBody.model_validate({"prompt": "x", "logprobs": given})
        assert body.to_calls(T, 1.0)[0].logprobs == want
    with pytest.raises(FieldError, match="number of alternatives"):
        CompletionBody.model_validate({"prompt": "x", "logprobs": True}).to_calls(T, 1.0)
    for wrong in (21, -1, 1.5):
        with pytest.raises(ValidationError, match="logprobs"):
            CompletionBody.model_validate({"prompt": "x", "logprobs": wrong})
    with pytest.raises(ValidationError, match="top_logprobs"):
        chat(logprobs=True, top_logprobs=21)


def test_choices_are_repeatable_and_bounded() -> None:
    assert chat(n=3, best_of=3).choices == 3 and chat().choices == 1
    for wrong in (0, 129):
        with pytest.raises(ValidationError, match="n"):
            chat(n=wrong)
    many = CompletionBody.model_validate({"prompt": ["x"] * 9, "n": 128})
    with pytest.raises(FieldError, match="1152 answers") as caught:
        many.to_calls(T, 1.0)
    assert caught.value.param == "n"
    request = make_request(sampling=SamplingParams(seed=(1 << 63) - 1))
    prepared = PreparedCall(text_call(prompt="x"), make_model(), request)
    first, second, third = choices_of([prepared], 3)
    assert first is prepared
    assert [second.request.sampling.seed, third.request.sampling.seed] == [0, 1]
    assert len({one.request.request_id for one in (first, second, third)}) == 3


def test_usage_counts_a_prompt_once_for_all_its_choices() -> None:
    usage = Usage(10, 3, HitTokens(l2=4), written_tokens=6)
    answers = [make_answer(usage=usage)] * 4
    told = usage_json(answers, n=2)
    assert (told["prompt_tokens"], told["completion_tokens"]) == (20, 12)
    assert told["prompt_tokens_details"]["cached_tokens"] == 8


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
        {"role": "user", "content": [{"type": "text"}]},
    ],
)
def test_only_text_messages(message: dict[str, object]) -> None:
    with pytest.raises(FieldError, match=r"messages\[0\]"):
        ChatBody.model_validate({"messages": [message]}).to_call(T, 1.0)


@pytest.mark.parametrize(
    ("prompt", "count"), [("a", 1), (["a", "b"], 2), ([1, 2], 1), ([[1], [2], [3]], 3)]
)
def test_prompts_come_in_four_shapes(prompt: object, count: int) -> None:
    assert len(CompletionBody.model_validate({"prompt": prompt}).to_calls(T, 1.0)) == count


def test_no_prompts_and_too_many_are_refused() -> None:
    for prompt in ([], ["x"] * (limits.MAX_HTTP_PROMPTS + 1)):
        with pytest.raises(FieldError):
            CompletionBody.model_validate({"prompt": prompt}).to_calls(T, 1.0)


def answers(*usages: Usage) -> list[TextAnswer]:
    return [make_answer(usage=usage) for usage in usages]


def test_usage_counts_answers_from_the_answer_cache() -> None:
    cached = [make_answer(cached=True), make_answer(), make_answer(cached=True)]
    assert usage_json(cached)["prompt_tokens_details"]["cached_answers"] == 2
    assert "cached_answers" not in usage_json(cached[1:2])["prompt_tokens_details"]


def test_usage_always_has_both_cache_fields() -> None:
    one = usage_json(answers(Usage(10, 2, HitTokens(1, 2, 3, 1), 4)))
    assert one["prompt_tokens_details"] == {
        "cached_tokens": 7,
        "cache_write_tokens": 4,
        "blended_tokens": 0,
        "recomputed_tokens": 0,
    }
    both = usage_json(
        answers(Usage(1, 1, kv_codec=KvCodec.INT4), Usage(1, 1, kv_codec=KvCodec.NONE))
    )
    assert both["prompt_tokens_details"]["kv_codec"] == "int4"
    assert one["total_tokens"] == 12


def test_usage_tells_what_was_blended() -> None:
    blended = Usage(
        9, 1, HitTokens(l1=6), blended_tokens=6, recomputed_tokens=2, selector=BlendSelector.QUERY
    )
    details = usage_json(answers(blended, Usage(9, 1), blended))["prompt_tokens_details"]
    assert (details["blended_tokens"], details["recomputed_tokens"]) == (12, 4)
    assert details["selector"] == "query"


def test_documents_are_text_or_objects_and_reach_every_call() -> None:
    given = ["a ", {"text": "b", "title": "T", "id": 7}, {"text": " "}]
    assert chat(documents=given).to_call(T, 1.0).documents == ("a", "T\nb")
    body = CompletionBody.model_validate({"prompt": ["x", "y"], "documents": given})
    assert [call.documents for call in body.to_calls(T, 1.0)] == [("a", "T\nb")] * 2


def test_blending_fields() -> None:
    plain = chat().to_call(T, 1.0).options
    assert (plain.blend, plain.recompute_ratio, plain.selector) == (None, None, None)
    fields = {"blend": True, "recompute_ratio": 0.5, "selector": "query", "chunk_separator": "#"}
    asked = chat(**fields).to_call(T, 1.0).options
    assert (asked.blend, asked.recompute_ratio, asked.chunk_separator) == (True, 0.5, "#")
    assert asked.selector is BlendSelector.QUERY


@pytest.mark.parametrize(
    ("fields", "where", "says"),
    [
        ({"documents": "a"}, ("documents",), "valid list"),
        ({"documents": [1]}, ("documents", 0), "a document must be text"),
        ({"documents": [{"title": "x"}]}, ("documents", 0, "text"), "required"),
        ({"documents": ["x"] * (limits.MAX_CHUNKS + 1)}, ("documents",), "at most 1024"),
        ({"recompute_ratio": 0}, ("recompute_ratio",), "greater than 0"),
        ({"recompute_ratio": 1.01}, ("recompute_ratio",), "less than or equal to 1"),
        ({"selector": "best"}, ("selector",), "hkvd"),
        ({"blend": "perhaps"}, ("blend",), "boolean"),
    ],
)
def test_blending_fields_that_can_not_be(
    fields: dict[str, object], where: tuple[str | int, ...], says: str
) -> None:
    with pytest.raises(ValidationError) as caught:
        chat(**fields)
    (error,) = caught.value.errors()
    assert error["loc"] == where
    assert says in error["msg"]


@pytest.mark.parametrize(
    ("host", "inside"),
    [("127.0.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("::", False)],
)
def test_public_addresses_need_keys(host: str, inside: bool) -> None:
    assert is_loopback(host) is inside
    HttpConfig(host=host, api_keys={"k": "t"}).check()
    if not inside:
        with pytest.raises(ConfigError, match="without API keys"):
            HttpConfig(host=host).check()


T = RestCaller("t", "k")
GOOD = {
    "host": "127.0.0.1:8000",
    "content-type": "application/json",
    "authorization": "Bearer secret",
}
HASHED = "sha256:" + hashlib.sha256(b"secret").hexdigest()


@pytest.mark.parametrize(
    ("config", "headers", "says"),
    [
        ({"has_users": True}, {}, "Set front.api_keys"),
        ({}, {"host": "evil.example:8000"}, "421: .*front.allowed_hosts"),
        ({}, {"host": ""}, "421"),
        ({"allowed_hosts": ("db.example",), "host": "0.0.0.0"}, {"host": "evil.example"}, "421"),
        ({}, {"origin": "https://evil.example"}, "403: .*front.allowed_hosts"),
        ({}, {"origin": "null"}, "403"),
        ({"allowed_hosts": ("*",)}, {"origin": "http://evil.example"}, "403"),
        ({}, {"origin": "http://127.0.0.1:3000"}, "403"),
        ({}, {"content-type": "text/plain"}, "415: .*-H 'Content-Type: application/json'"),
        ({}, {"content-type": "application/x-www-form-urlencoded"}, "415"),
        ({}, {"content-type": ""}, "415"),
        ({}, {"content-encoding": "gzip"}, "415: the body is encoded as 'gzip'"),
        (
            {"api_keys": {HASHED: "t"}},
            {"authorization": f"Bearer {HASHED}"},
            "the API key is not valid",
        ),
    ],
)
def test_strangers_are_refused(config: dict[str, Any], headers: dict[str, str], says: str) -> None:
    with pytest.raises((AuthenticationError, HTTPException)) as caught:
        admit(KeyRing(HttpConfig(**config)), "POST", "/v1/sql", Headers(GOOD | headers))
    hint = getattr(caught.value, "hint", "")
    assert re.search(says, f"{caught.value} {hint}")


@pytest.mark.parametrize(
    ("config", "headers"),
    [
        ({}, {}),
        ({}, {"host": "LOCALHOST:8000"}),
        ({}, {"host": "[::1]:8000", "origin": "http://[::1]:8000"}),
        ({}, {"content-type": "application/json; charset=utf-8"}),
        ({"host": "0.0.0.0", "api_keys": {"secret": "default"}}, {"host": "any.example"}),
        ({"allowed_hosts": ("db.example",)}, {"origin": "https://db.example"}),
        ({"allowed_hosts": ("*",)}, {"host": "any.example", "origin": "http://any.example"}),
        ({"own_hosts": ("node-7",)}, {"host": "node-7:80"}),
        ({"api_keys": {HASHED: "default"}, "has_users": True}, {}),
    ],
)
def test_own_clients_are_admitted(config: dict[str, Any], headers: dict[str, str]) -> None:
    assert (
        admit(KeyRing(HttpConfig(**config)), "POST", "/v1/sql", Headers(GOOD | headers))
        == RestCaller()
    )
    HttpConfig(**config).check()


def test_a_malformed_hash_of_a_key_is_refused_at_start() -> None:
    with pytest.raises(ConfigError, match="malformed hash"):
        HttpConfig(api_keys={"sha256:abc": "t"}).check()


async def test_a_key_that_is_younger_than_the_last_look_is_looked_up() -> None:
    keys, caller = KeyRing(HttpConfig()), RestCaller("sales", "crm")
    assert await keys.has_key(RestCaller("sales"))
    assert not await keys.has_key(caller)

    async def look() -> None:
        keys.stored = {"digest": ApiKey("crm", "sales", "digest", 1.0)}

    keys.look = look
    assert await keys.has_key(caller)
    assert not await keys.has_key(RestCaller("another", "crm"))


async def test_an_ordinary_503_of_a_statement_is_no_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    request = Request({"type": "http", "method": "POST", "path": "/v1/sql", "headers": []})
    answer = await _answer_error(request, StatementError(NoNodeError("no node serves m")))
    assert answer.status_code == 503
    assert caplog.records == []
    await _answer_error(request, RuntimeError("ours"))
    assert [record.getMessage() for record in caplog.records] == ["POST /v1/sql broke"]
