"""An engine that writes faster than anybody reads: it waits, and a cancel does not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from tierkv.integrations.remote.answering import Answering
from tierkv.integrations.remote.door import AnswerPiece, Counts, EngineLook, EngineRequest
from tierkv.kvcore import limits
from tierkv.kvcore.clock import SystemClock
from tierkv.kvcore.errors import NodeLostError
from tierkv.kvcore.ids import NamespaceKey, NodeId, RequestId
from tierkv.kvcore.request import FinishReason, GenerateRequest

PIECES = 50
PIECE_TOKENS = limits.MAX_QUEUED_ANSWER_TOKENS // 4
QUEUED_PIECES = 5
"""Four fill the bound, and one more was read before there was no room for it."""


class HastyDoor:
    """An engine of texts that has its whole answer at once."""

    score_refusal = ""
    speaks_text = True

    def __init__(self) -> None:
        self.written = 0
        self.closed = asyncio.Event()

    async def look(self) -> EngineLook:
        return EngineLook("m")

    async def answer(self, ask: EngineRequest) -> AsyncGenerator[AnswerPiece, None]:
        try:
            for number in range(PIECES):
                self.written += 1
                yield AnswerPiece((number,) * PIECE_TOKENS)
            yield AnswerPiece(ended="stop", counts=Counts(1, PIECES))
        finally:
            self.closed.set()

    async def close(self) -> None: ...


def answering(door: HastyDoor) -> Answering:
    asked = GenerateRequest(RequestId("q"), "m", (1, 2, 3), NamespaceKey(bytes(32)))
    ask = EngineRequest(asked, "m", "salt", max_tokens=0)
    return Answering(ask, door, node_id=NodeId("n"), ends=(), clock=SystemClock(), alone=True)


async def test_an_engine_waits_for_a_slow_reader_and_nothing_is_lost() -> None:
    door = HastyDoor()
    got: list[int] = []
    async with aclosing(answering(door).events()) as events:
        async for event in events:
            got += event.token_ids[:1]
            assert door.written <= len(got) + QUEUED_PIECES
    assert got == list(range(PIECES)) and event.finish_reason is FinishReason.STOP


async def test_a_cancel_ends_an_answer_whose_engine_waits() -> None:
    door = HastyDoor()
    asked = answering(door)
    async with aclosing(asked.events()) as events:
        await anext(events)
        asked.cancel()
        reasons = [event.finish_reason async for event in events]
    assert reasons[-1] is FinishReason.CANCELLED
    assert door.closed.is_set() and door.written < PIECES


async def test_an_engine_that_is_lost_while_it_waits_is_said_to_be() -> None:
    door = HastyDoor()
    asked = answering(door)
    async with aclosing(asked.events()) as events:
        await anext(events)
        asked.lose("it was killed")
        with pytest.raises(NodeLostError, match="it was killed"):
            async for _ in events:
                pass
    assert door.closed.is_set() and door.written < PIECES
