"""One turn of a conversation at a time, and open turns whose front has ended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tierkv.dbfront.http.responses.responses_router import LOST_S, looked_after
from tierkv.dbfront.sessions import conversations as module
from tierkv.dbfront.sessions.conversations import LOCK_S, Conversations
from tierkv.dbfront.sessions.session_file import SessionFile
from tierkv.dbfront.sessions.session_store import SessionTurn, TurnStatus
from tierkv.dbfront.sessions.turn_form import AskedTurn
from tierkv.kvcore.clock import ManualClock
from tierkv.kvcore.errors import SessionBusyError, UnknownSessionError


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def fronts(tmp_path: Path, clock: ManualClock) -> AsyncIterator[list[Conversations]]:
    """Two fronts with one place."""
    made = [Conversations(SessionFile(str(tmp_path / "s")), clock, ttl_s=99.0) for _ in range(2)]
    yield made
    for each in made:
        await each.stop()


def turn_of(clock: ManualClock, session_id: str) -> SessionTurn:
    return AskedTurn("a", session_id, [], clock.wall(), "m").open(
        TurnStatus.IN_PROGRESS, clock.wall()
    )


async def test_turns_wait_for_each_other_in_order(fronts: list[Conversations]) -> None:
    front = fronts[0]
    await front.create("a", session_id="s")
    order: list[int] = []

    async def turn(number: int) -> None:
        async with front.turn_of("a", "s"):
            order.append(number)
            await asyncio.sleep(0)
            order.append(number)

    await asyncio.gather(*(turn(number) for number in range(5)))
    assert order == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]


async def test_another_front_waits_until_the_turn_has_ended(fronts: list[Conversations]) -> None:
    one, other = fronts
    await one.create("a", session_id="s")
    ended = False

    async def later() -> None:
        async with other.turn_of("a", "s"):
            assert ended

    async with one.turn_of("a", "s"):
        waiting = asyncio.create_task(later())
        async with asyncio.timeout(5):
            while not other._queues:  # The other front has begun to wait.
                await asyncio.sleep(0)
        ended = True
    await waiting


async def test_a_turn_that_waits_too_long_is_told_so(
    fronts: list[Conversations], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "TURN_WAIT_S", 0.05)
    one, other = fronts
    await one.create("a", session_id="s")
    async with one.turn_of("a", "s"):
        for front in fronts:
            with pytest.raises(SessionBusyError, match="still running"):
                async with front.turn_of("a", "s"):
                    raise AssertionError
    async with other.turn_of("a", "s"):
        pass


async def test_the_lock_of_a_dead_front_ends_and_its_turn_is_not_stored(
    fronts: list[Conversations], clock: ManualClock
) -> None:
    dead, other = fronts
    made = await dead.create("a", session_id="s")
    now_s = clock.wall()
    assert await dead.run(dead.store.lock, "a", "s", "dead", now_s=now_s, until_s=now_s + LOCK_S)
    clock.advance(LOCK_S)
    async with other.turn_of("a", "s") as owner:
        late = AskedTurn("a", "s", [], clock.wall(), "m")
        turn = late.open(TurnStatus.IN_PROGRESS, clock.wall())
        answered = SessionTurn(
            "a", turn.response_id, "s", TurnStatus.COMPLETED, {}, now_s, ended_s=clock.wall()
        )
        put = other.store.put_turn
        assert await dead.run(dead.store.put_turn, answered, [], owner="dead") is None
        assert await other.run(put, answered, [], owner=owner) is not None
    assert (await other.session("a", "s")).turns == made.turns + 1


async def test_an_unknown_conversation_has_no_turns(fronts: list[Conversations]) -> None:
    with pytest.raises(UnknownSessionError):
        async with fronts[0].turn_of("a", "none"):
            raise AssertionError


async def test_a_turn_whose_front_shows_no_sign_of_life_has_failed(
    fronts: list[Conversations], clock: ManualClock
) -> None:
    one, other = fronts
    await one.create("a", session_id="s", is_list=False)
    opened = await one.run(one.store.put_turn, turn_of(clock, "s"), [])
    assert opened is not None
    clock.advance(LOST_S - 1)
    assert await looked_after(other, opened) == opened
    assert await one.run(one.store.sign, "a", opened.response_id, clock.wall())
    clock.advance(LOST_S - 1)
    alive = await other.run(other.store.turn, "a", opened.response_id, clock.wall())
    assert alive is not None and (await looked_after(other, alive)).status.is_open
    clock.advance(1)
    failed = await looked_after(other, alive)
    assert failed.status is TurnStatus.FAILED and failed.body["error"]["code"] == "server_error"
    assert not await one.run(one.store.sign, "a", opened.response_id, clock.wall())
