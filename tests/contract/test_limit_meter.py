"""The LimitMeter contract: in memory, in Valkey, and in Debian's older Redis.

The server's buckets and ours run side by side: what both decide must be the same.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

import pytest
from valkey import Valkey

from tests.fix_valkey import redis_server, valkey_server
from tierkv.kvcore.clock import SystemClock
from tierkv.scheduler.limits.buckets import Charge, LimitMeter
from tierkv.scheduler.limits.embedded_meter import EmbeddedMeter
from tierkv.scheduler.limits.valkey_meter import ValkeyMeter
from tierkv.scheduler.shared_state.contract import SharedStateLostError

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
