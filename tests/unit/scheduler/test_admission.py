"""Waiting at the scheduler: bounds, order, predictions, refusals, and who takes a free place."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.fix_scheduler import make_info, make_model
from tests.unit.scheduler.test_state import CONFIG, Script, dispatched
from tierkv.costing.node_cost import CachedPrefix
from tierkv.kvcore.ids import NodeId, RequestId
from tierkv.kvcore.node import NodeInfo, NodeRole
from tierkv.scheduler.config import SchedulerConfig
from tierkv.scheduler.events import (
    ChainLocated,
    Dispatch,
    Fail,
    Failure,
    FirstToken,
    HandoffDone,
    Instruction,
    Locate,
    NodeLost,
    Prefetch,
    PrefetchDone,
    RequestCancelled,
    RequestFinished,
    Wait,
    WaitOver,
    WantedModel,
)
from tierkv.scheduler.request_record import RequestPhase

ONE = replace(CONFIG, max_in_flight_per_node=1)
BLOCK = 16


def name(request_id: str) -> RequestId:
    return RequestId(request_id)


def finish(script: Script, request_id: str) -> list[Instruction]:
    script.do(FirstToken(name(request_id)))
    return script.do(RequestFinished(name(request_id)))


def waits(instructions: list[Instruction]) -> list[str]:
    return [i.request_id for i in instructions if isinstance(i, Wait)]


def failed(instructions: list[Instruction]) -> list[Fail]:
    return [i for i in instructions if isinstance(i, Fail)]


def test_a_full_node_gets_the_next_request_when_one_ends() -> None:
    script = Script(make_info("c1"), config=ONE)
    assert dispatched(script.arrive("q1"))
    assert waits(script.arrive("q2")) == ["q2"]
    assert script.state.placement.queued == 1
    assert [i[0] for i in dispatched(finish(script, "q1"))] == ["q2"]


def test_a_cancelled_request_makes_room_at_once() -> None:
    script = Script(make_info("c1"), config=ONE)
    for request_id in ("q1", "q2", "q3"):
        script.arrive(request_id)
    assert dispatched(script.do(RequestCancelled(name("q2")))) == []
    assert [i[0] for i in dispatched(script.do(RequestCancelled(name("q1"))))] == ["q3"]


def test_those_who_wait_go_by_priority_then_by_arrival() -> None:
    script = Script(make_info("c1"), config=ONE)
    script.arrive("running")
    for request_id, priority in (("later", 1), ("first", 0), ("second", 0), ("urgent", -1)):
        script.arrive(request_id, priority=priority)
    order, last = [], "running"
    for _ in range(4):
        ((last, _, _),) = dispatched(finish(script, last))
        order.append(last)
    assert order == ["urgent", "first", "second", "later"]


def test_tenants_take_turns() -> None:
    """A loud tenant's request takes a second of the node; a quiet one waits for turns that came."""
    script = Script(make_info("c1"), config=ONE)
    script.arrive("running", tenant="loud")
    for number in range(20):
        script.arrive(f"loud-{number}", tenant="loud")
    script.now = 3.5
    for number in range(2):
        script.arrive(f"quiet-{number}", tenant="quiet")
    script.arrive("third", tenant="third")
    order, last = [], "running"
    for _ in range(9):
        ((last, _, _),) = dispatched(finish(script, last))
        order.append(last)
    assert order == [
        *(f"loud-{number}" for number in range(4)),
        *("quiet-0", "third", "loud-4", "loud-5", "quiet-1"),
    ]


def test_turns_are_shared_by_weight() -> None:
    script = Script(make_info("c1"), config=ONE)
    script.arrive("running", tenant="other")
    for number in range(12):
        script.arrive(f"heavy-{number}", tenant="heavy", weight=3.0)
        script.arrive(f"light-{number}", tenant="light")
    order, last = [], "running"
    for _ in range(12):
        ((last, _, _),) = dispatched(finish(script, last))
        order.append(last.partition("-")[0])
        script.state.queue.check_invariants()
    assert order.count("heavy") == 9 and "light" in order[:4]


def test_a_tenant_whose_requests_are_gone_owes_nothing() -> None:
    script = Script(make_info("c1"), config=ONE)
    script.arrive("running")
    for request_id in ("a", "b", "c"):
        script.arrive(request_id, tenant="loud")
    for request_id in ("a", "b", "c"):
        script.do(RequestCancelled(name(request_id)))
    script.arrive("again", tenant="loud")
    script.arrive("other", tenant="quiet")
    assert [i[0] for i in dispatched(finish(script, "running"))] == ["again"]


def test_waiting_outweighs_priority_in_time() -> None:
    script = Script(make_info("c1"), config=replace(ONE, priority_step_s=10.0))
    script.arrive("running")
    script.arrive("patient", priority=2)
    script.now = 20.5
    script.arrive("newer", priority=0)
    assert [i[0] for i in dispatched(finish(script, "running"))] == ["patient"]


