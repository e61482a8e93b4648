"""The real HTTP server on loopback, asked by the openai client and by raw sockets."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
from fastapi.routing import APIRoute

from tests.fix_meta import leave
from tests.fix_text import Front, running_front, text_call, write_model_folder
from tierkv.dbfront.databases.duckdb_engine import DuckDbConfig
from tierkv.dbfront.http.app import PUBLIC_PATHS
from tierkv.dbfront.http.config import HttpConfig
from tierkv.dbfront.http.endpoints.metrics import Metrics
from tierkv.dbfront.http.server import HttpServer
from tierkv.dbfront.statement.server import DuckDbSqlServer
from tierkv.kvcore import limits
from tierkv.kvcore.errors import ConfigError
from tierkv.kvcore.layout import KvCodec
from tierkv.kvcore.request import HitTokens, ReusePolicy
from tierkv.metaserver.client import Namespace

pytestmark = pytest.mark.integration

SENT = "host: 127.0.0.1\r\ncontent-type: application/json\r\n"
ASK = [{"role": "user", "content": "Tell me"}]
FAST = {"keep_alive_interval_s": 0.05, "first_event_wait_s": 0.1, "drain_timeout_s": 1.0}


@dataclass
class Door:
    """A running server, the fakes behind it, and a client."""

    front: Front
    server: HttpServer
    client: openai.AsyncOpenAI

    async def raw(self, method: str, path: str, body: bytes = b"", **headers: str) -> Reply:
        """One request over a plain socket."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.server.port)
        try:
            lines = [f"{method} {path} HTTP/1.1", "connection: close"]
            given = {"host": "127.0.0.1", "content_type": "application/json"} | headers
            lines += [f"{name.replace('_', '-')}: {value}" for name, value in given.items()]
            lines += [f"content-length: {len(body)}", "", ""]
            writer.write("\r\n".join(lines).encode() + body)
            await writer.drain()
            head, _, rest = (await reader.read()).partition(b"\r\n\r\n")
        finally:
            writer.close()
            await writer.wait_closed()
        first, *others = head.decode().split("\r\n")
        named = dict(line.lower().split(": ", 1) for line in others)
        return Reply(int(first.split()[1]), named, rest)


@dataclass
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


@asynccontextmanager
async def open_door(folder: Path, **config: Any) -> AsyncIterator[Door]:
    async with running_front(folder) as front:
        metrics = Metrics(front.dispatcher.snapshot, front.dispatcher.scale)
        front.generation.reducers.append(metrics.take)
        server = HttpServer(
            HttpConfig(port=0, **(FAST | config)), front.generation, metrics=metrics
        )
        port = await server.start()
        client = openai.AsyncOpenAI(
            base_url=f"http://127.0.0.1:{port}/v1", api_key="key-1", max_retries=0
        )
        try:
            yield Door(front, server, client)
        finally:
            await client.close()
            await server.stop()


@pytest.fixture
async def door(tmp_path: Path) -> AsyncIterator[Door]:
    async with open_door(write_model_folder(tmp_path)) as door:
        yield door


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


