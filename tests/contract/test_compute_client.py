"""What every ComputeClient does, numbered as in compute/client.py."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import grpc
import pytest

from tests.fix_engine_http import playing
from tests.fix_model import running_node
from tests.fix_scheduler import FakeCompute, make_model, make_request, next_token
from tierkv.compute.client import ComputeClient, LocalComputeClient, connect_compute
from tierkv.compute.service import ComputeServicer, serve_node
from tierkv.integrations.remote.door import EngineKind, EngineLook
from tierkv.integrations.remote.node import Life, RemoteNode
from tierkv.kvcore.block import Erased, block_keys
from tierkv.kvcore.errors import FeatureNotSupportedError, TransportError, UserError
from tierkv.kvcore.ids import BlockKey, Incarnation, RequestId
from tierkv.kvcore.request import FinishReason, GenerateEvent, GenerateRequest, SamplingParams


@dataclass(frozen=True)
class Subject:
    """A client, and how to make its node die."""

    client: ComputeClient
    kill: Callable[[], Awaitable[None]]


@asynccontextmanager
async def fake_subject() -> AsyncIterator[Subject]:
    node = FakeCompute()
    yield Subject(node, node.close)


@asynccontextmanager
async def local_subject() -> AsyncIterator[Subject]:
    async with running_node() as node:
        yield Subject(LocalComputeClient(node), node.stop)


@asynccontextmanager
async def grpc_subject() -> AsyncIterator[Subject]:
    async with running_node() as node:
        bound = await serve_node(node, "127.0.0.1:0", token=None)
        client = connect_compute(bound.address, token=None)

        async def kill() -> None:
            await bound.server.stop(0)

        try:
            yield Subject(client, kill)
        finally:
            await client.close()
            await bound.server.stop(0)


@asynccontextmanager
async def older_grpc_subject() -> AsyncIterator[Subject]:
    """A node of a version without the stream of all calls."""

    async def refuse(self, packs, context) -> None:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ComputeServicer, "Exchange", refuse)
        async with grpc_subject() as subject:
            yield subject


@asynccontextmanager
async def engine_subject() -> AsyncIterator[Subject]:
    """A node that stands for a vLLM server; the server's next token is the one of FakeCompute."""

    def answer_of(ids: Sequence[int], body: dict[str, Any]) -> list[int]:
        fields = {name: body.get(name) for name in ("temperature", "seed", "ignore_eos")}
        tokens = list(ids)
        for _ in range(body["max_tokens"]):
            tokens.append(next_token(tokens, SamplingParams(**fields), range(2, 200)))
        return tokens[len(ids) :]

    async with playing(EngineKind.VLLM) as engine:
        engine.answer_of = answer_of
        engine.chance_of = lambda token: -6.0 - token / 100
        engine.turns = asyncio.Semaphore(50)  # The longest answer is never written to its end.
        door = engine.door()
        node = RemoteNode(engine.config(), door)
        model = make_model(embed_refusal="vLLM gives no embeddings beside answers")
        node.begin_life(Life(Incarnation(1), model, EngineLook("m")))

        async def kill() -> None:
            await engine.stop()
            node.end_life("it was killed")

        yield Subject(LocalComputeClient(node), kill)
        await door.http.close()


SUBJECTS = {
    "engine": engine_subject,
    "fake": fake_subject,
    "local": local_subject,
    "grpc": grpc_subject,
    "older grpc": older_grpc_subject,
}


@pytest.fixture(params=sorted(SUBJECTS))
async def subject(request: pytest.FixtureRequest) -> AsyncIterator[Subject]:
    async with SUBJECTS[request.param]() as subject:
        yield subject


@pytest.fixture
def client(subject: Subject) -> ComputeClient:
    """Every implementation in turn."""
    return subject.client


def ask(client: ComputeClient, **changes: object) -> GenerateRequest:
    """A request the node's model can answer."""
    return make_request(sampling=SamplingParams(max_tokens=6, ignore_eos=True), **changes)


async def collect(client: ComputeClient, request: GenerateRequest) -> list[GenerateEvent]:
    return [event async for event in client.generate(request)]


def tokens_of(events: list[GenerateEvent]) -> list[int]:
    return [token for event in events for token in event.token_ids]


async def test_1_only_the_last_event_has_an_end_and_a_usage(client: ComputeClient) -> None:
    events = await collect(client, ask(client))
    assert events[-1].finish_reason is FinishReason.LENGTH
    assert events[-1].usage is not None
    assert events[-1].usage.prompt_tokens == len(ask(client).token_ids)
    assert events[-1].usage.completion_tokens == 6 == len(tokens_of(events))
    assert all(e.finish_reason is None and e.usage is None for e in events[:-1])


async def test_1_closing_the_iterator_cancels(client: ComputeClient) -> None:
    request = ask(client, request_id=RequestId("closed"))
    async with aclosing(client.generate(request)) as events:  # type: ignore[type-var]
        await anext(events)
    assert await client.cancel(request.request_id) is False


async def test_1_the_same_request_gives_the_same_tokens(client: ComputeClient) -> None:
    first = tokens_of(await collect(client, ask(client, request_id=RequestId("a"))))
    second = tokens_of(await collect(client, ask(client, request_id=RequestId("b"))))
    assert first == second


@pytest.mark.parametrize("temperature", [0.0, 0.9])
async def test_1_a_resumed_request_goes_on_where_it_was(
    client: ComputeClient, temperature: float
) -> None:
    sampling = SamplingParams(max_tokens=6, ignore_eos=True, temperature=temperature, seed=7)
    request = replace(ask(client, request_id=RequestId("whole")), sampling=sampling)
    whole = tokens_of(await collect(client, request))
    rest = replace(
        request,
        request_id=RequestId("rest"),
        token_ids=request.token_ids + tuple(whole[:2]),
        resumed_tokens=2,
    )
    events = await collect(client, rest)
    assert tokens_of(events) == whole[2:]
    assert events[-1].usage is not None
    assert events[-1].usage.prompt_tokens == len(request.token_ids)
    assert events[-1].usage.completion_tokens == 6


