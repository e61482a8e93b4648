"""Many calls in one stream: packed, cancelled, failing one by one and together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace

import grpc
import grpc.aio
import pytest

from tests.fix_scheduler import fake_logprobs, make_request
from tierkv.compute.grpc_client import (
    _PACK_TOKENS,
    CallStream,
    CallStreamMissing,
    GrpcComputeClient,
    _packs,
)
from tierkv.compute.service import _ServedCalls, serve_calls, serve_node
from tierkv.kvcore.block import Erased
from tierkv.kvcore.errors import OverloadedError, TransportError
from tierkv.kvcore.ids import BlockKey, RequestId
from tierkv.kvcore.node import NodeInfo, NodeReport
from tierkv.kvcore.request import (
    FinishReason,
    GenerateEvent,
    GenerateRequest,
    PromptBlocks,
    SamplingParams,
    Usage,
)
from tierkv.kvwire.convert_compute import generate_event_from_proto, generate_request_to_proto
from tierkv.kvwire.v1 import compute_pb2 as pb


class Echo:
    """Answers with the prompt, token by token, as fast as the test lets it.

    Attributes:
        go: tokens come while this is set.
        running: requests that were not ended yet.
        cancelled: requests whose reader left.
    """

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.go.set()
        self.running: set[RequestId] = set()
        self.cancelled: set[RequestId] = set()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateEvent, None]:
        if request.model == "full":
            raise OverloadedError("no place", retry_after_ms=70)
        if request.model == "broken":
            raise ZeroDivisionError("a bug of the node")
        self.running.add(request.request_id)
        try:
            for token in request.token_ids:
                await self.go.wait()
                told = fake_logprobs(token, request.sampling.logprobs)
                yield GenerateEvent((token,), logprobs=told)
            usage = Usage(len(request.token_ids), len(request.token_ids))
            yield GenerateEvent((), FinishReason.LENGTH, usage, "echo")
        except GeneratorExit:
            self.cancelled.add(request.request_id)
            raise
        finally:
            self.running.discard(request.request_id)

    async def cancel(self, request_id: RequestId) -> bool:
        return False

    def info(self) -> NodeInfo:
        raise NotImplementedError

    def report(self) -> NodeReport:
        return NodeReport()

    async def drop_cache(self) -> int:
        return 0

    async def prefetch(self, request: GenerateRequest) -> int:
        return 0

    async def find_prompt(self, request: GenerateRequest) -> PromptBlocks:
        return PromptBlocks()

    async def erase(
        self, keys: Sequence[BlockKey], *, pool: bool
    ) -> tuple[Erased, tuple[str, ...]]:
        return Erased(), ()

    def set_control_address(self, address: str) -> None:
        pass


@asynccontextmanager
async def served(node: Echo) -> AsyncIterator[tuple[GrpcComputeClient, str]]:
    bound = await serve_node(node, "127.0.0.1:0", token="secret")
    client = GrpcComputeClient(bound.address, token="secret")
    try:
        yield client, bound.address
    finally:
        await client.close()
        await bound.server.stop(0)


def asked(number: int, tokens: int = 5, **changes: object) -> GenerateRequest:
    ids = tuple((number + i) % 100 for i in range(tokens))
    return make_request(request_id=RequestId(f"r{number}"), token_ids=ids, **changes)


async def tokens_of(client: GrpcComputeClient, request: GenerateRequest) -> tuple[int, ...]:
    events = [event async for event in client.generate(request)]
    assert [e.finish_reason for e in events[:-1]] == [None] * (len(events) - 1)
    assert events[-1].finish_reason is FinishReason.LENGTH and events[-1].node_id == "echo"
    return tuple(token for event in events for token in event.token_ids)


async def until(condition) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


async def test_each_of_many_calls_gets_its_own_tokens_in_order() -> None:
    async with served(Echo()) as (client, _):
        requests = [asked(number, tokens=1 + number % 50) for number in range(300)]
        answers = await asyncio.gather(*(tokens_of(client, request) for request in requests))
        assert answers == [request.token_ids for request in requests]


async def test_an_error_ends_only_its_own_call() -> None:
    async with served(Echo()) as (client, _):
        good = asyncio.create_task(tokens_of(client, asked(1, tokens=90)))
        with pytest.raises(OverloadedError) as caught:
            await tokens_of(client, asked(2, model="full"))
        assert caught.value.retry_after_ms == 70
        with pytest.raises(TransportError, match="failed to answer"):
            await tokens_of(client, asked(3, model="broken"))
        assert await good == asked(1, tokens=90).token_ids


async def test_a_reader_that_leaves_cancels_its_call_alone() -> None:
    node = Echo()
    async with served(node) as (client, _):
        node.go.clear()
        stays = asyncio.create_task(tokens_of(client, asked(1)))
        leaves = asyncio.create_task(tokens_of(client, asked(2)))
        await until(lambda: len(node.running) == 2)
        leaves.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaves
        await until(lambda: node.running == {RequestId("r1")})
        node.go.set()
        assert await stays == asked(1).token_ids


async def test_a_front_that_goes_leaves_no_call_behind() -> None:
    node = Echo()
    async with served(node) as (client, address):
        node.go.clear()
        other = GrpcComputeClient(address, token="secret")
        calls = [asyncio.create_task(tokens_of(other, asked(n))) for n in range(20)]
        stays = asyncio.create_task(tokens_of(client, asked(99)))
        await until(lambda: len(node.running) == 21)
        await other.close()
        for call in calls:
            with pytest.raises(TransportError):
                await call
        await until(lambda: node.running == {RequestId("r99")})
        node.go.set()
        assert await stays == asked(99).token_ids


async def test_a_lost_stream_ends_its_calls_and_the_next_call_opens_another() -> None:
    node = Echo()
    async with served(node) as (client, _):
        node.go.clear()
        calls = [asyncio.create_task(tokens_of(client, asked(n))) for n in range(5)]
        await until(lambda: len(node.running) == 5)
        assert client._calls is not None and client._calls._opened is not None
        client._calls._opened._call.cancel()  # As a connection that breaks.
        for call in calls:
            with pytest.raises(TransportError):
                await call
        node.go.set()
        assert await tokens_of(client, asked(7)) == asked(7).token_ids


async def test_tokens_join_while_the_front_does_not_read() -> None:
    node = Echo()
    calls = _ServedCalls(node)
    for number in (1, 2):
        request = generate_request_to_proto(asked(number, tokens=40))
        calls._obey(pb.CallFrame(call=number, request=request))
    await until(lambda: not calls._tasks)
    async with aclosing(calls.answers()) as packs:  # type: ignore[type-var]
        pack = await anext(packs)
    assert [(f.call, tuple(f.event.token_ids)) for f in pack.frames] == [
        (number, asked(number, tokens=40).token_ids) for number in (1, 2)
    ]
    assert [f.event.finish_reason for f in pack.frames] == ["length"] * 2


async def test_logprobs_join_with_their_tokens() -> None:
    node = Echo()
    calls = _ServedCalls(node)
    request = replace(asked(1, tokens=40), sampling=SamplingParams(logprobs=2))
    calls._obey(pb.CallFrame(call=1, request=generate_request_to_proto(request)))
    await until(lambda: not calls._tasks)
    async with aclosing(calls.answers()) as packs:  # type: ignore[type-var]
        (frame,) = (await anext(packs)).frames
    event = generate_event_from_proto(frame.event)
    assert event.token_ids == request.token_ids
    assert event.logprobs == tuple(fake_logprobs(t, 2)[0] for t in request.token_ids)


async def test_a_damaged_pack_ends_the_stream() -> None:
    node = Echo()
    node.go.clear()

    async def packs() -> AsyncIterator[pb.CallPack | None]:
        request = generate_request_to_proto(asked(1))
        yield pb.CallPack(frames=[pb.CallFrame(call=1, request=request)])
        await until(lambda: node.running)
        yield None

    with pytest.raises(TransportError, match="damaged"):
        async for _ in serve_calls(node, packs()):
            pass
    assert not node.running


def test_a_pack_is_far_smaller_than_a_message_may_be() -> None:
    long = pb.CallFrame(
        call=1, request=pb.GenerateRequest(token_ids=[1 << 31] * (_PACK_TOKENS // 2))
    )
    small = pb.CallFrame(call=2, cancel=True)
    packs = list(_packs([long, small, long, long, small]))
    assert [len(pack.frames) for pack in packs] == [3, 2]
    assert max(pack.ByteSize() for pack in packs) < 6 << 20


class BrokenCall:
    """An RPC that fails after some packs."""

    def __init__(self, code: grpc.StatusCode, packs: int) -> None:
        self._error = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata())
        self._packs = packs

    async def write(self, pack: pb.CallPack) -> None:
        pass

    def __aiter__(self) -> BrokenCall:
        return self

    async def __anext__(self) -> pb.EventPack:
        if self._packs:
            self._packs -= 1
            return pb.EventPack()
        raise self._error

    def cancel(self) -> None:
        pass


@pytest.mark.parametrize(
    ("code", "packs", "missing"),
    [
        (grpc.StatusCode.UNIMPLEMENTED, 0, True),
        (grpc.StatusCode.INTERNAL, 0, False),  # A refusal that crossed our first message.
        (grpc.StatusCode.INTERNAL, 1, None),
        (grpc.StatusCode.UNAVAILABLE, 0, None),
    ],
)
async def test_a_node_without_the_stream_is_told_from_a_lost_one(
    code: grpc.StatusCode, packs: int, missing: bool | None
) -> None:
    calls = CallStream(
        lambda: BrokenCall(code, packs), translated=lambda error: TransportError(error.code().name)
    )
    wanted = TransportError if missing is None else CallStreamMissing
    with pytest.raises(wanted) as caught:
        async for _ in calls.generate(asked(1)):
            pass
    assert getattr(caught.value, "certain", None) is missing