async def test_chat_whole_and_streamed_are_the_same(door: Door) -> None:
    door.front.node.hits = HitTokens(l1=2, l3=3)
    whole = await door.client.chat.completions.create(
        model="tiny", messages=ASK, max_tokens=20, temperature=0, extra_body={"ignore_eos": True}
    )
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 20
    details = whole.usage.prompt_tokens_details
    assert details is not None
    assert details.cached_tokens == 5
    assert details.model_dump()["cache_write_tokens"] >= 0
    stream = await door.client.chat.completions.create(
        model="tiny",
        messages=ASK,
        max_tokens=20,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    chunks = [chunk async for chunk in stream]
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    finish = chunks[-2]
    assert finish.choices[0].finish_reason == "length"
    assert finish.choices[0].delta.content is None
    assert not chunks[-1].choices
    assert chunks[-1].usage == whole.usage
    assert all(chunk.usage is None for chunk in chunks[:-1])


async def test_without_include_usage_no_chunk_has_one(door: Door) -> None:
    body = json.dumps({"messages": ASK, "stream": True, "max_tokens": 3}).encode()
    reply = await door.raw("POST", "/v1/chat/completions", body)
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert b'"usage"' not in reply.body
    assert b"data: [DONE]\n\n" in reply.body


async def test_completions_take_text_lists_and_token_ids(door: Door) -> None:
    options = {"model": "tiny", "max_tokens": 8, "temperature": 0}
    one = await door.client.completions.create(prompt="ab", **options)
    ids = (await door.front.generation.prepare(_call("ab"))).request.token_ids
    same = await door.client.completions.create(prompt=list(ids), **options)
    many = await door.client.completions.create(prompt=["ab", "cd"], **options)
    assert one.choices[0].text == same.choices[0].text == many.choices[0].text
    assert [choice.index for choice in many.choices] == [0, 1]
    assert many.usage is not None
    assert many.usage.prompt_tokens == 6


async def test_embeddings_take_text_lists_and_token_ids(door: Door) -> None:
    for form in (openai.omit, "float"):  # Without a form, the client asks for base64.
        found = await door.client.embeddings.create(
            model="tiny", input=["ab", "cd"], encoding_format=form
        )
        assert [each.index for each in found.data] == [0, 1]
        assert found.data[1].embedding == pytest.approx([0.6, 0.8])
        assert (found.model, found.usage.prompt_tokens, found.usage.total_tokens) == ("tiny", 6, 6)
    ids = list((await door.front.generation.prepare(_call("ab"))).request.token_ids)
    one = await door.client.embeddings.create(model="tiny", input=ids, dimensions=2)
    two = await door.client.embeddings.create(model="tiny", input=[ids, ids])
    assert (len(one.data), len(two.data)) == (1, 2)
    for wrong, param in (([], "input"), (["a", ""], "input"), (["a"] * 1_025, "input")):
        with pytest.raises(openai.BadRequestError) as caught:
            await door.client.embeddings.create(model="tiny", input=wrong)
        assert caught.value.param == param
    with pytest.raises(openai.OpenAIError, match="have 2 dimensions"):
        await door.client.embeddings.create(model="tiny", input="a", dimensions=3)
    with pytest.raises(openai.NotFoundError, match="no model"):
        await door.client.embeddings.create(model="large", input="a")


async def test_prompts_become_tokens_and_tokens_text(door: Door) -> None:
    async def post(path: str, **body: Any) -> Any:
        reply = await door.raw("POST", path, json.dumps(body).encode())
        return reply.json() | {"status": reply.status}

    made = await post("/tokenize", model="tiny", prompt="ab")
    ids = list((await door.front.generation.prepare(_call("ab"))).request.token_ids)
    assert made == {"count": 3, "max_model_len": 4_096, "tokens": ids, "status": 200}
    assert (await post("/detokenize", tokens=ids[1:]))["prompt"] == "ab"
    chat = await post("/tokenize", messages=[{"role": "user", "content": "ab"}])
    assert "ab" in (await post("/detokenize", tokens=chat["tokens"]))["prompt"]
    assert chat["count"] > 3
    long = await post("/tokenize", prompt="a" * 9_000)
    assert long["count"] == 9_001, "longer than the context, which is what a client asks about"
    for path, body, says in (
        ("/tokenize", {}, "either prompt or messages"),
        ("/tokenize", {"prompt": "a", "model": "large"}, "no model 'large'"),
        ("/detokenize", {"tokens": [999_999]}, "token ids must be in"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
    ):
        refused = await post(path, **body)
        assert refused["status"] in (400, 404)
        assert says in refused["error"]["message"]


async def test_streamed_completions_of_several_prompts_are_told_apart(door: Door) -> None:
    options: dict[str, Any] = {"model": "tiny", "max_tokens": 8, "temperature": 0}
    whole = await door.client.completions.create(prompt=["ab", "cd"], **options)
    stream = await door.client.completions.create(
        prompt=["ab", "cd"], stream=True, stream_options={"include_usage": True}, **options
    )
    texts, usage = ["", ""], None
    async for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
        usage = chunk.usage or usage
    assert texts == [choice.text for choice in whole.choices]
    assert usage == whole.usage


async def test_stop_strings_and_seeds(door: Door) -> None:
    options: dict[str, Any] = {"model": "tiny", "messages": ASK, "max_tokens": 20}
    options["extra_body"] = {"ignore_eos": True}
    first = await door.client.chat.completions.create(seed=7, **options)
    again = await door.client.chat.completions.create(seed=7, **options)
    other = await door.client.chat.completions.create(seed=8, **options)
    text = first.choices[0].message.content
    assert text is not None
    assert text == again.choices[0].message.content != other.choices[0].message.content
    cut = await door.client.chat.completions.create(seed=7, stop=[text[5:8]], **options)
    assert cut.choices[0].message.content == text[: text.index(text[5:8])]
    assert cut.choices[0].finish_reason == "stop"


async def test_models_are_listed_and_found(door: Door) -> None:
    assert [m.id async for m in door.client.models.list()] == ["tiny"]
    model = await door.client.models.retrieve("tiny")
    told = model.model_dump()
    assert told["max_model_len"] == told["max_input_tokens"] == 4_096
    assert (told["type"], told["display_name"]) == ("model", "tiny")  # For Anthropic's clients.
    with pytest.raises(openai.NotFoundError) as caught:
        await door.client.models.retrieve("none")
    assert caught.value.code == "model_not_found"


async def test_errors_reach_the_client_in_its_own_classes(door: Door) -> None:
    create = door.client.chat.completions.create
    with pytest.raises(openai.NotFoundError, match="The served models are tiny"):
        await create(model="huge", messages=ASK)
    with pytest.raises(openai.BadRequestError) as caught:
        await create(model="tiny", messages=ASK, max_tokens=100_000)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as caught:
        await create(model="tiny", messages=ASK, temperature=9)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as caught:
        await create(model="tiny", messages=ASK, extra_body={"best_of": 2})
    assert (caught.value.code, caught.value.param) == ("not_supported", "best_of")
    assert caught.value.request_id
    door.front.node.queue_limit = 0
    with pytest.raises(openai.RateLimitError) as limited:
        await create(model="tiny", messages=ASK)
    assert limited.value.code == "overloaded"
    assert int(limited.value.response.headers["retry-after-ms"]) > 0
    with pytest.raises(openai.RateLimitError):
        await create(model="tiny", messages=ASK, stream=True)


async def test_the_client_retries_an_overload_by_our_hint(door: Door) -> None:
    door.front.node.queue_limit = 0
    patient = door.client.with_options(max_retries=3)
    answer = asyncio.create_task(
        patient.chat.completions.create(model="tiny", messages=ASK, max_tokens=2)
    )
    await until(lambda: door.front.dispatcher.snapshot().failed > 0)
    door.front.node.queue_limit = 10
    assert (await answer).choices


async def test_a_lost_node_is_an_error_inside_the_stream(door: Door) -> None:
    door.front.node.die_after, door.front.node.stays_dead = 3, True
    stream = await door.client.chat.completions.create(
        model="tiny", messages=ASK, stream=True, extra_body={"ignore_eos": True}
    )
    with pytest.raises(openai.APIError) as caught:
        async for _ in stream:
            pass
    assert caught.value.code == "node_lost"


async def test_keep_alive_comments_while_waiting(door: Door) -> None:
    door.front.node.gate.clear()
    body = json.dumps({"messages": ASK, "stream": True, "max_tokens": 2}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", door.server.port)
    head = f"POST /v1/chat/completions HTTP/1.1\r\n{SENT}content-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    async with asyncio.timeout(10):
        await reader.readuntil(b": keep-alive\n\n")
        door.front.node.gate.set()
        await reader.readuntil(b"data: [DONE]\n\n")
    writer.close()
    await writer.wait_closed()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_a_client_that_hangs_up_cancels_its_request(
    door: Door, path: str, stream: bool
) -> None:
    node = door.front.node
    node.gate.clear()
    body = json.dumps({"messages": ASK, "prompt": "x", "stream": stream}).encode()
    _, writer = await asyncio.open_connection("127.0.0.1", door.server.port)
    head = f"POST {path} HTTP/1.1\r\n{SENT}content-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await until(lambda: bool(node.running))
    writer.close()
    await writer.wait_closed()
    await until(lambda: bool(node.cancelled))
    assert not node.running


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/sql"])
async def test_a_client_that_hangs_up_within_its_body_is_no_error(
    door: Door, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", door.server.port)
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n"
    writer.write(f"{head}content-type: application/json\r\n\r\n{{".encode())
    await writer.drain()
    with caplog.at_level("INFO"):
        writer.close()
        await writer.wait_closed()
        await until(lambda: any(path in record.getMessage() for record in caplog.records))
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code"),
    [
        ("GET", "/nowhere", b"", 404, "invalid_request"),
        ("GET", "/v1/chat/completions", b"", 405, "invalid_request"),
        ("POST", "/v1/chat/completions", b"{", 400, "invalid_request"),
        ("POST", "/v1/chat/completions", b"", 400, "invalid_request"),
        ("POST", "/v1/chat/completions", b"[1]", 400, "invalid_request"),
        ("POST", "/v1/chat/completions", b"[" * 100_000, 400, "invalid_request"),
        ("POST", "/v1/chat/completions", b'{"messages": []}', 400, "invalid_request"),
        ("POST", "/v1/chat/completions", b'{"messages":[{"role":"x"}]}', 400, "invalid_request"),
        ("POST", "/v1/completions", b'{"prompt": {}}', 400, "invalid_request"),
        ("POST", "/v1/completions", b'{"prompt": "x", "echo": true}', 400, "not_supported"),
        ("POST", "/v1/completions", b'{"prompt": [999999]}', 400, "invalid_argument"),
        ("POST", "/v1/completions", b'{"prompt":"x","cache_salt":"a b"}', 400, "invalid_request"),
        ("POST", "/v1/sql", b'{"sql": "select 1"}', 404, "invalid_request"),
    ],
)
async def test_every_refusal_has_openais_shape(
    door: Door, method: str, path: str, body: bytes, status: int, code: str
) -> None:
    reply = await door.raw(method, path, body, x_request_id="mine-1")
    error = reply.json()["error"]
    assert reply.status == status
    assert sorted(error) == ["code", "message", "param", "type"]
    assert error["code"] == code
    assert error["type"] == "invalid_request_error"
    assert reply.headers["x-request-id"] == "mine-1"


CHAT = ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]})
TEXT = ("/v1/completions", {"prompt": "x"})
RESPONSE = ("/v1/responses", {"input": "x"})
MESSAGE = ("/v1/messages", {"max_tokens": 4, "messages": [{"role": "user", "content": "x"}]})