async def test_1_a_handoff_ends_after_the_first_token(client: ComputeClient) -> None:
    whole = tokens_of(await collect(client, ask(client, request_id=RequestId("whole"))))
    events = await collect(client, ask(client, request_id=RequestId("half"), handoff=True))
    assert events[-1].finish_reason is FinishReason.HANDOFF
    assert tokens_of(events) == whole[:1]


async def test_2_a_dead_node_is_a_transport_error(subject: Subject) -> None:
    await subject.kill()
    with pytest.raises(TransportError):
        await collect(subject.client, ask(subject.client))


async def test_2_a_request_that_cannot_work_is_the_callers_error(client: ComputeClient) -> None:
    with pytest.raises(UserError):
        await collect(client, ask(client, model="no such model"))


async def test_3_cancel_ends_the_stream_with_an_account(client: ComputeClient) -> None:
    sampling = SamplingParams(max_tokens=400, ignore_eos=True)
    request = make_request(sampling=sampling)
    events = []
    async for event in client.generate(request):
        if not events:
            assert await client.cancel(request.request_id) is True
        events.append(event)
    assert events[-1].finish_reason is FinishReason.CANCELLED
    assert events[-1].usage is not None
    assert len(tokens_of(events)) < 400


async def test_3_cancel_of_an_unknown_request_is_false(client: ComputeClient) -> None:
    assert await client.cancel(RequestId("nobody")) is False


async def test_4_a_prefetch_says_how_much_is_near_and_changes_no_answer(
    client: ComputeClient,
) -> None:
    request = ask(client, request_id=RequestId("ahead"))
    assert 0 <= await client.prefetch(request) < len(request.token_ids)
    whole = tokens_of(await collect(client, ask(client, request_id=RequestId("first"))))
    assert 0 <= await client.prefetch(request) < len(request.token_ids)
    assert tokens_of(await collect(client, request)) == whole


async def test_4_a_prefetch_at_a_dead_node_is_a_transport_error(subject: Subject) -> None:
    await subject.kill()
    with pytest.raises(TransportError):
        await subject.client.prefetch(ask(subject.client))


async def test_5_chances_of_tokens_come_in_the_order_they_were_asked_for(
    client: ComputeClient,
) -> None:
    (event,) = await collect(client, ask(client, score_token_ids=(5, 9, 5)))
    assert event.finish_reason is FinishReason.STOP and event.token_ids == event.embedding == ()
    assert event.scores[0] == event.scores[2] != event.scores[1] and max(event.scores) < 0.0
    every = tuple(range(100))
    (event,) = await collect(client, ask(client, request_id=RequestId("b"), score_token_ids=every))
    assert sum(map(math.exp, event.scores)) < 1.0
    assert event.usage is not None and event.usage.completion_tokens == 0
    (other,) = await collect(client, ask(client, request_id=RequestId("c"), score_token_ids=(9, 5)))
    assert other.scores == pytest.approx((event.scores[9], event.scores[5]), rel=1e-4)


@pytest.mark.parametrize("handoff", [False, True])
async def test_5_an_embedding_has_unit_length(client: ComputeClient, handoff: bool) -> None:
    info, _ = await client.describe()
    if info.models[0].embed_refusal:
        with pytest.raises(UserError, match=info.models[0].embed_refusal):
            await collect(client, ask(client, embed=True))
        return
    (event,) = await collect(client, ask(client, embed=True, handoff=handoff))
    assert event.finish_reason is FinishReason.STOP and event.token_ids == event.scores == ()
    assert math.hypot(*event.embedding) == pytest.approx(1.0, rel=1e-5)
    assert event.usage is not None
    assert event.usage.prompt_tokens == len(ask(client).token_ids)


async def test_6_and_7_the_blocks_of_a_prompt_are_named_and_erased(client: ComputeClient) -> None:
    info, _ = await client.describe()
    layout = info.models[0].layout
    request = ask(client, token_ids=tuple(3 + i % 90 for i in range(3 * layout.block_tokens + 2)))
    await collect(client, request)
    found = await client.find_prompt(request)
    if not found.chain:  # Neither another engine nor the tests' own node has blocks.
        with pytest.raises(FeatureNotSupportedError, match="cache of its own"):
            await client.erase([BlockKey(bytes(16))], pool=False)
        return
    keys = [*found.chain, *found.ends]
    assert found.chain == tuple(
        block_keys(request.namespace_key, request.token_ids, block_tokens=layout.block_tokens)
    )
    assert len(found.ends) == 1 and found.others == found.chunks == ()
    erased, nodes = await client.erase(keys, pool=False)
    assert erased.page_blocks >= 4 and nodes == ()
    assert erased.page_bytes == erased.page_blocks * layout.payload_bytes
    assert await client.erase(keys, pool=True) == (Erased(), ())
    assert (await client.find_prompt(request)).ends == ()
    (again,) = [e for e in await collect(client, request) if e.usage is not None]
    assert again.usage is not None and again.usage.hit_tokens.total == 0


async def test_7_a_dead_node_erases_nothing(subject: Subject) -> None:
    await subject.kill()
    with pytest.raises((TransportError, FeatureNotSupportedError)):
        await subject.client.erase([BlockKey(bytes(16))], pool=False)


async def test_describe_names_the_node_and_its_models(client: ComputeClient) -> None:
    info, report = await client.describe()
    assert info.node_id
    assert info.models
    assert report.load.requests_running == 0
