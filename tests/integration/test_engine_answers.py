"""An engine that writes faster than its reader, and one that is waited for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

import pytest

from tests.fix_engine_events import MODEL, batch, namespace, salt, stored
from tests.fix_engine_http import playing
from tierkv.integrations.events.feed import EngineEvents
from tierkv.integrations.events.following import Take
from tierkv.integrations.remote.answering import Answering
from tierkv.integrations.remote.door import (
    AnswerPiece,
    EngineDoor,
    EngineKind,
    EngineLook,
    EngineRequest,
)
from tierkv.integrations.remote.node import Life, RemoteNode
from tierkv.kvcore import limits
from tierkv.kvcore.block_event import NullReporter
from tierkv.kvcore.clock import SystemClock
from tierkv.kvcore.errors import NodeLostError
from tierkv.kvcore.ids import Incarnation, NamespaceKey, NodeId, RequestId
from tierkv.kvcore.request import FinishReason, GenerateRequest

pytestmark = pytest.mark.integration

CACHED = 96
PIECES = 50
PIECE_TOKENS = limits.MAX_QUEUED_ANSWER_TOKENS // 4
QUEUED_PIECES = 5
"""Four fill the bound, and one more was read before there was no room for it."""


class CountedDoor:
    """A door that counts the pieces that were read through it."""

    def __init__(self, door: EngineDoor) -> None:
        self.score_refusal, self.speaks_text, self.http = (
            door.score_refusal, door.speaks_text, door.http,
        )  # fmt: skip
        self.sampling_fields = door.sampling_fields
        self.look = door.look
        self.read = 0
        self.closed = asyncio.Event()
        self._answer = door.answer

    async def answer(self, ask: EngineRequest) -> AsyncGenerator[AnswerPiece, None]:
        try:
            async with aclosing(self._answer(ask)) as pieces:
                async for piece in pieces:
                    self.read += 1
                    yield piece
        finally:
            self.closed.set()


@pytest.fixture
async def door() -> AsyncIterator[CountedDoor]:
    """An engine of texts that has its whole answer at once."""
    async with playing(EngineKind.OPENAI) as engine:
        engine.answer_of = lambda ids, body: bytes(range(48, 48 + PIECES))
        engine.repeated = PIECE_TOKENS
        door = CountedDoor(engine.door())
        yield door
        await door.http.close()


def answering(door: CountedDoor) -> Answering:
    asked = GenerateRequest(RequestId("q"), "m", (1, 2, 3), NamespaceKey(bytes(32)))
    ask = EngineRequest(asked, "m", "salt", max_tokens=0)
    return Answering(ask, door, node_id=NodeId("n"), ends=(), clock=SystemClock(), alone=True)


async def test_an_engine_waits_for_a_slow_reader_and_nothing_is_lost(door: CountedDoor) -> None:
    got: list[int] = []
    async with aclosing(answering(door).events()) as events:
        async for event in events:
            got += event.token_ids[:1]
            assert door.read <= len(got) + QUEUED_PIECES
    assert got == list(range(48, 48 + PIECES)) and event.finish_reason is FinishReason.LENGTH


async def test_a_cancel_ends_an_answer_whose_engine_waits(door: CountedDoor) -> None:
    asked = answering(door)
    async with aclosing(asked.events()) as events:
        await anext(events)
        asked.cancel()
        reasons = [event.finish_reason async for event in events]
    assert reasons[-1] is FinishReason.CANCELLED
    assert door.closed.is_set() and door.read < PIECES


async def test_an_engine_that_is_lost_while_it_waits_is_said_to_be(door: CountedDoor) -> None:
    asked = answering(door)
    async with aclosing(asked.events()) as events:
        await anext(events)
        asked.lose("it was killed")
        with pytest.raises(NodeLostError, match="it was killed"):
            async for _ in events:
                pass
    assert door.closed.is_set() and door.read < PIECES


async def test_what_the_engine_has_cached_is_not_reported_as_waiting() -> None:
    asked = GenerateRequest(RequestId("q"), MODEL.name, tuple(range(100)), namespace())
    book = EngineEvents((), model=MODEL, reporter=NullReporter())
    book._act(0, Take(batch(1, stored(asked.token_ids[:CACHED], salt()))))
    async with playing(EngineKind.VLLM) as engine:
        engine.turns = asyncio.Semaphore(0)
        door = engine.door()
        node = RemoteNode(engine.config(), door)
        node.begin_life(Life(Incarnation(1), MODEL, EngineLook("m"), book))
        async with aclosing(node.generate(asked)) as events:
            first = asyncio.ensure_future(anext(events))
            await engine.began.wait()
            assert node.report().load.waiting_prefill_tokens == len(asked.token_ids) - CACHED
            engine.turns.release()
            await first
            assert node.report().load.waiting_prefill_tokens == 0
            engine.turns = None
        await door.http.close()
