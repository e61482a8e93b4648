"""What every EngineDoor does, numbered as in integrations/remote/door.py."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest

from tests.fix_engine_http import KEY, PlayedEngine, playing
from tierkv.integrations.remote.door import AnswerPiece, EngineDoor, EngineKind, EngineRequest
from tierkv.kvcore.errors import (
    ConfigError,
    ContextTooLongError,
    OverloadedError,
    TierKVError,
    TransportError,
    UserError,
)
from tierkv.kvcore.ids import NamespaceKey, RequestId
from tierkv.kvcore.request import GenerateRequest, SamplingParams


@pytest.fixture(params=list(EngineKind))
async def engine(request: pytest.FixtureRequest) -> AsyncIterator[PlayedEngine]:
    async with playing(request.param) as engine:
        yield engine


@pytest.fixture
async def door(engine: PlayedEngine) -> AsyncIterator[EngineDoor]:
    """Every implementation in turn."""
    door = engine.door()
    yield door
    await door.http.close()


def ask(**changes: object) -> EngineRequest:
    fields: dict[str, object] = {
        "request_id": RequestId("q"),
        "model": "m",
        "token_ids": tuple(b"Hello"),
        "namespace_key": NamespaceKey(bytes(32)),
        "sampling": SamplingParams(max_tokens=3),
    }
    request = GenerateRequest(**(fields | changes))  # type: ignore[arg-type]  # names are checked
    return EngineRequest(request, "m", "salt", max_tokens=3)


async def answer(door: EngineDoor, asked: EngineRequest | None = None) -> list[AnswerPiece]:
    async with aclosing(door.answer(asked or ask())) as pieces:
        return [piece async for piece in pieces]


async def test_1_an_engine_that_does_not_answer_is_away(
    engine: PlayedEngine, door: EngineDoor
) -> None:
    assert (await door.look()).served == "m"
    await engine.stop()
    with pytest.raises(TransportError):
        await door.look()


async def test_1_a_refused_key_is_for_people_to_change(
    engine: PlayedEngine, door: EngineDoor
) -> None:
    engine.key = KEY
    assert (await door.look()).context_tokens == 4_096
    engine.key = "another"
    with pytest.raises(ConfigError):
        await door.look()


async def test_1_a_second_look_asks_one_question(engine: PlayedEngine, door: EngineDoor) -> None:
    first = await door.look()
    engine.asked.clear()
    engine.running = 3
    second = await door.look()
    assert second == first and len(engine.asked) == 1
    assert second.figures.running == (3 if "/metrics" in engine.asked else 0)


async def test_2_the_last_piece_alone_says_that_it_is_the_end(
    engine: PlayedEngine, door: EngineDoor
) -> None:
    pieces = await answer(door)
    assert bytes(token for piece in pieces for token in piece.token_ids) == b"abc"
    assert [bool(piece.ended) for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert pieces[-1].ended == "length"
    counts = pieces[-1].counts
    assert counts is not None and counts.hits.l1 == 2
    assert (counts.prompt_tokens, counts.completion_tokens) == (5, 3)


async def test_2_closing_the_iterator_aborts_in_the_engine(
    engine: PlayedEngine, door: EngineDoor
) -> None:
    engine.turns = asyncio.Semaphore(1)
    async with aclosing(door.answer(ask())) as pieces:
        await anext(pieces)
    async with asyncio.timeout(20):
        await engine.left.wait()


@pytest.mark.parametrize(
    ("status", "message", "kind"),
    [
        (400, "bad top_p", UserError),
        (400, "longer than the context length", ContextTooLongError),
        (503, "too many requests", OverloadedError),
        (500, "EngineDeadError", TransportError),
    ],
)
async def test_2_a_refusal_is_an_error_of_ours(
    engine: PlayedEngine, door: EngineDoor, status: int, message: str, kind: type[TierKVError]
) -> None:
    engine.refusal = status, message
    with pytest.raises(kind, match=message):
        await answer(door)


@pytest.mark.parametrize("tokens", [0, 2])
async def test_2_an_engine_that_dies_is_lost(
    engine: PlayedEngine, door: EngineDoor, tokens: int
) -> None:
    engine.breaks_after = tokens
    with pytest.raises(TransportError):
        await answer(door)


async def test_3_scores_come_in_the_order_of_the_request(
    engine: PlayedEngine, door: EngineDoor
) -> None:
    if door.score_refusal:
        assert door.speaks_text
        return
    wanted = (7, 3, *range(100, 400), 7)
    (piece,) = await answer(door, ask(score_token_ids=wanted))
    assert piece.scores == tuple(map(engine.chance_of, wanted))
    assert piece.ended and not piece.token_ids
    assert piece.counts is not None and piece.counts.completion_tokens == 0
