"""Real gRPC servers and channels: the token, typed errors, a port in use, public addresses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from tests.fix_chaos import HOLE, NONE, ChaosProxy, Fault
from tierkv.kvcore.errors import (
    AuthenticationError,
    ConfigError,
    ContextTooLongError,
    OverloadedError,
    TierKVError,
    TransportError,
)
from tierkv.kvwire import channels
from tierkv.kvwire.checksums import checked, intact
from tierkv.kvwire.status import answering, error_from_rpc
from tierkv.kvwire.v1 import compute_pb2, compute_pb2_grpc

pytestmark = pytest.mark.integration


SILENCE_S = 30.0
"""Half of what gRPC waits by itself: a silent peer must be given up by then."""


class EchoCompute(compute_pb2_grpc.ComputeServicer):
    """Streams token ids back; raises what ``error`` says; counts streams it saw cancelled."""

    def __init__(self, error: TierKVError | None = None) -> None:
        self.error = error
        self.closed = asyncio.Event()
        self.stalled = asyncio.Event()

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        try:
            async with answering(context):
                if self.error is not None:
                    raise self.error
                for token in request.token_ids:
                    yield compute_pb2.GenerateEvent(token_ids=[token])
                    await asyncio.sleep(0)
                if not request.token_ids:
                    self.stalled.set()
                    await asyncio.Event().wait()
        finally:
            self.closed.set()

    async def Cancel(self, request: Any, context: Any) -> Any:
        async with answering(context):
            if self.error is not None:
                raise self.error
            return compute_pb2.CancelReply(found=True)


class LoudCompute(EchoCompute):
    """Answers with all tokens in one event."""

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        yield compute_pb2.GenerateEvent(token_ids=request.token_ids)


@asynccontextmanager
async def running(
    servicer: EchoCompute, *, token: str | None = None, address: str = "127.0.0.1:0"
) -> AsyncIterator[str]:
    bound = channels.bind_server(address, token=token)
    compute_pb2_grpc.add_ComputeServicer_to_server(servicer, bound.server)
    await bound.server.start()
    try:
        yield bound.address
    finally:
        await bound.server.stop(grace=0)


@pytest.mark.parametrize("token", [None, "a-shared-token"])
async def test_calls_and_streams_pass_with_the_right_token(token: str | None) -> None:
    async with (
        running(EchoCompute(), token=token) as address,
        channels.open_channel(address, token=token) as channel,
    ):
        stub = compute_pb2_grpc.ComputeStub(channel)
        reply = await stub.Cancel(compute_pb2.CancelRequest(request_id="r"), timeout=10)
        assert reply.found
        stream = stub.Generate(compute_pb2.GenerateRequest(token_ids=[1, 2, 3]), timeout=10)
        assert [event.token_ids[0] async for event in stream] == [1, 2, 3]


@pytest.mark.parametrize("token", [None, "the-wrong-token"])
async def test_a_missing_or_wrong_token_is_refused(token: str | None) -> None:
    async with (
        running(EchoCompute(), token="the-right-token") as address,
        channels.open_channel(address, token=token) as channel,
    ):
        stub = compute_pb2_grpc.ComputeStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as unary:
            await stub.Cancel(compute_pb2.CancelRequest(), timeout=10)
        with pytest.raises(grpc.aio.AioRpcError) as stream:
            async for _ in stub.Generate(compute_pb2.GenerateRequest(token_ids=[1]), timeout=10):
                pass
        for caught in (unary, stream):
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
            error = error_from_rpc(caught.value, default=TransportError)
            assert isinstance(error, AuthenticationError)
            assert "token" in error.hint


async def test_closing_a_stream_early_cancels_it_at_the_server() -> None:
    servicer = EchoCompute()
    async with (
        running(servicer, token="t0") as address,
        channels.open_channel(address, token="t0") as channel,
    ):
        stub = compute_pb2_grpc.ComputeStub(channel)
        call = stub.Generate(compute_pb2.GenerateRequest(token_ids=[7] * 1_000_000), timeout=60)
        async for _ in call:
            break
        call.cancel()
        await asyncio.wait_for(servicer.closed.wait(), 10)


async def test_a_silent_peer_is_noticed_at_both_ends() -> None:
    """A network hole closes no connection: only pings without an answer tell."""
    servicer = EchoCompute()
    async with running(servicer) as address:
        with ChaosProxy(address) as proxy:
            async with channels.open_channel(proxy.address) as channel:
                stub = compute_pb2_grpc.ComputeStub(channel)
                call = stub.Generate(compute_pb2.GenerateRequest())
                waiting = asyncio.ensure_future(call.read())
                await asyncio.wait_for(servicer.stalled.wait(), 10)
                proxy.both(HOLE)
                async with asyncio.timeout(SILENCE_S):
                    with pytest.raises(grpc.aio.AioRpcError) as caught:
                        await waiting
                    await servicer.closed.wait()
                assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
                proxy.heal()
                reply = await stub.Cancel(
                    compute_pb2.CancelRequest(), timeout=10, wait_for_ready=True
                )
                assert reply.found


FLIPS = Fault(flip_share=1.0, flip_from=1_000)
TOKENS = list(range(100_000, 102_000))
GENERATE = compute_pb2.GenerateRequest(token_ids=TOKENS)


async def test_flipped_bits_are_a_lost_peer_at_both_ends() -> None:
    request = compute_pb2.CancelRequest(request_id="r" * 4_000)
    async with running(LoudCompute()) as address:
        with ChaosProxy(address, seed=3) as proxy:
            async with channels.open_channel(proxy.address) as channel:
                stub = compute_pb2_grpc.ComputeStub(checked(channel))
                assert intact(await stub.Cancel(request, timeout=10)).found
                proxy.to_server = FLIPS
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await stub.Cancel(request, timeout=10)
                assert type(error_from_rpc(caught.value, default=OverloadedError)) is TransportError
                proxy.to_server, proxy.to_client = NONE, FLIPS
                damaged = [event async for event in stub.Generate(GENERATE, timeout=10)]
                assert damaged == [None]
                proxy.heal()
                whole = [intact(event) async for event in stub.Generate(GENERATE, timeout=10)]
                assert list(whole[0].token_ids) == TOKENS
                assert proxy.flipped == 2


async def test_a_server_without_checksums_is_understood() -> None:
    server = grpc.aio.server()
    compute_pb2_grpc.add_ComputeServicer_to_server(LoudCompute(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with channels.open_channel(f"127.0.0.1:{port}") as channel:
            stub = compute_pb2_grpc.ComputeStub(checked(channel))
            events = [intact(event) async for event in stub.Generate(GENERATE, timeout=10)]
            assert list(events[0].token_ids) == TOKENS
    finally:
        await server.stop(grace=0)


@pytest.mark.parametrize(
    "error",
    [
        OverloadedError("full", retry_after_ms=77, detail="9 queued"),
        ContextTooLongError("Prompt zu lang: ä" * 400, hint="新しい" * 400, detail="😀" * 1_000),
    ],
)
async def test_a_typed_error_arrives_as_the_same_leaf(error: TierKVError) -> None:
    async with (
        running(EchoCompute(error)) as address,
        channels.open_channel(address) as channel,
    ):
        stub = compute_pb2_grpc.ComputeStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as unary:
            await stub.Cancel(compute_pb2.CancelRequest(), timeout=10)
        with pytest.raises(grpc.aio.AioRpcError) as stream:
            async for _ in stub.Generate(compute_pb2.GenerateRequest(token_ids=[1]), timeout=10):
                pass
        for caught in (unary, stream):
            got = error_from_rpc(caught.value, default=TransportError)
            assert type(got) is type(error)
            assert got.message[:900] == error.message[:900]
            assert got.detail[:900] == error.detail[:900]
            assert got.hint[:900] == error.hint[:900]
            assert getattr(got, "retry_after_ms", None) == getattr(error, "retry_after_ms", None)


async def test_no_server_becomes_the_default_error() -> None:
    async with running(EchoCompute()) as address:
        pass
    async with channels.open_channel(address) as channel:
        stub = compute_pb2_grpc.ComputeStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Cancel(compute_pb2.CancelRequest(), timeout=10)
        error = error_from_rpc(caught.value, default=TransportError)
        assert type(error) is TransportError
        assert error.message.startswith("UNAVAILABLE")


async def test_a_port_in_use_is_named_with_the_cure() -> None:
    async with running(EchoCompute()) as address:
        port = address.rpartition(":")[2]
        with pytest.raises(ConfigError, match=f"port {port} on 127.0.0.1 is in use") as caught:
            channels.bind_server(address, setting="meta.address")
        assert "meta.address" in caught.value.message
        assert f"process that holds port {port}" in caught.value.hint


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0", "192.0.2.7:7400", "db.example.com:1"])
async def test_a_public_address_needs_a_token(address: str) -> None:
    with pytest.raises(ConfigError, match="no token is set") as caught:
        channels.bind_server(address, setting="meta.address")
    assert "127.0.0.1" in caught.value.hint


async def test_an_address_of_another_machine_can_not_be_bound() -> None:
    with pytest.raises(ConfigError, match=r"can't listen on meta\.address"):
        channels.bind_server("192.0.2.7:0", token="t", setting="meta.address")


@pytest.mark.parametrize(
    "address", ["", "7400", "localhost", "localhost:", "localhost:99999", ":1"]
)
async def test_a_malformed_address_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="is not host:port"):
        channels.bind_server(address)


async def test_an_unusable_token_is_refused() -> None:
    for token in ("", "päss", "a\nb"):
        with pytest.raises(ConfigError, match="printable ASCII"):
            channels.bind_server("127.0.0.1:0", token=token)
