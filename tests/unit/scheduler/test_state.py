"""Scenarios of the pure core, with tiny numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.fix_scheduler import make_info, make_model
from tierkv.costing.node_cost import CachedPrefix
from tierkv.kvcore.ids import HostId, Incarnation, NodeId, RequestId
from tierkv.kvcore.node import NodeInfo, NodeLoad, NodeRole
from tierkv.scheduler.config import SchedulerConfig
from tierkv.scheduler.events import (
    Abandon,
    ChainLocated,
    Dispatch,
    Event,
    Fail,
    Failure,
    FirstToken,
    HandoffDone,
    Instruction,
    Locate,
    NodeLost,
    NodesSeen,
    RefreshNodes,
    RequestArrived,
    RequestCancelled,
    RequestFinished,
    SeenNode,
    Stage,
    Wait,
    WaitOver,
    WantedModel,
)
from tierkv.scheduler.request_record import InvalidTransition
from tierkv.scheduler.requests.state import SchedulerState

CONFIG = SchedulerConfig(
    node_wait_s=10.0, backoff_initial_s=1.0, backoff_max_s=4.0, prefill_tokens_per_s=100.0
)
MODEL = WantedModel("tiny")


class Script:
    """A state and a time that only the test moves; checks invariants after each event."""

    def __init__(self, *infos: NodeInfo, config: SchedulerConfig = CONFIG) -> None:
        self.state = SchedulerState(config)
        self.now = 0.0
        self.see(*infos)

    def do(self, event: Event) -> list[Instruction]:
        instructions = self.state.handle(event, self.now)
        self.state.check_invariants()
        return instructions

    def see(self, *infos: NodeInfo, **state: str) -> list[Instruction]:
        nodes = (SeenNode(i, state=state.get(i.node_id, "alive")) for i in infos)
        return self.do(NodesSeen(tuple(nodes)))

    def arrive(self, name: str, tokens: int = 100, **more: object) -> list[Instruction]:
        arrived = RequestArrived(RequestId(name), MODEL, tokens)
        return self.do(replace(arrived, **more))  # type: ignore[arg-type]


def dispatched(instructions: list[Instruction]) -> list[tuple[str, str, Stage]]:
    return [(i.request_id, i.node_id, i.stage) for i in instructions if isinstance(i, Dispatch)]


def test_a_burst_is_spread_by_our_own_account_between_heartbeats() -> None:
    script = Script(make_info("c1"), make_info("c2"))
    chosen = [dispatched(script.arrive(f"q{i}"))[0][1] for i in range(6)]
    assert chosen.count("c1") == chosen.count("c2") == 3


def test_what_a_node_reports_beyond_ours_belongs_to_others() -> None:
    script = Script(make_info("c1"), make_info("c2"))
    loads = NodesSeen(
        (
            SeenNode(make_info("c1"), NodeLoad(requests_waiting=3, waiting_prefill_tokens=900)),
            SeenNode(make_info("c2")),
        )
    )
    script.do(loads)
    assert dispatched(script.arrive("q1")) == [("q1", "c2", Stage.WHOLE)]


def test_a_node_that_computed_nothing_yet_is_taken_to_be_as_fast_as_others_of_its_model() -> None:
    slow = NodeLoad(prefill_token_s=0.01, prefill_step_s=0.1)  # A tenth of what nobody measured.
    others = [make_info(f"c{at}") for at in range(3)]
    script = Script(*others, make_info("new"))
    loads = [SeenNode(info, slow) for info in others]
    script.do(NodesSeen((*loads, SeenNode(make_info("new")))))
    rates = {name: r.rates for name, r in script.state.fleet.records.items()}
    assert rates[NodeId("new")] == rates[NodeId("c0")]
    near = {NodeId("c1"): CachedPrefix(3, 3)}
    script.arrive("q1", tokens=100, locatable=True)
    chosen = script.do(ChainLocated(RequestId("q1"), near))
    assert dispatched(chosen) == [("q1", "c1", Stage.WHOLE)], "it has half of the prompt"


def test_nothing_is_concluded_from_nodes_of_other_models() -> None:
    slow = NodeLoad(prefill_tokens_per_s=3.0)
    other = make_info("c1", models=(make_model("other"),))
    script = Script(other, make_info("new"))
    script.do(NodesSeen((SeenNode(other, slow), SeenNode(make_info("new")))))
    rate = script.state.fleet.records[NodeId("new")].rates.prefill_tokens_per_s
    assert rate == script.state.config.prefill_tokens_per_s


def test_our_own_requests_in_a_report_are_not_counted_twice() -> None:
    script = Script(make_info("c1"))
    script.arrive("q1")
    load = NodeLoad(requests_running=1, waiting_prefill_tokens=100)
    script.do(NodesSeen((SeenNode(make_info("c1"), load),)))
    record = script.state.fleet.records[NodeId("c1")]
    assert (record.others_in_flight, record.others_waiting_tokens) == (0, 0)
    assert record.outstanding == 1


def test_what_was_ours_when_a_late_report_was_made_is_not_taken_for_others() -> None:
    script = Script(make_info("c1"))
    script.arrive("q1")
    load = NodeLoad(requests_running=1, waiting_prefill_tokens=100)
    script.do(RequestFinished(RequestId("q1")))
    record = script.state.fleet.records[NodeId("c1")]
    told = {}
    for _ in range(40):  # The same report again and again: the node has not told anything new.
        script.do(NodesSeen((SeenNode(make_info("c1"), load),)))
        told[round(script.now, 1)] = (record.others_in_flight, record.others_waiting_tokens)
        script.now += 0.1
    assert {told[at] for at in told if at <= 2.0} == {(0, 0)}
    assert told[3.5] == (1, 100)


def test_a_locatable_prompt_is_located_only_when_there_is_a_choice() -> None:
    assert dispatched(Script(make_info("c1")).arrive("q1", locatable=True))
    script = Script(make_info("c1"), make_info("c2"))
    assert script.arrive("q1", locatable=True) == [Locate(RequestId("q1"))]
    near = {NodeId("c2"): CachedPrefix(6, 6)}
    located = script.do(ChainLocated(RequestId("q1"), near))
    assert dispatched(located) == [("q1", "c2", Stage.WHOLE)]


def test_a_session_returns_to_its_node_when_costs_are_equal() -> None:
    script = Script(make_info("c1"), make_info("c2"))
    (_, node, _), *_ = dispatched(script.arrive("q1", session_id="s"))
    script.do(FirstToken(RequestId("q1")))
    script.do(RequestFinished(RequestId("q1")))
    for turn in range(2, 6):
        assert dispatched(script.arrive(f"q{turn}", session_id="s"))[0][1] == node
        script.do(FirstToken(RequestId(f"q{turn}")))
        script.do(RequestFinished(RequestId(f"q{turn}")))


def test_a_lost_node_is_suspended_probed_by_one_and_trusted_again() -> None:
    script = Script(make_info("c1"))
    script.arrive("q1")
    script.arrive("q2")
    lost = script.do(NodeLost(RequestId("q1"), 100))
    assert lost == [RefreshNodes(), Wait(RequestId("q1"), 1.0), RefreshNodes()]
    script.do(NodeLost(RequestId("q2"), 100))
    script.now = 1.0
    assert dispatched(script.do(WaitOver(RequestId("q1")))) == [("q1", "c1", Stage.WHOLE)]
    assert script.do(WaitOver(RequestId("q2"))) == [Wait(RequestId("q2"), 10.0), RefreshNodes()]
    assert dispatched(script.do(FirstToken(RequestId("q1")))) == [("q2", "c1", Stage.WHOLE)]


def test_backoff_doubles_up_to_its_bound() -> None:
    script = Script(make_info("c1"))
    script.arrive("q1")
    suspensions = []
    for _ in range(4):
        waits = [i for i in script.do(NodeLost(RequestId("q1"), 100)) if isinstance(i, Wait)]
        suspensions.append(waits[0].until_s - script.now)
        script.now = waits[0].until_s
        script.do(WaitOver(RequestId("q1")))
    assert suspensions == [1.0, 2.0, 4.0, 3.0]  # the last one ends with the request's patience


def test_waiting_ends_in_exactly_one_failure() -> None:
    script = Script()
    assert script.arrive("q1") == [Wait(RequestId("q1"), 10.0), RefreshNodes()]
    script.now = 10.0
    (fail,) = script.do(WaitOver(RequestId("q1")))
    assert isinstance(fail, Fail)
    assert fail.failure is Failure.NO_NODE
    assert script.do(WaitOver(RequestId("q1"))) == []


def test_a_new_incarnation_takes_over_waiting_and_running_requests() -> None:
    script = Script(make_info("c1"))
    script.arrive("q1")
    script.arrive("q2")
    script.do(NodeLost(RequestId("q2"), 100))
    instructions = script.see(make_info("c1", incarnation=Incarnation(2)))
    assert Abandon(RequestId("q1")) in instructions
    assert dispatched(instructions) == [("q2", "c1", Stage.WHOLE)]
    assert script.see(make_info("c1", incarnation=Incarnation(1))) == []


def test_prefill_hands_over_to_decode_near_it() -> None:
    script = Script(
        make_info("p", role=NodeRole.PREFILL),
        make_info("far", role=NodeRole.DECODE, host=HostId("h2")),
        make_info("near", role=NodeRole.DECODE, host=HostId("h1")),
        config=replace(CONFIG, l3_bytes_per_s=10.0),
    )
    assert dispatched(script.arrive("q1")) == [("q1", "p", Stage.PREFILL)]
    script.do(FirstToken(RequestId("q1")))
    done = script.do(HandoffDone(RequestId("q1"), 101))
    assert dispatched(done) == [("q1", "near", Stage.DECODE)]


def test_what_may_not_be_split_is_answered_where_it_was_prefilled() -> None:
    script = Script(
        make_info("p", role=NodeRole.PREFILL),
        make_info("d", role=NodeRole.DECODE),
    )
    assert dispatched(script.arrive("q1", splittable=False)) == [("q1", "p", Stage.WHOLE)]
    assert script.do(FirstToken(RequestId("q1"))) == []
    assert script.do(RequestFinished(RequestId("q1"))) == []


def test_a_prefill_node_alone_answers_to_the_end() -> None:
    script = Script(make_info("p", role=NodeRole.PREFILL))
    assert dispatched(script.arrive("q1")) == [("q1", "p", Stage.WHOLE)]


def test_suspects_and_wrong_roles_are_used_only_when_nobody_better_lives() -> None:
    compute, decode = make_info("c1"), make_info("d", role=NodeRole.DECODE)
    script = Script(compute, decode)
    script.see(compute, decode, c1="suspect")
    assert dispatched(script.arrive("q1"))[0][1] == "c1"
    script.see(compute, decode, c1="dead")
    assert dispatched(script.arrive("q2"))[0][1] == "d"


def test_a_directory_that_forgot_everybody_does_not_stop_the_service() -> None:
    script = Script(make_info("c1"))
    script.now = 1.0
    script.see()
    assert dispatched(script.arrive("q1"))
    script.now = 60.0
    script.see()
    assert not script.state.fleet.records


def test_a_cancelled_probe_leaves_the_node_to_the_next() -> None:
    script = Script(make_info("c1"))
    script.arrive("q1")
    script.do(NodeLost(RequestId("q1"), 100))
    script.now = 1.0
    script.do(WaitOver(RequestId("q1")))
    script.do(RequestCancelled(RequestId("q1")))
    assert dispatched(script.arrive("q2")) == [("q2", "c1", Stage.WHOLE)]


def test_an_illegal_move_tells_the_story() -> None:
    script = Script()
    script.arrive("q1")
    with pytest.raises(InvalidTransition, match=r"waiting -> finished.*RequestFinished"):
        script.state.handle(RequestFinished(RequestId("q1")), 0.0)