@pytest.mark.parametrize(
    ("asked", "field", "value"),
    [
        (CHAT, "max_tokens", "true"),
        (CHAT, "max_completion_tokens", '"5"'),
        (CHAT, "temperature", '"1"'),
        (CHAT, "temperature", "NaN"),
        (CHAT, "seed", "true"),
        (CHAT, "top_k", "2.5"),
        (CHAT, "stream", "1"),
        (CHAT, "n", '"2"'),
        (CHAT, "parallel_tool_calls", '"false"'),
        (CHAT, "logprobs", "1"),
        (TEXT, "max_tokens", "false"),
        (TEXT, "presence_penalty", "true"),
        (TEXT, "prompt", "[true]"),
        (RESPONSE, "max_output_tokens", "true"),
        (RESPONSE, "store", '"false"'),
        (RESPONSE, "top_p", "Infinity"),
        (MESSAGE, "max_tokens", "true"),
        (MESSAGE, "temperature", "NaN"),
        (MESSAGE, "top_k", '"3"'),
        (MESSAGE, "top_k", "-1"),
        (MESSAGE, "stream", '"yes"'),
        (MESSAGE, "metadata", '{"user_id": 3}'),
        (("/v1/embeddings", {"input": "x"}), "dimensions", "true"),
        (("/v1/kv/pin", {"prompt": "x"}), "keep_s", '"60"'),
    ],
)
async def test_a_value_of_another_type_is_refused_by_its_field(
    door: Door, asked: tuple[str, dict[str, Any]], field: str, value: str
) -> None:
    path, fields = asked
    body = json.dumps(fields | {field: "HERE"}).replace('"HERE"', value)
    reply = await door.raw("POST", path, body.encode())
    assert reply.status == 400, reply.body
    assert field in reply.json()["error"]["message"]
    if path == "/v1/messages":
        assert reply.json()["type"] == "error"
    else:
        assert reply.json()["error"]["param"].startswith(field)


