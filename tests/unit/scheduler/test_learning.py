"""Learning from first tokens: what a node adds, how slow it is, and forgetting."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fix_scheduler import make_info
from tests.unit.scheduler.test_state import Script
from tierkv.costing.correction import (
    LEAST_FACTOR,
    LEAST_OVERHEAD_S,
    MOST_FACTOR,
    MOST_OVERHEAD_S,
    Correction,
)
from tierkv.kvcore.ids import NodeId, RequestId
from tierkv.kvcore.node import NodeLoad
from tierkv.scheduler.events import Dispatch, FirstToken, NodesSeen, RequestFinished, SeenNode
from tierkv.scheduler.routing_stats import RoutingStats, summarise


def test_what_a_node_adds_and_how_slow_it_is_are_told_apart() -> None:
    correction = Correction()
    for at in range(200):
        predicted_s = (0.01, 1.0)[at % 2]
        correction.learn(predicted_s, 0.05 + 1.5 * predicted_s, float(at))
    assert correction.overhead_s == pytest.approx(0.05, rel=0.1)
    assert correction.factor == pytest.approx(1.5, rel=0.1)


def test_a_few_answers_show_a_slow_node_and_a_single_one_does_not() -> None:
    correction = Correction()
    correction.learn(1.0, 100.0, 0.0)
    assert correction.factor < 2.0
    for at in range(4):
        correction.learn(1.0, 3.0, float(at))
    assert correction.factor == pytest.approx(2.7, abs=0.3)


@given(st.lists(st.tuples(st.floats(0.0, 1e6), st.floats(0.0, 1e6)), max_size=30))
def test_what_is_learned_stays_in_bounds(answers: list[tuple[float, float]]) -> None:
    correction = Correction()
    for at, (predicted_s, actual_s) in enumerate(answers):
        correction.learn(predicted_s, actual_s, float(at))
        correction.fade(at * 40.0)
    assert LEAST_FACTOR <= correction.factor <= MOST_FACTOR
    assert LEAST_OVERHEAD_S <= correction.overhead_s <= MOST_OVERHEAD_S


def test_what_no_answer_confirms_is_forgotten() -> None:
    correction = Correction()
    for _ in range(30):
        correction.learn(1.0, 4.0, 0.0)
        correction.learn(0.01, 0.5, 0.0)
    learned = (correction.overhead_s, correction.factor)
    for second in range(1, 181):
        correction.fade(float(second))
        if second == 30:
            assert (correction.overhead_s, correction.factor) == learned
    assert learned[1] > 2.5
    assert correction.factor == pytest.approx(1.0, abs=0.05)
    assert correction.overhead_s < 0.01 < learned[0]


def test_a_node_that_answers_late_is_left_and_tried_again() -> None:
    load = NodeLoad(prefill_token_s=1e-3)
    script = Script()

    def heartbeat() -> None:
        nodes = tuple(SeenNode(make_info(name), load) for name in ("c1", "c2"))
        script.do(NodesSeen(nodes))

    def ask(name: str) -> str:
        (dispatch,) = script.arrive(name, tokens=1_000)
        assert isinstance(dispatch, Dispatch)
        script.now += 4.0 if dispatch.node_id == "c1" else 1.0
        script.do(FirstToken(RequestId(name)))
        script.do(RequestFinished(RequestId(name)))
        return dispatch.node_id

    heartbeat()
    first = [ask(f"q{number}") for number in range(20)]
    assert "c1" in first[:2]
    assert set(first[5:]) == {"c2"}
    record = script.state.fleet.records[NodeId("c1")]
    assert record.correction.factor > 1.2
    for _ in range(90):
        script.now += 1.0
        heartbeat()
    assert "c1" in [ask(f"r{number}") for number in range(3)]


def test_the_truth_is_noted_beside_the_prediction() -> None:
    script, stats = Script(make_info("c1"), make_info("c2")), RoutingStats(8)
    for number, late_s in enumerate((1.0, 2.0, 9.0)):
        (dispatch,) = script.arrive(f"q{number}", tokens=100)
        assert isinstance(dispatch, Dispatch)
        stats.record_dispatch(dispatch, 0.0, model="tiny", prompt_tokens=100)
        if number < 2:
            predicted_s = dispatch.candidates[0].cost.ttft_s
            stats.record_first_token(dispatch, predicted_s + late_s)
    everybody, *each = summarise(stats.decisions())
    assert (everybody.node_id, everybody.count) == (None, 2)
    assert everybody.error_s == pytest.approx((1.5, 1.0, 2.0, 2.0))
    assert sum(one.count for one in each) == 2