def test_no_priority_is_so_high_that_others_starve() -> None:
    script = Script(make_info("c1"), config=replace(ONE, priority_step_s=1.0))
    script.arrive("running")
    script.arrive("patient", priority=1 << 30)
    script.now = 250.0
    script.arrive("newer", priority=-(1 << 30))
    assert [i[0] for i in dispatched(finish(script, "running"))] == ["patient"]


def test_bulk_leaves_places_to_urgent_requests_until_it_has_waited_long() -> None:
    script = Script(make_info("c1"), config=replace(CONFIG, max_in_flight_per_node=16))
    for number in range(20):
        script.arrive(f"bulk{number}", priority=1)
    assert len(script.state.queue) == 5  # One of 16 places is left.
    assert dispatched(script.arrive("chat"))
    assert waits(script.arrive("chat2")) == ["chat2"]
    assert [i[0] for i in dispatched(finish(script, "bulk0"))] == ["chat2"]
    assert dispatched(finish(script, "bulk1")) == []  # 15 places are taken again.
    script.now += CONFIG.priority_step_s
    finish(script, "bulk2")
    assert len(script.state.queue) == 3  # The free place and the new one are taken.


def test_a_node_that_comes_late_takes_those_who_wait() -> None:
    script = Script(make_info("c1"), config=ONE)
    for request_id in ("q1", "q2", "q3"):
        script.arrive(request_id)
    instructions = script.see(make_info("c1"), make_info("c2"))
    assert dispatched(instructions)[0][:2] == ("q2", "c2")
    assert script.state.requests[name("q3")].phase is RequestPhase.WAITING


def test_another_front_s_requests_fill_a_node_but_never_shut_it() -> None:
    script = Script(make_info("c1"), config=replace(CONFIG, max_in_flight_per_node=4))
    record = script.state.fleet.records[NodeId("c1")]
    record.others_in_flight = 100
    assert dispatched(script.arrive("q1"))
    assert waits(script.arrive("q2")) == ["q2"]
    record.others_in_flight = 0
    assert dispatched(script.do(WaitOver(name("q2"))))


def test_with_a_choice_prompts_wait_behind_a_second_of_work() -> None:
    config = replace(CONFIG, prefill_tokens_per_s=10_000.0, node_queue_s=1.0)
    script = Script(make_info("c1"), make_info("c2"), config=config)
    for request_id in ("a", "b", "c", "d"):
        assert dispatched(script.arrive(request_id, tokens=9_000))
    assert waits(script.arrive("e", tokens=9_000)) == ["e"]
    assert [i[0] for i in dispatched(script.do(FirstToken(name("b"))))] == ["e"]


def test_the_only_node_gets_all_prompts_to_batch() -> None:
    config = replace(CONFIG, prefill_tokens_per_s=10_000.0, node_queue_s=1.0)
    script = Script(make_info("c1"), config=config)
    for at in range(10):
        assert dispatched(script.arrive(f"q{at}", tokens=9_000))


def test_who_waits_for_one_node_keeps_no_other_idle() -> None:
    """Many wait for the node that has their blocks; the one behind them wants the other one."""
    config = replace(ONE, prefill_tokens_per_s=100.0, l2_bytes_per_s=1e12)
    script = Script(make_info("c1"), make_info("c2"), config=config)

    def arrive(request_id: str, node: str) -> list[Instruction]:
        script.arrive(request_id, tokens=40_000, locatable=True)
        near = {NodeId(node): CachedPrefix(2_499, 2_499)}
        return script.do(ChainLocated(name(request_id), near))

    assert dispatched(arrive("one0", "c1")) and dispatched(arrive("on2", "c2"))
    for at in range(1, 30):
        assert waits(arrive(f"one{at}", "c1"))
    for at in range(1, 6):
        script.now += 1.0
        assert dispatched(finish(script, f"one{at - 1}"))[0][:2] == (f"one{at}", "c1")
    assert waits(arrive("two", "c2"))
    assert dispatched(finish(script, "on2"))[0][:2] == ("two", "c2")
    assert dispatched(finish(script, "one5"))[0][:2] == ("one6", "c1")


def test_a_place_that_is_free_is_better_than_one_nobody_knows_when() -> None:
    script = Script(make_info("c1"), make_info("c2"), config=ONE)
    near = {NodeId("c1"): CachedPrefix(6, 6)}
    for request_id, node in (("q1", "c1"), ("q2", "c2")):
        script.arrive(request_id, locatable=True)
        assert dispatched(script.do(ChainLocated(name(request_id), near)))[0][1] == node