async def test_whole_numbers_may_be_written_as_floats_but_nan_is_no_number(door: Door) -> None:
    fields = '"messages": [{"role": "user", "content": "x"}], "model": "tiny"'
    path = "/v1/chat/completions"
    whole = await door.raw("POST", path, f'{{{fields}, "max_tokens": 4.0}}'.encode())
    assert (whole.status, whole.json()["usage"]["completion_tokens"]) == (200, 4)
    schema = '{"type": "json_schema", "json_schema": {"schema": {"minimum": NaN}}}'
    reply = await door.raw("POST", path, f'{{{fields}, "response_format": {schema}}}'.encode())
    assert reply.status == 400 and "NaN, which is not JSON" in reply.json()["error"]["message"]


async def test_a_browser_and_a_balancer_are_answered(door: Door) -> None:
    page = await door.raw("GET", "/", b"")
    assert (page.status, page.headers["content-type"]) == (200, "text/plain; charset=utf-8")
    assert b"POST /v1/chat/completions" in page.body
    assert b"SQL" not in page.body, "this front has neither an SQL server nor a port for it"
    for path in ("/", "/livez", "/readyz", "/health"):
        assert (await door.raw("HEAD", path, b"")).status == 200


async def test_bodies_have_a_limit(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_HTTP_BODY_BYTES", 100)
    reply = await door.raw("POST", "/v1/completions", b" " * 101)
    assert reply.status == 413
    assert "longer than 100 bytes" in reply.json()["error"]["message"]
    assert reply.headers["connection"] == "close"
    chunked = b"65\r\n" + b" " * 0x65 + b"\r\n0\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", door.server.port)
    head = f"POST /v1/completions HTTP/1.1\r\n{SENT}transfer-encoding: chunked\r\n\r\n".encode()
    writer.write(head + chunked)
    assert b" 413 " in await reader.readline()
    writer.close()
    await writer.wait_closed()


