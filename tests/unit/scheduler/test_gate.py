"""The gate in front of the scheduler, with buckets in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from tierkv.kvcore.call_limits import CallLimits, Subject, SubjectKind, WhenLost, rate
from tierkv.kvcore.clock import ManualClock, SystemClock
from tierkv.kvcore.errors import CallLimitError
from tierkv.scheduler.limits.buckets import Charge, Taken
from tierkv.scheduler.limits.embedded_meter import EmbeddedMeter
from tierkv.scheduler.limits.gate import Caller, CallGate
from tierkv.scheduler.limits.place_leases import NONE_WAIT
from tierkv.scheduler.shared_state.contract import SharedStateLostError

ANN = Subject(SubjectKind.TENANT, "ann")
TEAM = Subject(SubjectKind.NAMESPACE, "team")
BIGS = Subject(SubjectKind.NAMESPACE, "bigs")
REST, SQL = Caller("ann"), Caller("ann", waits=True)


def gate_of(*limits: CallLimits, subjects: Sequence[Subject] = (ANN,), shares: int = 1) -> CallGate:
    gate = CallGate(EmbeddedMeter(SystemClock()), shares=shares)
    gate.follow(dict(zip(subjects, limits, strict=True)))
    return gate


async def call(gate: CallGate, caller: Caller = REST, *, generated: int = 1, most: int = 1) -> None:
    async with gate.admitted(caller, prompt_tokens=10, most_tokens=most) as admission:
        admission.began = generated > 0
        admission.completion_tokens = generated


async def remaining(gate: CallGate) -> dict[str, float | None]:
    return {row.limit: row.left for row in await gate.left(REST)}


async def test_rest_calls_over_the_limit_are_refused_with_the_time_to_wait() -> None:
    gate = gate_of(CallLimits(requests=rate("2/h")))
    await call(gate)
    await call(gate)
    with pytest.raises(CallLimitError, match="tenant ann has used its limit of requests: 2/h") as e:
        await call(gate)
    assert 1_700_000 < e.value.retry_after_ms <= 1_800_000
    assert "30 min" in e.value.hint and "tierkv.my_limits" in e.value.hint
    await call(gate, Caller("bob"))
    assert (await gate.left(REST))[0].refused == 1


async def test_tokens_that_were_not_generated_are_given_back() -> None:
    gate = gate_of(CallLimits(completion_tokens=rate("100/day"), prompt_tokens=rate("1K/day")))
    await call(gate, generated=20, most=80)
    left = await remaining(gate)
    assert left == pytest.approx({"completion_tokens": 80.0, "prompt_tokens": 990.0}, abs=0.5)
    await call(gate, generated=0, most=80)  # It failed before its first token.
    assert await remaining(gate) == pytest.approx(left, abs=0.5)
    async with gate.admitted(REST, prompt_tokens=1, most_tokens=80) as first:
        first.began = True
        with pytest.raises(CallLimitError, match="completion_tokens"):
            await call(gate, most=80)


async def test_a_statement_waits_for_tokens_that_running_calls_give_back() -> None:
    gate = gate_of(CallLimits(completion_tokens=rate("100/day")))
    generated: list[int] = []

    async def one() -> None:
        async with gate.admitted(SQL, prompt_tokens=1, most_tokens=60) as call:
            await asyncio.sleep(0)
            call.began, call.completion_tokens = True, 4
            generated.append(4)

    await asyncio.gather(*(one() for _ in range(8)))
    assert sum(generated) == 32
    with pytest.raises(CallLimitError):
        await call(gate, SQL, most=70)  # No running call gives anything back.
    async with gate.admitted(SQL, prompt_tokens=1, most_tokens=60):
        with pytest.raises(CallLimitError) as refused:
            await call(gate, REST, most=60)
    assert refused.value.retry_after_ms == 1_000


async def test_a_call_of_a_statement_waits_for_its_turn_one_after_the_other() -> None:
    gate = gate_of(CallLimits(requests=rate("100/s"), burst=1))
    loop = asyncio.get_running_loop()
    began = loop.time()
    await asyncio.gather(*(call(gate, SQL) for _ in range(11)))
    assert loop.time() - began >= 0.1


async def test_a_statements_call_that_would_wait_for_hours_is_refused() -> None:
    gate = gate_of(CallLimits(requests=rate("1/h")))
    await call(gate, SQL)
    with pytest.raises(CallLimitError):
        await call(gate, SQL)


async def test_a_smooth_limit_lets_rest_wait_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tierkv.scheduler.limits.gate.SMOOTH_WAIT_S", 0.2)
    gate = gate_of(CallLimits(requests=rate("20/s"), smooth=True, max_in_flight=1))
    loop = asyncio.get_running_loop()
    began = loop.time()
    await asyncio.gather(*(call(gate) for _ in range(3)))
    assert loop.time() - began >= 0.1
    async with gate.admitted(SQL, prompt_tokens=1, most_tokens=1):
        with pytest.raises(CallLimitError, match=r"no turn within 0\.2 s"):
            await call(gate)
    assert (await remaining(gate))["max_in_flight"] == 1


async def test_calls_that_wait_are_told_with_the_time_of_the_next() -> None:
    gate = gate_of(CallLimits(requests=rate("1/min"), smooth=True), CallLimits(max_in_flight=9),
                   subjects=(ANN, TEAM))  # fmt: skip
    gate.namespace_of = {("ann", ""): "team"}
    await call(gate, SQL)
    assert {row.waits for row in await gate.left(REST)} == {NONE_WAIT}
    waiting = [asyncio.create_task(call(gate, SQL)) for _ in range(3)]
    while (rows := await gate.left(REST))[0].waits.next_s is None:
        await asyncio.sleep(0)
    assert {(row.subject, row.waits.calls) for row in rows} == {(ANN, 3), (TEAM, 3)}
    assert all(50.0 < (row.waits.next_s or 0.0) <= 60.0 for row in rows)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert {row.waits for row in await gate.left(REST)} == {NONE_WAIT}


async def test_who_is_cancelled_while_waiting_takes_nothing() -> None:
    gate = gate_of(CallLimits(requests=rate("1/min"), burst=1))
    await call(gate, SQL)
    before = await remaining(gate)
    waiting = asyncio.create_task(call(gate, SQL))
    while (await remaining(gate))["requests"] == pytest.approx(before["requests"], abs=0.5):
        await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert (await remaining(gate))["requests"] == pytest.approx(before["requests"], abs=0.1)


async def test_places_are_passed_on_in_order_and_rest_is_refused() -> None:
    gate = gate_of(CallLimits(max_in_flight=1))
    order: list[int] = []
    go_on = asyncio.Event()

    async def hold(number: int) -> None:
        async with gate.admitted(SQL, prompt_tokens=1, most_tokens=1):
            order.append(number)
            await go_on.wait()

    tasks = [asyncio.create_task(hold(number)) for number in range(4)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert order == [0]
    with pytest.raises(CallLimitError, match="max_in_flight: 1"):
        await call(gate)
    tasks[1].cancel()
    go_on.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert order == [0, 2, 3]
    assert await remaining(gate) == {"max_in_flight": 1.0}


async def test_a_limit_lowered_below_what_is_in_flight_lets_it_end_and_admits_no_more() -> None:
    gate = gate_of(CallLimits(max_in_flight=3))
    async with gate.admitted(REST, prompt_tokens=1, most_tokens=1):
        async with gate.admitted(REST, prompt_tokens=1, most_tokens=1):
            gate.follow({ANN: CallLimits(max_in_flight=1)})
            with pytest.raises(CallLimitError):
                await call(gate)
        with pytest.raises(CallLimitError):
            await call(gate)
        waiting = asyncio.create_task(call(gate, SQL))
        await asyncio.sleep(0)
        gate.follow({})  # Whoever waits is let in.
        await waiting
    await call(gate)


async def test_the_strictest_of_several_limits_holds_and_urgency_is_bounded() -> None:
    limits = CallLimits(requests=rate("9/h"), max_priority=-5), CallLimits(requests=rate("1/h"))
    gate = gate_of(*limits, subjects=(ANN, TEAM))
    gate.namespace_of = {("ann", ""): "team", ("bob", ""): "team", ("bob", "big"): "bigs"}
    await call(gate, Caller("bob"))
    with pytest.raises(CallLimitError, match="namespace team"):
        await call(gate)
    assert (await remaining(gate))["requests"] == pytest.approx(0.0, abs=0.1)
    assert [gate.priority(REST, asked) for asked in (-9, -5, 3)] == [-5, -5, 3]
    assert gate.priority(Caller("bob"), -9) == -9
    await call(gate, Caller("bob", model="big"))
    with pytest.raises(CallLimitError, match="namespace team"):
        await call(gate, Caller("bob", model="small"))
    gate.follow({BIGS: CallLimits(weight=3), TEAM: CallLimits(weight=2)})
    shown = await gate.left(Caller("bob"))
    assert [(row.subject, row.allowed) for row in shown] == [(TEAM, "2"), (BIGS, "3")]


async def test_workers_without_shared_buckets_have_a_share_each() -> None:
    gate = gate_of(CallLimits(requests=rate("8/h"), max_in_flight=8), shares=4)
    await call(gate)
    await call(gate)
    with pytest.raises(CallLimitError):
        await call(gate)
    assert (await remaining(gate))["max_in_flight"] == 2


class Lost:
    """A meter whose server is away."""

    async def take(self, charges: Sequence[Charge], patience_s: float) -> Taken:
        raise SharedStateLostError("away")

    async def give_back(self, charges: Sequence[Charge]) -> None: ...

    async def left(self, charges: Sequence[Charge]) -> list[float]:
        raise SharedStateLostError("away")

    places = None

    async def close(self) -> None: ...


@pytest.mark.parametrize(
    ("when_lost", "limit", "admits"),
    [
        (WhenLost.AUTO, "9/s", True),
        (WhenLost.AUTO, "9/day", False),
        (WhenLost.ADMIT, "9/day", True),
        (WhenLost.REFUSE, "9/s", False),
    ],
)
async def test_without_the_shared_buckets_budgets_are_closed_and_smoothing_open(
    when_lost: WhenLost, limit: str, admits: bool
) -> None:
    gate = CallGate(Lost(), when_lost=when_lost)
    gate.follow({ANN: CallLimits(requests=rate(limit))})
    if admits:
        await call(gate)
    else:
        with pytest.raises(CallLimitError, match=r"can't be looked up.*away"):
            await call(gate)
    assert await remaining(gate) == {"requests": None}


async def test_a_restart_does_not_fill_a_budget_again_and_a_clock_set_back_adds_no_debt(
    tmp_path: Path,
) -> None:
    clock = ManualClock()
    path = tmp_path / "limits.json"
    charge = Charge("tenant:ann:prompt_tokens", 600, per_s=1.0, burst=1_000.0)
    clock.advance(10_000.0)
    first = EmbeddedMeter(clock, path)
    await first.take([charge], 0.0)
    await first.close()
    assert await EmbeddedMeter(clock, path).left([charge]) == [400.0]
    clock.advance(100.0)
    assert await EmbeddedMeter(clock, path).left([charge]) == [500.0]
    early = ManualClock()
    assert await EmbeddedMeter(early, path).left([charge]) == [400.0]
    path.write_text("{")
    assert await EmbeddedMeter(clock, path).left([charge]) == [1_000.0]


async def test_a_wall_clock_that_jumps_neither_fills_nor_empties_a_bucket() -> None:
    class JumpingClock(ManualClock):
        jump_s = 0.0

        def wall(self) -> float:
            return super().wall() + self.jump_s

    clock = JumpingClock()
    meter = EmbeddedMeter(clock)
    charge = Charge("tenant:ann:prompt_tokens", 600, per_s=1.0, burst=1_000.0)
    await meter.take([charge], 0.0)
    for clock.jump_s in (86_400.0, -86_400.0):
        assert await meter.left([charge]) == [400.0]
    clock.advance(100.0)
    assert await meter.left([charge]) == [500.0]
