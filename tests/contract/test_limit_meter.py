"""The LimitMeter contract: in memory, in Valkey, and in Debian's older Redis.

The server's buckets and ours run side by side: what both decide must be the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest
from valkey import Valkey

from tests.fix_valkey import redis_server, valkey_server
from tierkv.kvcore.call_limits import CallLimits, Subject, SubjectKind, WhenLost
from tierkv.kvcore.clock import SystemClock
from tierkv.kvcore.errors import CallLimitError
from tierkv.scheduler.limits.buckets import Charge, LimitMeter
from tierkv.scheduler.limits.embedded_meter import EmbeddedMeter
from tierkv.scheduler.limits.gate import Caller, CallGate
from tierkv.scheduler.limits.place_leases import PlaceLeases
from tierkv.scheduler.limits.valkey_meter import ValkeyMeter
from tierkv.scheduler.shared_state.contract import SharedStateLostError
from tierkv.scheduler.shared_state.valkey import ServerScripts

SLOW = Charge("tenant:ann:requests", 1, per_s=1e-3, burst=2.0)
"""A bucket that does not fill while a test runs."""


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    folder = tmp_path_factory.mktemp("servers")
    with valkey_server(folder / "valkey") as valkey, redis_server(folder / "redis") as redis:
        yield {"valkey": valkey, "redis": redis}


@pytest.fixture(params=["embedded", "valkey", "redis"])
async def meter(request: pytest.FixtureRequest) -> AsyncIterator[LimitMeter]:
    if request.param == "embedded":
        yield EmbeddedMeter(SystemClock())
        return
    url = request.getfixturevalue("servers")[request.param]
    with Valkey.from_url(url) as client:
        client.flushall()
    shared = ValkeyMeter(url)
    yield shared
    await shared.close()


async def test_a_burst_is_taken_then_refused_with_the_time_to_wait(meter: LimitMeter) -> None:
    assert (await meter.take([SLOW], 0.0)).refused == -1
    assert (await meter.take([SLOW], 0.0)).refused == -1
    third = await meter.take([SLOW], 0.0)
    assert third.refused == 0 and third.wait_s == pytest.approx(1_000.0, abs=60.0)
    assert await meter.left([SLOW]) == pytest.approx([0.0], abs=0.1)


async def test_who_has_patience_is_told_how_long(meter: LimitMeter) -> None:
    for expected_s in (0.0, 0.0, 1_000.0, 2_000.0):
        taken = await meter.take([SLOW], 3_000.0)
        assert (taken.refused, taken.wait_s) == (-1, pytest.approx(expected_s, abs=60.0))


async def test_all_or_nothing(meter: LimitMeter) -> None:
    other = Charge("tenant:ann:prompt_tokens", 50, per_s=1e-3, burst=60.0)
    assert (await meter.take([SLOW, other], 0.0)).refused == -1
    assert (await meter.take([SLOW, other], 0.0)).refused == 1
    assert await meter.left([SLOW, other]) == pytest.approx([1.0, 10.0], abs=0.1)


async def test_more_than_a_burst_is_taken_from_a_full_bucket_into_debt(meter: LimitMeter) -> None:
    large = replace(SLOW, amount=5)
    assert (await meter.take([large], 0.0)).refused == -1
    assert await meter.left([large]) == pytest.approx([-3.0], abs=0.1)
    assert (await meter.take([large], 0.0)).refused == 0


async def test_what_is_given_back_may_be_taken_again(meter: LimitMeter) -> None:
    await meter.give_back([SLOW])  # Of a full bucket: nothing to give back to.
    await meter.take([replace(SLOW, amount=2)], 0.0)
    await meter.give_back([replace(SLOW, amount=1.5)])
    assert await meter.left([SLOW]) == pytest.approx([1.5], abs=0.1)
    await meter.give_back([SLOW])
    assert await meter.left([SLOW]) == pytest.approx([2.0], abs=0.1)
    assert (await meter.take([replace(SLOW, amount=2)], 0.0)).refused == -1


async def test_a_lost_server_is_said() -> None:
    meter = ValkeyMeter("redis://127.0.0.1:1")
    with pytest.raises(SharedStateLostError):
        await meter.take([SLOW], 0.0)
    with pytest.raises(SharedStateLostError):
        await meter.left([SLOW])
    await meter.give_back([SLOW])
    await meter.close()


# Places in flight, counted over all fronts.

ANN = Subject(SubjectKind.TENANT, "ann")


@pytest.fixture(params=["valkey", "redis"])
async def fronts(
    request: pytest.FixtureRequest, servers: dict[str, str]
) -> AsyncIterator[tuple[CallGate, CallGate]]:
    """Two fronts with one limit of two calls at a time."""
    with Valkey.from_url(servers[request.param]) as client:
        client.flushall()
    gates = [CallGate(ValkeyMeter(servers[request.param])) for _ in range(2)]
    for gate in gates:
        gate.follow({ANN: CallLimits(max_in_flight=2)})
    yield gates[0], gates[1]
    for gate in gates:
        await gate.meter.close()


async def enter(gate: CallGate, stack: AsyncExitStack, *, waits: bool = False) -> None:
    caller = Caller("ann", waits=waits)
    await stack.enter_async_context(gate.admitted(caller, prompt_tokens=1, most_tokens=1))


async def test_places_are_counted_over_all_fronts(fronts: tuple[CallGate, CallGate]) -> None:
    async with AsyncExitStack() as here, AsyncExitStack() as there:
        await enter(fronts[0], here)
        await enter(fronts[1], there)
        for gate in fronts:
            assert [row.left for row in await gate.left(Caller("ann"))] == [0]
            with pytest.raises(CallLimitError, match="max_in_flight"):
                await enter(gate, here)
        # A statement's call waits for the other front's, and its place comes at once.
        waiting = asyncio.create_task(enter(fronts[0], here, waits=True))
        await there.aclose()
        await waiting
        # A limit below what is in flight refuses new calls; without the limit all go.
        fronts[1].follow({ANN: CallLimits(max_in_flight=1)})
        with pytest.raises(CallLimitError):
            await enter(fronts[1], there)
        fronts[1].follow({})
        await enter(fronts[1], there)
    assert [row.left for row in await fronts[0].left(Caller("ann"))] == [2]


async def test_the_places_of_a_killed_front_come_back_and_of_a_living_one_do_not(
    servers: dict[str, str],
) -> None:
    clients = [ServerScripts(servers["valkey"]) for _ in range(2)]
    killed, living = (PlaceLeases(client, lease_s=0.5, renew_s=0.05) for client in clients)
    with Valkey.from_url(servers["valkey"]) as server:
        server.flushall()
        kept = await living.take("ann", 2)
        assert kept and await killed.take("ann", 2)
        assert not await living.take("ann", 2)
        assert killed._keeper is not None
        killed._keeper.cancel()  # A kill renews nothing.
        while not (lease := await living.take("ann", 2)):
            await asyncio.sleep(0.05)
        living.give_back(lease)
        # The server forgets: the next renewal tells it of the call in flight.
        server.flushall()
        while await living.taken(["ann"]) != [1]:
            await asyncio.sleep(0.05)
        assert not await living.take("ann", 1)
        living.give_back(kept)
        assert await living.take("ann", 1)
        await living.close()
        assert await living.taken(["ann"]) == [0]
    for client in clients:
        await client.close()


async def test_without_the_server_places_are_open_unless_a_setting_says_no() -> None:
    for when_lost, admits in ((WhenLost.AUTO, True), (WhenLost.REFUSE, False)):
        gate = CallGate(ValkeyMeter("redis://127.0.0.1:1"), when_lost=when_lost)
        gate.follow({ANN: CallLimits(max_in_flight=1)})
        async with AsyncExitStack() as stack:
            if admits:
                await enter(gate, stack)
                with pytest.raises(CallLimitError, match="max_in_flight"):
                    await enter(gate, stack)
            else:
                with pytest.raises(CallLimitError, match="can't be looked up"):
                    await enter(gate, stack)
        await gate.meter.close()