async def test_probes_tell_alive_from_ready(door: Door) -> None:
    assert (await door.raw("GET", "/livez")).status == 200
    ready = await door.raw("GET", "/readyz?verbose")
    assert ready.json()["checks"]["models"] == "ok"
    fleet = door.front.dispatcher.state.fleet
    fleet.records.clear()
    await leave(door.front.meta)
    fleet.see((), 0.0)  # as the next look at the meta server does
    reply = await door.raw("GET", "/health")
    assert reply.status == 503
    assert "models" in reply.json()["failing"]
    assert (await door.raw("GET", "/livez")).status == 200


async def test_what_a_front_can_do_without_only_degrades_it(door: Door) -> None:
    async def directory() -> str:
        return "no meta server answers"

    door.server._services.checks = {"directory": directory}
    for path in ("/readyz", "/health"):
        assert (await door.raw("GET", path)).status == 200
        body = (await door.raw("GET", f"{path}?verbose")).json()
        assert body["status"] == "degraded" and body["failing"] == {}
        assert body["degraded"] == {"directory": "no meta server answers"}


async def test_an_autoscaler_is_told_of_queues_and_times(door: Door) -> None:
    before = json.loads((await door.raw("GET", "/v1/scale")).body)
    (model,) = before["models"]
    assert (model["nodes"] > 0, model["ttft_s"], model["waiting"]) == (True, None, 0)
    await door.client.chat.completions.create(model="tiny", messages=ASK)
    (model,) = json.loads((await door.raw("GET", "/v1/scale")).body)["models"]
    assert model["ttft_s"] >= 0.0 and 0.0 <= model["hit_ratio"] <= 1.0
    text = (await door.raw("GET", "/metrics")).body.decode()
    assert f'tierkv_scale_ttft_seconds{{model="{model["model"]}"}}' in text
    assert "tierkv_scale_pool_used_bytes" in text


