"""An engine's node over a wire that breaks: canned bytes from a socket, cut where it hurts.

No engine is played here: what real ones say is in tests/engines/remote and test_engine_openai.py.
These are replies that no healthy server sends.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager

import pytest

from tierkv.integrations.remote.door import EngineKind, EngineLook, RemoteConfig
from tierkv.integrations.remote.node import Life, RemoteNode
from tierkv.integrations.remote.served_model import opaque_layout
from tierkv.kvcore import limits
from tierkv.kvcore.errors import (
    ConfigError,
    ContextTooLongError,
    NodeLostError,
    OverloadedError,
    RemoteProtocolError,
    TierKVError,
    TransportError,
)
from tierkv.kvcore.ids import HostId, Incarnation, NamespaceKey, NodeId, RequestId
from tierkv.kvcore.node import ModelInfo, NodeRole
from tierkv.kvcore.request import FinishReason, GenerateEvent, GenerateRequest, SamplingParams
from tierkv.parts.engine_part import open_door

pytestmark = pytest.mark.integration

HEAD = b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n"
TOKEN = b'data: {"choices": [{"text": "a", "token_ids": [97], "finish_reason": null}]}\n\n'
STOP = b'data: {"choices": [{"text": "", "token_ids": [98, 2], "finish_reason": "stop"}]}\n\n'
USAGE = (
    b'data: {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 3, '
    b'"prompt_tokens_details": {"cached_tokens": 2}}}\n\n'
)
DONE = b"data: [DONE]\n\n"


class Wire:
    """A socket that answers every request with the same bytes.

    Attributes:
        reply: those bytes; None: nothing, until the client leaves.
        left: set when a client closed its end.
        heads: what clients sent first.
    """

    def __init__(self, reply: bytes | None) -> None:
        self.reply = reply
        self.left = asyncio.Event()
        self.heads: list[bytes] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(HEAD + TOKEN if self.reply is None else self.reply)
        await writer.drain()
        if self.reply is None:
            while await reader.read(1 << 16):
                pass
            self.left.set()
        writer.close()


@asynccontextmanager
async def wired(
    reply: bytes | None, kind: EngineKind = EngineKind.VLLM
) -> AsyncIterator[tuple[Wire, RemoteNode]]:
    wire = Wire(reply)
    server = await asyncio.start_server(wire.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    config = RemoteConfig(
        NodeId("n"), HostId("h"), NodeRole.COMPUTE, kind, f"http://127.0.0.1:{port}", api_key="k-1"
    )
    door = open_door(config)
    node = RemoteNode(config, door)
    model = ModelInfo("m", "", "r", opaque_layout("x"), 4_096, (2,), "", 0)
    node.begin_life(Life(Incarnation(1), model, EngineLook("m")))
    try:
        yield wire, node
    finally:
        await door.http.close()
        server.close()
        await server.wait_closed()


def request(**changes: object) -> GenerateRequest:
    fields: dict[str, object] = {
        "request_id": RequestId("q"),
        "model": "m",
        "token_ids": (1, 2, 3),
        "namespace_key": NamespaceKey(bytes(32)),
        "sampling": SamplingParams(max_tokens=8),
    }
    return GenerateRequest(**(fields | changes))  # type: ignore[arg-type]  # names are checked


async def answers(node: RemoteNode, asked: GenerateRequest | None = None) -> list[GenerateEvent]:
    async with aclosing(node.generate(asked or request())) as events:
        return [event async for event in events]


async def test_a_whole_answer_ends_without_its_end_token_and_with_an_account() -> None:
    async with wired(HEAD + TOKEN + STOP + USAGE + DONE) as (wire, node):
        first, last = await answers(node)
        assert (first.token_ids, last.token_ids) == ((97,), (98,))
        assert last.finish_reason is FinishReason.STOP and last.usage is not None
        assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (3, 2)
        assert last.usage.hit_tokens.l1 == 2
        assert b"authorization: Bearer k-1" in wire.heads[0]
        assert not node.life or not node.life.running


async def test_a_prefill_hands_over_unless_its_token_was_the_last() -> None:
    cut = STOP.replace(b'[98, 2], "finish_reason": "stop"', b'[98], "finish_reason": "length"')
    async with wired(HEAD + cut + USAGE + DONE) as (_, node):
        (only,) = await answers(node, request(handoff=True))
        assert only.finish_reason is FinishReason.HANDOFF and only.token_ids == (98,)
        (only,) = await answers(node, request(handoff=True, sampling=SamplingParams(max_tokens=1)))
        assert only.finish_reason is FinishReason.LENGTH


async def test_json_is_neither_handed_over_nor_taken_over() -> None:
    end = STOP.replace(b"stop", b"length")
    async with wired(HEAD + TOKEN + end + USAGE + DONE) as (_, node):
        *_, last = await answers(node, request(handoff=True, guide='{"type": "null"}'))
        assert last.finish_reason is FinishReason.LENGTH and last.token_ids == (98, 2)
        with pytest.raises(NodeLostError, match="can't continue JSON, or an answer with penalties"):
            await answers(node, request(resumed_tokens=1, guide='{"type": "null"}'))
    async with wired(HEAD + TOKEN) as (_, node):
        with pytest.raises(NodeLostError, match="the stream ended early"):
            await answers(node, request(guide='{"type": "null"}'))


def meta(ids: bytes, completion: int, *, ended: bool = False) -> bytes:
    reason = b'{"type": "length"}' if ended else b"null"
    return b'data: {"output_ids": [%s], "meta_info": {"completion_tokens": %d, ' % (
        ids, completion,
    ) + b'"finish_reason": %s}}\n\n' % reason  # fmt: skip


@pytest.mark.parametrize(
    "events",
    [
        (meta(b"7", 1), meta(b"7, 7, 8", 3), meta(b"7, 7, 8, 9", 4, ended=True)),
        (meta(b"7", 1), meta(b"7, 8", 3), meta(b"9", 4, ended=True)),
        # The list has grown since its tokens were counted.
        (meta(b"7, 7", 1), meta(b"7, 7, 8, 9", 3), meta(b"7, 7, 8, 9", 4, ended=True)),
    ],
    ids=["all so far", "new ones", "more than counted"],
)
async def test_sglangs_tokens_come_once(events: tuple[bytes, ...]) -> None:
    async with wired(HEAD + b"".join(events) + DONE, EngineKind.SGLANG) as (_, node):
        got = [token for event in await answers(node) for token in event.token_ids]
    assert got == [7, 7, 8, 9]


async def test_an_answer_of_sglangs_that_is_another_one_is_refused() -> None:
    events = meta(b"7, 8", 2) + meta(b"7, 9, 9", 3, ended=True)
    async with wired(HEAD + events + DONE, EngineKind.SGLANG) as (_, node):
        with pytest.raises(RemoteProtocolError, match="does not continue where it stopped"):
            await answers(node)


def test_a_url_with_a_password_is_not_taken_nor_shown() -> None:
    url = "http://me:hidden@127.0.0.1:8000"
    config = RemoteConfig(NodeId("n"), HostId("h"), NodeRole.COMPUTE, EngineKind.VLLM, url)
    with pytest.raises(ConfigError, match="name or password") as caught:
        open_door(config)
    assert "hidden" not in str(caught.value)


def status(code: int, body: bytes, *headers: bytes) -> bytes:
    lines = [b"HTTP/1.1 %d X" % code, b"connection: close", *headers, b"", body]
    return b"\r\n".join(lines)


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (b"", TransportError),
        (HEAD, TransportError),
        (HEAD + TOKEN, TransportError),
        (HEAD + TOKEN[:20], TransportError),
        (HEAD + TOKEN + STOP.replace(b"stop", b"abort") + DONE, TransportError),
        (HEAD + TOKEN + DONE, RemoteProtocolError),
        (HEAD + b"data: {nonsense\n\n", RemoteProtocolError),
        (HEAD + b"data: [1]\n\n", RemoteProtocolError),
        (HEAD + b'data: {"choices": [7]}\n\n', RemoteProtocolError),
        (HEAD + TOKEN.replace(b"[97]", b'["x"]'), RemoteProtocolError),
        (HEAD + TOKEN.replace(b"[97]", b"[-1]"), RemoteProtocolError),
        (HEAD + TOKEN.replace(b"[97]", b"97"), RemoteProtocolError),
        (HEAD + 9 * TOKEN + STOP + DONE, TransportError),
        (HEAD + b'data: {"error": {"message": "died", "code": 500}}\n\n', TransportError),
        (HEAD + b'data: {"error": {"message": "too long", "code": 400}}\n\n', ContextTooLongError),
        (status(503, b"busy", b"retry-after: 7"), OverloadedError),
        (status(500, b"EngineDeadError"), TransportError),
        (b"this is no HTTP\r\n\r\n", TransportError),
    ],
)
async def test_a_broken_answer_is_an_error_and_leaves_nothing(
    reply: bytes, kind: type[TierKVError]
) -> None:
    async with wired(reply) as (_, node):
        with pytest.raises(kind) as caught:
            await answers(node)
        assert type(caught.value) is kind
        assert node.life is not None and not node.life.running
        if isinstance(caught.value, OverloadedError):
            assert caught.value.retry_after_ms == 7_000


async def test_a_reply_without_end_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_ENGINE_REPLY_BYTES", 1_000)
    async with wired(status(400, b"x" * 5_000)) as (_, node):
        with pytest.raises(RemoteProtocolError, match="exceeds 1000 bytes"):
            await answers(node)


async def leave_early(node: RemoteNode) -> None:
    async with aclosing(node.generate(request())) as events:
        await anext(events)


async def cancel(node: RemoteNode) -> None:
    async with aclosing(node.generate(request())) as events:
        await anext(events)
        assert await node.cancel(RequestId("q")) and not await node.cancel(RequestId("other"))
        last = await anext(events)
        assert last.finish_reason is FinishReason.CANCELLED and last.usage is not None
        assert last.usage.completion_tokens == 1


async def end_its_life(node: RemoteNode) -> None:
    async with aclosing(node.generate(request())) as events:
        await anext(events)
        node.end_life("it is gone")
        with pytest.raises(TransportError, match="it is gone"):
            await anext(events)
    with pytest.raises(TransportError, match="does not answer"):
        await anext(node.generate(request()))
    assert node.info().models == () and "does not answer" in node.report().notes[0]


@pytest.mark.parametrize("leave", [leave_early, cancel, end_its_life])
async def test_who_ends_a_request_closes_the_connection(
    leave: Callable[[RemoteNode], asyncio.Future[None]],
) -> None:
    async with wired(None) as (wire, node):
        await leave(node)
        async with asyncio.timeout(10):
            await wire.left.wait()


async def test_a_text_that_breaks_off_is_not_taken_over() -> None:
    async with wired(HEAD + TOKEN, EngineKind.OPENAI) as (_, node):
        with pytest.raises(NodeLostError, match="the stream ended early"):
            await answers(node)
    async with wired(b"", EngineKind.OPENAI) as (_, node):
        with pytest.raises(TransportError):
            await answers(node)
