"""What a node that stands for an engine says is yet to be computed: what the front counts, too."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from tierkv.integrations.events.feed import EngineEvents
from tierkv.integrations.remote.config import EngineKind, RemoteConfig
from tierkv.integrations.remote.door import AnswerPiece, EngineLook, EngineRequest
from tierkv.integrations.remote.node import Life, RemoteNode
from tierkv.integrations.remote.served_model import opaque_layout
from tierkv.kvcore.block_event import NullReporter
from tierkv.kvcore.ids import HostId, Incarnation, NamespaceKey, NodeId, RequestId
from tierkv.kvcore.node import ModelInfo, NodeRole
from tierkv.kvcore.request import GenerateRequest

MODEL = ModelInfo("m", "", "r", opaque_layout("x"), 4_096, (2,), "", 0)
CACHED = 96


class HeldDoor:
    """An engine that gives its first token, and its last one, when it is told to."""

    score_refusal = ""
    speaks_text = False

    def __init__(self) -> None:
        self.asked, self.first, self.last = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def look(self) -> EngineLook:
        return EngineLook("m")

    async def answer(self, ask: EngineRequest) -> AsyncGenerator[AnswerPiece, None]:
        self.asked.set()
        await self.first.wait()
        yield AnswerPiece((5,))
        await self.last.wait()
        yield AnswerPiece((6,), ended="stop")

    async def close(self) -> None: ...


class Believed(EngineEvents):
    """Events that told of a prompt's beginning."""

    def claimed_tokens(self, namespace: NamespaceKey, token_ids: Sequence[int]) -> int:
        return CACHED


async def test_what_the_engine_has_cached_is_not_reported_as_waiting() -> None:
    door = HeldDoor()
    config = RemoteConfig(
        NodeId("n"), HostId("h"), NodeRole.COMPUTE, EngineKind.VLLM, "http://127.0.0.1:1"
    )
    node = RemoteNode(config, door)
    book = Believed((), model=MODEL, reporter=NullReporter())
    node.begin_life(Life(Incarnation(1), MODEL, EngineLook("m"), book))
    asked = GenerateRequest(RequestId("q"), "m", tuple(range(100)), NamespaceKey(bytes(32)))

    async with aclosing(node.generate(asked)) as events:
        first = asyncio.ensure_future(anext(events))
        await door.asked.wait()
        assert node.report().load.waiting_prefill_tokens == len(asked.token_ids) - CACHED
        door.first.set()
        await first
        assert node.report().load.waiting_prefill_tokens == 0
        door.last.set()
        async for _ in events:
            pass