async def test_metrics_exist_at_zero_and_count(door: Door) -> None:
    before = (await door.raw("GET", "/metrics")).body.decode()
    for series in (
        'tierkv_requests_total{model="tiny",outcome="stop"} 0.0',
        'tierkv_hit_tokens_total{model="tiny",tier="L3"} 0.0',
        'tierkv_time_to_first_token_seconds_count{model="tiny"} 0.0',
        'tierkv_front_cache_errors_total{kind="transport_error"} 0.0',
        'tierkv_nodes{state="alive"} 1.0',
    ):
        assert series in before
    door.front.node.hits = HitTokens(l3=4)
    await door.client.chat.completions.create(
        model="tiny", messages=ASK, max_tokens=5, extra_body={"ignore_eos": True}
    )
    after = (await door.raw("GET", "/metrics")).body.decode()
    assert 'tierkv_requests_total{model="tiny",outcome="length"} 1.0' in after
    assert 'tierkv_hit_tokens_total{model="tiny",tier="L3"} 4.0' in after
    assert 'tierkv_time_to_first_token_seconds_count{model="tiny"} 1.0' in after


async def test_keys_are_tenants_and_every_other_path_needs_one(tmp_path: Path) -> None:
    keys = {"key-1": "acme", "key-2": "other"}
    async with open_door(write_model_folder(tmp_path), api_keys=keys) as door:
        await door.client.chat.completions.create(model="tiny", messages=ASK, max_tokens=2)
        assert door.front.node.seen[-1].tenant == "acme"
        stranger = door.client.with_options(api_key="wrong")
        with pytest.raises(openai.AuthenticationError) as caught:
            await stranger.models.list()
        assert caught.value.code == "invalid_api_key"
        routes = all_routes(door.server.app.routes)
        assert {"/v1/chat/completions", "/metrics", "/readyz"} <= {r.path for r in routes}
        for route in routes:
            for method in route.methods:
                path = route.path.replace("{model_id:path}", "tiny")
                status = (await door.raw(method, path)).status
                assert (status == 401) == (path not in PUBLIC_PATHS), path


async def test_a_wrong_key_is_answered_late(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path)
    async with open_door(folder, api_keys={"key-1": "acme"}, failed_login_delay_s=3600) as door:
        stranger = door.client.with_options(api_key="wrong")
        guess = asyncio.ensure_future(stranger.models.list())
        for _ in range(10):
            await door.client.models.list()
        assert (await door.raw("GET", "/v1/models")).status == 401
        assert not guess.done()
        guess.cancel()
        with suppress(asyncio.CancelledError):
            await guess


async def test_users_without_keys_close_rest(tmp_path: Path) -> None:
    async with open_door(write_model_folder(tmp_path), has_users=True) as door:
        refused = await door.raw("POST", "/v1/completions", b'{"prompt": "a"}')
        assert refused.status == 401
        assert "Set front.api_keys" in refused.json()["error"]["message"]
        assert (await door.raw("GET", "/livez", host="pod-7")).status == 200


@pytest.mark.parametrize(
    ("status", "headers"),
    [
        (415, {"content_type": "text/plain"}),
        (421, {"host": "evil.example"}),
        (403, {"origin": "https://evil.example"}),
    ],
)
async def test_a_web_page_cannot_use_an_open_door(
    door: Door, status: int, headers: dict[str, str]
) -> None:
    body = b'{"prompt": "a", "max_tokens": 1}'
    refused = await door.raw("POST", "/v1/completions", body, **headers)
    assert (refused.status, door.front.node.seen) == (status, [])
    assert refused.json()["error"]["type"]