def test_nobody_waits_longer_for_the_best_node_than_another_one_costs_more() -> None:
    """The node with the blocks is full and stays so; turns elsewhere say that places come fast."""
    config = replace(ONE, prefill_tokens_per_s=100.0, queue_weight=0.0)
    script = Script(make_info("c1"), make_info("c2"), config=config)

    def arrive(request_id: str, node: str) -> list[Instruction]:
        script.arrive(request_id, tokens=1_000, locatable=True)
        return script.do(ChainLocated(name(request_id), {NodeId(node): CachedPrefix(62, 62)}))

    assert dispatched(arrive("hog", "c1"))[0][1] == "c1"
    script.do(FirstToken(name("hog")))
    assert dispatched(arrive("b0", "c2"))[0][1] == "c2"
    for at in range(1, 9):
        assert waits(arrive(f"b{at}", "c2"))
    assert waits(arrive("picky", "c1"))
    for at in range(8):
        script.now += 0.1
        assert dispatched(finish(script, f"b{at}"))[0][:2] == (f"b{at + 1}", "c2")
    assert dispatched(finish(script, "b8")) == []
    assert dispatched(arrive("c0", "c2"))
    script.now += 12.0
    assert dispatched(finish(script, "c0"))[0][:2] == ("picky", "c2")


def test_models_do_not_wait_for_each_other() -> None:
    other = make_info("d1", models=(make_model("other"),))
    script = Script(make_info("c1"), other, config=ONE)
    script.arrive("q1")
    for at in range(20):
        script.arrive(f"w{at}")
    assert dispatched(script.arrive("o1", model=WantedModel("other")))[0][1] == "d1"
    assert waits(script.arrive("o2", model=WantedModel("other")))
    assert [i[0] for i in dispatched(finish(script, "o1"))] == ["o2"]


def test_too_many_waiting_are_refused_with_a_time_to_come_back() -> None:
    script = Script(make_info("c1"), config=replace(ONE, max_waiting=2))
    for request_id in ("q1", "q2", "q3"):
        assert not failed(script.arrive(request_id))
    (fail,) = failed(script.arrive("q4"))
    assert fail.failure is Failure.OVERLOADED
    assert "2 requests wait" in fail.reason
    assert 0.05 <= fail.retry_after_s <= 60.0
    assert (script.state.placement.rejected, script.state.ended[RequestPhase.FAILED]) == (1, 1)
    assert dispatched(finish(script, "q1"))
    assert not failed(script.arrive("q5"))


def test_a_request_that_was_admitted_once_is_not_refused_later() -> None:
    script = Script(make_info("c1"), make_info("c2"), config=replace(ONE, max_waiting=1))
    ids = [dispatched(script.arrive(f"q{at}"))[0][0] for at in range(2)]
    assert waits(script.arrive("q2")) == ["q2"]
    lost = script.do(NodeLost(name(ids[0]), 100))
    assert waits(lost) == [ids[0]]
    assert len(script.state.queue) == 2


def test_turns_are_predicted_from_how_fast_they_went() -> None:
    script = Script(make_info("c1"), config=ONE)
    for at in range(12):
        script.arrive(f"q{at}", tokens=10)
    for at in range(6):
        script.now += 2.0
        finish(script, f"q{at}")
    waiting = script.state.queue.calls(script.now)
    assert [call.request_id for call in waiting] == [f"q{at}" for at in range(7, 12)]
    assert waiting[0].predicted_ttft_s == pytest.approx(12.0 + 2.0, rel=0.1)
    assert waiting[4].predicted_ttft_s == pytest.approx(12.0 + 10.0, rel=0.1)
    script.now += 30.0
    assert script.state.queue.calls(script.now)[0].predicted_ttft_s > 12.0 + 30.0 + 5.0


def slo(seconds: float, **more: object) -> SchedulerConfig:
    config = replace(CONFIG, prefill_tokens_per_s=1_000.0, ttft_slo_s=seconds)
    return replace(config, **more)  # type: ignore[arg-type]


def arrive_located(script: Script, request_id: str, tokens: int) -> list[Instruction]:
    assert script.arrive(request_id, tokens=tokens, locatable=True) == [Locate(name(request_id))]
    return script.do(ChainLocated(name(request_id)))


def test_who_would_miss_the_target_is_refused_until_the_queue_has_drained() -> None:
    script = Script(make_info("c1"), config=slo(10.0))
    assert dispatched(arrive_located(script, "q1", 4_000))
    assert dispatched(arrive_located(script, "q2", 4_000))
    (fail,) = failed(arrive_located(script, "q3", 4_000))
    assert "more than 10 s" in fail.reason
    assert fail.retry_after_s == pytest.approx(2.0, rel=0.1)
    script.now = 4.0
    script.do(FirstToken(name("q1")))
    assert dispatched(arrive_located(script, "q4", 4_000))


