"""The SharedState contract: in Valkey, and in Debian's older Redis."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass

import pytest
from valkey import Valkey

from tests.fix_cluster import free_port
from tests.fix_valkey import redis_server, valkey_server
from tierkv.kvcore.errors import ConfigError
from tierkv.kvcore.ids import NodeId
from tierkv.scheduler.shared_state.contract import (
    KEPT_S,
    FrontWork,
    SharedState,
    SharedStateLostError,
)
from tierkv.scheduler.shared_state.valkey import ValkeyState

A, B = NodeId("compute-0"), NodeId("compute-1")


@dataclass(frozen=True)
class Place:
    """A shared state, and how its time passes.

    Attributes:
        state: what a front uses.
        pass_time: makes everything told so far as old as counts may be.
    """

    state: SharedState
    pass_time: Callable[[], None]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    folder = tmp_path_factory.mktemp("servers")
    with valkey_server(folder / "valkey") as valkey, redis_server(folder / "redis") as redis:
        yield {"valkey": valkey, "redis": redis}


@pytest.fixture(params=["valkey", "redis"])
async def place(request: pytest.FixtureRequest) -> AsyncIterator[Place]:
    url = request.getfixturevalue("servers")[request.param]
    with Valkey.from_url(url) as client:
        client.flushall()

        def pass_time() -> None:
            for front, told in client.hgetall("tierkv:work").items():
                told_ms, _, work = told.partition(b" ")
                earlier = int(told_ms) - int(KEPT_S * 1_000)
                client.hset("tierkv:work", front, b"%d %s" % (earlier, work))

        state = ValkeyState(url)
        yield Place(state, pass_time)
        await state.leave("one")


async def test_a_front_learns_the_sum_of_the_others(place: Place) -> None:
    shared = place.state
    assert await shared.exchange_work("one", {A: FrontWork(2, 70)}) == {}
    assert await shared.exchange_work("two", {A: FrontWork(1, 5), B: FrontWork(4, 0)}) == {
        A: FrontWork(2, 70, fronts=1)
    }
    assert await shared.exchange_work("three", {}) == {
        A: FrontWork(3, 75, fronts=2),
        B: FrontWork(4, 0, fronts=1),
    }


async def test_what_is_told_replaces_what_was_told(place: Place) -> None:
    shared = place.state
    await shared.exchange_work("one", {A: FrontWork(2, 70)})
    await shared.exchange_work("one", {B: FrontWork(1, 0)})
    assert await shared.exchange_work("two", {}) == {B: FrontWork(1, 0)}


async def test_a_front_that_leaves_or_falls_silent_is_forgotten(place: Place) -> None:
    shared = place.state
    await shared.exchange_work("one", {A: FrontWork(2, 70)})
    await shared.exchange_work("two", {A: FrontWork(1, 7)})
    await shared.leave("two")
    await shared.leave("nobody")
    assert await shared.exchange_work("three", {}) == {A: FrontWork(2, 70)}
    place.pass_time()
    assert await shared.exchange_work("three", {}) == {}
    await shared.exchange_work("one", {A: FrontWork(2, 70)})
    assert await shared.exchange_work("three", {}) == {A: FrontWork(2, 70)}


async def test_a_server_that_does_not_answer_is_one_error() -> None:
    shared = ValkeyState(f"redis://127.0.0.1:{free_port()}/0")
    with pytest.raises(SharedStateLostError):
        await shared.exchange_work("one", {})
    await shared.leave("one")


async def test_what_another_version_tells_is_skipped(servers: dict[str, str]) -> None:
    shared = ValkeyState(servers["valkey"])
    with Valkey.from_url(servers["valkey"]) as client:
        client.flushall()
        now_ms = int(client.time()[0]) * 1_000
        client.hset("tierkv:work", "new", b'%d {"compute-0": [3, 9, "more"]}' % now_ms)
        client.hset("tierkv:work", "strange", b'%d ["compute-0"]' % now_ms)
        assert await shared.exchange_work("one", {}) == {A: FrontWork(3, 9)}
        client.set("tierkv:work", "no hash")
        with pytest.raises(SharedStateLostError, match="WRONGTYPE"):
            await shared.exchange_work("one", {})
        client.flushall()
    await shared.leave("one")


def test_what_is_no_url_is_refused_without_showing_it() -> None:
    with pytest.raises(ConfigError, match=r"front\.shared_state") as caught:
        ValkeyState("http://user:secret@host")
    assert "secret" not in str(caught.value)
    assert "redis://" in caught.value.hint