async def test_sql_over_http_answers_columns_and_rows(tmp_path: Path) -> None:
    async with running_front(write_model_folder(tmp_path)) as front:
        sql = DuckDbSqlServer(DuckDbConfig(), front.generation)
        server = HttpServer(HttpConfig(port=0), front.generation, sql=sql)
        await server.start()
        door = Door(front, server, openai.AsyncOpenAI(base_url="http://x", api_key="k"))
        try:
            question = {"sql": "SELECT $1::INT + 1 AS a, DATE '2024-01-02' AS d, NULL AS n"}
            body = json.dumps(question | {"params": [41]}).encode()
            answer = (await door.raw("POST", "/v1/sql", body)).json()
            assert answer["rows"] == [[42, "2024-01-02", None]]
            assert answer["columns"][0] == {"name": "a", "type": "INTEGER"}
            assert answer["command_tag"] == "SELECT 1"
            assert b"POST /v1/sql" in (await door.raw("GET", "/", b"")).body
            wrong = await door.raw("POST", "/v1/sql", b'{"sql": "SELEC 1"}')
            assert (wrong.status, wrong.json()["error"]["code"]) == (400, "syntax_error")
            shown = {"sql": "SHOW tierkv.max_calls", "settings": {"tierkv.max_calls": 7}}
            told = await door.raw("POST", "/v1/sql", json.dumps(shown).encode())
            assert told.json()["rows"] == [["7"]]
            for name, value, state in (
                ("tierkv.max_calls", "many", "22023"),
                ("tierkv.nosuch", 1, "42704"),
                ("memory_limit", "1GB", None),  # The body is refused, not the statement.
            ):
                body = json.dumps(shown | {"settings": {name: value}}).encode()
                bad = await door.raw("POST", "/v1/sql", body)
                error = bad.json()["error"]
                assert (bad.status, name in error["param"]) == (400, True)
                assert error.get("sqlstate") == state and "position" not in error
            for nul in (
                {"sql": "SELECT 'a\0b'"},
                {"sql": "SELECT 'a\0b'", "stream": True},
                {"sql": "SELECT $1", "params": ["a\0b"]},
                {"sql": "SELECT $1", "params": [["a", {"b\0": 1}]]},
                {"sql": "SELECT $a", "params": {"a": "\0"}},
                {"sql": "SELECT 1", "settings": {"tierkv.model": "a\0b"}},
            ):
                bad = await door.raw("POST", "/v1/sql", json.dumps(nul).encode())
                assert bad.status == 400, nul
                assert "UTF8" in bad.json()["error"]["message"]
                assert bad.json()["error"]["sqlstate"] == "22021"
            two = await door.raw("POST", "/v1/sql", b'{"sql": "SELECT 1; SELECT 2"}')
            assert two.json()["error"]["param"] == "sql"
        finally:
            await door.client.close()
            await server.stop()
            await sql.close()


async def test_the_api_describes_itself_without_the_internet(door: Door) -> None:
    told = await door.raw("GET", "/openapi.json")
    document = told.json()
    assert (told.status, document["openapi"][:2]) == (200, "3.")
    bodies = document["components"]["schemas"]
    for path, kind in (
        ("/v1/chat/completions", "ChatBody"),
        ("/v1/completions", "CompletionBody"),
        ("/v1/embeddings", "EmbeddingBody"),
        ("/v1/kv/prefetch", "KvBody"),
        ("/v1/kv/pin", "PinBody"),
        ("/v1/kv/locate", "KvBody"),
        ("/tokenize", "TokenizeBody"),
        ("/detokenize", "DetokenizeBody"),
    ):
        content = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        assert content["schema"]["$ref"] == f"#/components/schemas/{kind}"
        assert bodies[kind]["examples"]
        assert all("description" in field for field in bodies[kind]["properties"].values())
        for example in bodies[kind]["examples"]:
            answered = await door.raw("POST", path, json.dumps(example).encode())
            assert answered.status == 200
    named = set(re.findall(r'"#/components/schemas/(\w+)"', told.body.decode()))
    assert named <= bodies.keys()
    page = await door.raw("GET", "/docs")
    assert page.status == 200
    assert page.headers["content-type"].startswith("text/html")
    text = page.body.decode()
    assert "POST /v1/chat/completions" in text and "max_completion_tokens" in text
    assert "src=" not in text and "https:" not in text