def test_what_is_cached_is_not_refused_where_a_long_prompt_is() -> None:
    script = Script(make_info("c1"), config=slo(10.0))
    arrive_located(script, "q1", 7_000)
    assert failed(arrive_located(script, "long", 7_000))
    script.arrive("cached", tokens=7_000, locatable=True)
    near = {NodeId("c1"): CachedPrefix(430, 430)}
    assert dispatched(script.do(ChainLocated(name("cached"), near)))


def test_a_prompt_longer_than_the_target_is_still_answered() -> None:
    script = Script(make_info("c1"), config=slo(10.0))
    assert dispatched(arrive_located(script, "q1", 30_000))
    assert failed(arrive_located(script, "q2", 30_000))


def test_a_waiting_request_counts_what_it_waits_for_in_its_target() -> None:
    script = Script(make_info("c1"), config=slo(10.0, max_in_flight_per_node=1))
    assert dispatched(arrive_located(script, "q0", 10))
    for at in range(1, 5):
        assert waits(arrive_located(script, f"q{at}", 10))
        script.now += 3.0
        assert dispatched(finish(script, f"q{at - 1}"))
    assert waits(arrive_located(script, "a", 10))
    assert waits(arrive_located(script, "b", 10))
    assert waits(arrive_located(script, "c", 10))
    (fail,) = failed(arrive_located(script, "d", 10))
    assert 1.0 < fail.retry_after_s < 4.0


def test_blocks_are_loaded_ahead_of_a_turn_once_and_few_at_a_time() -> None:
    config = replace(ONE, prefetches_per_node=1, prefill_tokens_per_s=10.0)
    script = Script(make_info("c1"), config=config)
    script.arrive("q1", tokens=100)
    pool = CachedPrefix(l3_blocks=50, l4_blocks=50)

    def wait(request_id: str) -> list[Prefetch]:
        script.arrive(request_id, tokens=50 * BLOCK + 1, locatable=True)
        told = script.do(ChainLocated(name(request_id), {}, pool))
        assert waits(told) == [request_id]
        return [i for i in told if isinstance(i, Prefetch)]

    (ahead,) = wait("q2")
    assert (ahead.request_id, ahead.node_id, ahead.tokens) == ("q2", "c1", 50 * BLOCK)
    assert wait("q3") == []
    told = script.do(PrefetchDone(name("q2"), NodeId("c1"), 50 * BLOCK))
    assert [i.request_id for i in told if isinstance(i, Prefetch)] == ["q3"]
    told = finish(script, "q1")
    (sent,) = [i for i in told if isinstance(i, Dispatch)]
    assert sent.request_id == "q2"
    assert sent.candidates[0].cost.service.load_s == 0.0
    assert dispatched(finish(script, "q2"))[0][0] == "q3"
    script.do(RequestCancelled(name("q3")))
    assert script.state.ahead.loading == {}


def test_nothing_is_loaded_ahead_that_is_there_already() -> None:
    script = Script(make_info("c1"), config=ONE)
    script.arrive("q1")
    script.arrive("q2", tokens=801, locatable=True)
    told = script.do(ChainLocated(name("q2"), {NodeId("c1"): CachedPrefix(50, 50)}))
    assert [type(i) for i in told] == [Wait]


def test_a_decode_stage_waits_without_holding_up_prefills() -> None:
    infos: list[NodeInfo] = [
        make_info("p", role=NodeRole.PREFILL),
        make_info("d", role=NodeRole.DECODE),
    ]
    script = Script(*infos, config=ONE)

    def prefilled(request_id: str) -> list[Instruction]:
        script.do(FirstToken(name(request_id)))
        return script.do(HandoffDone(name(request_id), 101))

    script.arrive("q1")
    assert dispatched(prefilled("q1"))[0][:2] == ("q1", "d")
    script.arrive("q2")
    assert waits(prefilled("q2")) == ["q2"]
    assert dispatched(script.arrive("q3"))[0][:2] == ("q3", "p")
    assert dispatched(finish(script, "q1"))[0][:2] == ("q2", "d")


def test_the_charge_for_delaying_others_counts_who_waits() -> None:
    script = Script(make_info("c1"), config=replace(ONE, queue_weight=3.0))

    def charge(instructions: list[Instruction]) -> float:
        (sent,) = [i for i in instructions if isinstance(i, Dispatch)]
        return sent.candidates[0].cost.charge

    assert charge(script.arrive("q1")) == 0.0
    for request_id in ("q2", "q3", "q4"):
        script.arrive(request_id)
    # Nobody is before q2 any more; q2 itself and two others wait.
    assert charge(finish(script, "q1")) == script.state.config.queue_weight * 3
    assert charge(finish(script, "q2")) == script.state.config.queue_weight * 2
