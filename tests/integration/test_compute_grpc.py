"""A compute node behind real gRPC on loopback: answers, errors, cancellation, a lost node."""

from __future__ import annotations

import asyncio
from contextlib import aclosing, asynccontextmanager

import pytest

from tests.fix_model import answer, make_request, running_node
from tierkv.compute.client import connect_compute
from tierkv.compute.service import serve_node
from tierkv.kvcore.errors import (
    ContextTooLongError,
    NodeRefusedError,
    TransportError,
    UnknownModelError,
)
from tierkv.kvcore.request import FinishReason

pytestmark = pytest.mark.integration
PROMPT = list(range(40))


@asynccontextmanager
async def served(token=None, **changes):
    async with running_node(**changes) as node:
        bound = await serve_node(node, "127.0.0.1:0", token=token)
        client = connect_compute(bound.address, token=token)
        try:
            yield node, client, bound
        finally:
            await client.close()
            await bound.server.stop(0)


async def until(condition) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


async def test_same_answer_as_in_process() -> None:
    async with served() as (node, client, bound):
        want, _ = await answer(node, make_request(PROMPT, use_cache=False))
        got, last = await answer(client, make_request(PROMPT))
        assert got == want and last.finish_reason is FinishReason.LENGTH
        assert last.usage.completion_tokens == 12 and last.node_id == "c1"
        info, report = await client.describe()
        assert info.control_address == bound.address and info.models == (node.model,)
        assert report.tiers[0].stored_tokens >= 40
        await node.flush()  # Blocks being published keep their pages.
        assert await client.drop_cache() >= 5


async def test_typed_errors_travel() -> None:
    async with served(token="secret") as (_, client, bound):
        with pytest.raises(UnknownModelError, match="'tiny'"):
            await answer(client, make_request(PROMPT, model="other"))
        with pytest.raises(ContextTooLongError):
            await answer(client, make_request(PROMPT * 20))
        stranger = connect_compute(bound.address)
        with pytest.raises(NodeRefusedError, match=bound.address) as caught:
            await stranger.describe()
        with pytest.raises(NodeRefusedError):
            await answer(stranger, make_request(PROMPT))
        assert "Operators set the same cluster.token" in caught.value.hint
        await stranger.close()


async def test_closing_the_stream_and_cancel_end_the_request() -> None:
    async with served() as (node, client, _):
        endless = {"sampling": {"max_tokens": 400}}
        async with aclosing(client.generate(make_request(PROMPT, **endless))) as events:
            await anext(events)
        await until(lambda: not node._streams and not node._engine._requests.sequences)
        request = make_request(PROMPT, **endless)
        events = client.generate(request)
        await anext(events)
        assert await client.cancel(request.request_id)
        last = [event async for event in events][-1]
        assert last.finish_reason is FinishReason.CANCELLED
        assert not await client.cancel(request.request_id)


async def test_a_lost_node_is_a_transport_error() -> None:
    async with served() as (_, client, bound):
        events = client.generate(make_request(PROMPT, sampling={"max_tokens": 400}))
        await anext(events)
        await bound.server.stop(0)
        with pytest.raises(TransportError):
            async for _ in events:
                pass
        with pytest.raises(TransportError):
            await client.describe()