async def test_the_description_asks_for_a_key_like_everything(tmp_path: Path) -> None:
    async with open_door(write_model_folder(tmp_path), api_keys={"key-1": "ann"}) as door:
        for path in ("/docs", "/openapi.json"):
            assert (await door.raw("GET", path)).status == 401
            known = await door.raw("GET", path, b"", authorization="Bearer key-1")
            assert known.status == 200


async def test_stopping_the_server_cancels_what_does_not_end(door: Door) -> None:
    door.front.node.gate.clear()
    body = json.dumps({"messages": ASK, "stream": True}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", door.server.port)
    head = f"POST /v1/chat/completions HTTP/1.1\r\n{SENT}content-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await reader.readuntil(b": keep-alive\n\n")
    await door.server.stop()
    assert door.front.node.cancelled
    writer.close()
    await writer.wait_closed()


async def test_a_stream_that_outlasts_the_drain_ends_with_an_error(door: Door) -> None:
    door.front.node.gate.clear()
    async with asyncio.TaskGroup() as group:
        body = json.dumps({"messages": ASK, "stream": True}).encode()
        streamed = group.create_task(door.raw("POST", "/v1/chat/completions", body))
        whole = group.create_task(
            door.raw("POST", "/v1/chat/completions", json.dumps({"messages": ASK}).encode())
        )
        await until(lambda: len(door.front.node.seen) == 2)
        draining = group.create_task(door.server.drain(0.2))
        await until(lambda: door.server._services.draining)
        refused = await door.raw("GET", "/v1/models")
        assert (refused.status, refused.json()["error"]["code"]) == (503, "draining")
        assert refused.headers["connection"] == "close"
        assert (await door.raw("GET", "/livez")).status == 200
        assert (await door.raw("GET", "/readyz")).status == 503
        assert not draining.done()
    assert whole.result().status == 503
    _, error, done = streamed.result().body.partition(b'"code": "draining"')
    assert error and b"data: [DONE]" in done
    await door.server.stop()
    assert len(door.front.node.cancelled) == 2


async def test_a_salt_shares_with_nobody(door: Door) -> None:
    for salt in ("a", "b", None):
        body = {"ignore_eos": True} | ({"cache_salt": salt} if salt else {})
        await door.client.chat.completions.create(
            model="tiny", messages=ASK, max_tokens=2, extra_body=body
        )
    assert len({request.namespace_key for request in door.front.node.seen}) == 3


async def test_a_salt_keeps_the_policy_of_its_tenant(door: Door) -> None:
    policy = ReusePolicy(KvCodec.FP8)
    await door.front.meta.put_namespace(Namespace("default", cache_enabled=False, policy=policy))
    for salt in ("a", None):
        body = {"ignore_eos": True} | ({"cache_salt": salt} if salt else {})
        await door.client.chat.completions.create(
            model="tiny", messages=ASK, max_tokens=2, extra_body=body
        )
    seen = [(request.use_cache, request.kv_codec) for request in door.front.node.seen]
    assert seen == [(False, KvCodec.FP8)] * 2
    assert door.front.node.seen[0].tenant.startswith("default:salt-")


async def test_a_port_in_use_says_so(door: Door) -> None:
    second = HttpServer(HttpConfig(port=door.server.port), door.front.generation)
    with pytest.raises(ConfigError, match="in use"):
        await second.start()


async def test_many_clients_at_once(door: Door) -> None:
    answers = await asyncio.gather(
        *(
            door.client.chat.completions.create(model="tiny", messages=ASK, max_tokens=4, seed=i)
            for i in range(50)
        )
    )
    assert len(answers) == 50
    assert door.front.dispatcher.snapshot().finished == 50


def all_routes(routes: Any) -> list[APIRoute]:
    """Every endpoint; a route of any other kind fails, because nobody checked it."""
    found = []
    for route in routes:
        router = getattr(route, "original_router", None)
        if router is not None:
            found += all_routes(router.routes)
        else:
            assert isinstance(route, APIRoute), route
            found.append(route)
    return found


def _call(prompt: str) -> Any:
    return text_call(prompt=prompt, max_tokens=8)
