"""The plan of a statement, step by step: who is sent when, what is held and let go of."""

from __future__ import annotations

from tests.fix_scheduler import tree_of
from tierkv.kvcore.ids import NodeId
from tierkv.scheduler.plans.plan_events import (
    CallFailed,
    CallFinished,
    CallPrefilled,
    Cancelled,
    Hold,
    LetGo,
    PlanInstruction,
    PlanLostNode,
    PlanNode,
    PlanSawNodes,
    PrefetchRun,
    SendCall,
)
from tierkv.scheduler.plans.plan_runs import Effort
from tierkv.scheduler.plans.plan_state import PlanState

A, B = NodeId("a"), NodeId("b")
ONE = PlanSawNodes((PlanNode(A),))
TWO = PlanSawNodes((PlanNode(A), PlanNode(B)))


def plan_of(texts: list[list[int]], *, max_in_flight: int = 8) -> PlanState:
    tree = tree_of(texts)
    return PlanState(tree, Effort(), max_in_flight=max_in_flight)


def two_documents(questions: int = 2) -> list[list[int]]:
    """Instruction (1 block), document (2 blocks), question; stems 1, 2 and 3."""
    return [[1, 1, doc, doc, doc, doc, q] for doc in (2, 3) for q in range(10, 10 + questions)]


def sent(instructions: list[PlanInstruction]) -> list[int]:
    return [i.call for i in instructions if isinstance(i, SendCall)]


def test_the_first_call_computes_what_others_share_while_they_wait() -> None:
    plan = plan_of(two_documents())
    assert [i for i in plan.handle(ONE) if isinstance(i, SendCall)] == [SendCall(0, A, 6, 1, 6)]
    out = plan.handle(CallPrefilled(0))
    # Call 1 has all it needs; call 2 computes the second document, call 3 waits for it.
    assert sent(out) == [1, 2]
    assert Hold(1) in out
    assert Hold(2) in out
    assert sent(plan.handle(CallPrefilled(2))) == [3]
    plan.check_invariants()


def test_hints_count_the_calls_that_are_still_to_come() -> None:
    plan = plan_of(two_documents(), max_in_flight=1)
    hints = []
    out = plan.handle(ONE)
    while not plan.over:
        (call,) = [i for i in out if isinstance(i, SendCall)]
        hints.append((call.call, call.pending_calls, call.pending_tokens))
        out = plan.handle(CallFinished(call.call))
    # The last question of a document leaves it to nobody; the last of all, only what all had.
    assert hints == [(0, 1, 6), (1, 2, 2), (2, 1, 6), (3, 0, 2)]


def test_a_stem_is_held_from_its_computation_until_the_last_call_has_it() -> None:
    plan = plan_of(two_documents(3), max_in_flight=1)
    plan.handle(PlanSawNodes(()))
    story: list[PlanInstruction] = []
    for call in range(6):
        story += [i for i in plan.handle(CallPrefilled(call)) if not isinstance(i, SendCall)]
        assert sent(plan.handle(CallFinished(call))) == ([call + 1] if call < 5 else [])
        plan.check_invariants()
    assert story == [Hold(2), Hold(1), LetGo(2), Hold(3), LetGo(3), LetGo(1)]
    assert plan.over
    assert plan.held == set()


def test_a_call_that_fails_leaves_its_prefix_to_the_next() -> None:
    plan = plan_of(two_documents())
    plan.handle(ONE)
    out = plan.handle(CallFailed(0))
    assert sent(out) == [1]
    assert not any(isinstance(i, Hold) and i.stem == 2 for i in out)
    assert sent(plan.handle(CallPrefilled(1))) == [2]


def test_neighbours_go_to_one_node_and_both_nodes_are_busy() -> None:
    plan = plan_of(two_documents(4))
    where = {}
    out = plan.handle(TWO)
    while not plan.over:
        where |= {i.call: i.node_id for i in out if isinstance(i, SendCall)}
        running = [c for c in where if plan.lanes and c in _running(plan)]
        out = plan.handle(CallFinished(running[0]))
        plan.check_invariants()
    assert [where[c] for c in range(8)] == [A] * 4 + [B] * 4


def _running(plan: PlanState) -> set[int]:
    return {plan.tree.order[p] for lane in plan.lanes for p in lane.in_flight}


def test_each_node_computes_a_shared_beginning_for_itself() -> None:
    plan = plan_of(two_documents(4))
    out = plan.handle(TWO)
    assert sent(out) == [0, 4]


def test_the_next_subtree_is_loaded_while_the_last_one_is_answered() -> None:
    plan = plan_of(two_documents(), max_in_flight=2)
    plan.handle(ONE)
    out = plan.handle(CallFinished(0))
    assert sent(out) == [1, 2]
    plan = plan_of(two_documents(), max_in_flight=1)
    plan.handle(ONE)
    out = plan.handle(CallFinished(0))
    assert PrefetchRun(2, A, 3, 6) in out
    assert Hold(3) in out
    assert not any(isinstance(i, PrefetchRun) for i in plan.handle(CallPrefilled(1)))


def test_what_was_not_sent_to_a_lost_node_goes_to_the_other() -> None:
    plan = plan_of(two_documents(4), max_in_flight=2)
    assert sent(plan.handle(TWO)) == [0, 4]
    out = plan.handle(PlanLostNode(B))
    assert [lane.node_id for lane in plan.lanes] == [A]
    later = []
    running = [0, 4]  # The scheduler itself finds another node for the call that B had.
    while running:
        out = plan.handle(CallFinished(running.pop(0)))
        later += [i for i in out if isinstance(i, SendCall)]
        running += sent(out)
    assert plan.over
    assert sorted(sent(later)) == [1, 2, 3, 5, 6, 7]
    assert {i.node_id for i in later} == {A}


def test_a_plan_goes_on_without_any_node_and_with_new_ones() -> None:
    plan = plan_of(two_documents(2), max_in_flight=1)
    assert sent(plan.handle(PlanSawNodes(()))) == [0]
    plan.handle(ONE)
    (after,) = [i for i in plan.handle(CallFinished(0)) if isinstance(i, SendCall)]
    assert after.node_id == A
    plan.handle(PlanSawNodes(()))
    (after,) = [i for i in plan.handle(CallFinished(after.call)) if isinstance(i, SendCall)]
    assert after.node_id is None


def test_an_idle_node_takes_over_runs_of_a_busy_one() -> None:
    texts = [[1, 1, *[q] * 8] for q in range(16)]
    plan = plan_of(texts, max_in_flight=2)
    plan.handle(TWO)
    plan.handle(CallPrefilled(8))  # B has the beginning; A is still computing it.
    for _ in range(7):
        (call,) = (c for c in _running(plan) if c != 0)
        plan.handle(CallFinished(call))
    (call,) = (c for c in _running(plan) if c != 0)
    out = plan.handle(CallFinished(call))
    assert [i.node_id for i in out if isinstance(i, SendCall)] == [B]
    assert sent(out)[0] < 8


def run_all(plan: PlanState, pace: dict[NodeId, int]) -> dict[NodeId, int]:
    """Let nodes end calls in turn, each node ``pace`` calls per round; count the calls per node."""
    out = plan.handle(TWO)
    where: dict[int, NodeId | None] = {}
    while not plan.over:
        for node, calls in pace.items():
            for _ in range(calls):
                where |= {i.call: i.node_id for i in out if isinstance(i, SendCall)}
                running = [c for c in sorted(_running(plan)) if where[c] == node]
                out = plan.handle(CallFinished(running[0])) if running else []
                plan.check_invariants()
    return {node: sum(n == node for n in where.values()) for node in pace}


def test_equal_nodes_compute_equal_shares() -> None:
    plan = plan_of([[1, 1, *[q] * 8] for q in range(60)])
    assert run_all(plan, {A: 1, B: 1}) == {A: 30, B: 30}


def test_a_node_twice_as_fast_takes_over_until_it_has_two_thirds() -> None:
    plan = plan_of([[1, 1, *[q] * 8] for q in range(60)])
    shares = run_all(plan, {A: 1, B: 2})
    assert 38 <= shares[B] <= 41, shares


def test_a_node_takes_no_calls_while_more_than_half_of_its_calls_still_run() -> None:
    plan = plan_of([[1, 1, *[q] * 8] for q in range(60)], max_in_flight=16)
    plan.handle(TWO)
    for call in (0, 30):
        plan.handle(CallPrefilled(call))
    of_b = [call for call in range(60) if call >= 30]
    taken = []
    while not taken:
        out = plan.handle(CallFinished(min(set(of_b) & _running(plan))))
        taken = [i.call for i in out if isinstance(i, SendCall) and i.call < 30]
    first, second = plan.lanes
    assert len(second.in_flight) == 4 + len(taken)
    assert second.left <= first.left


def test_an_idle_node_takes_calls_of_a_run_that_has_begun() -> None:
    plan = plan_of([[1, 1, *[q] * 8] for q in range(40)], max_in_flight=4)
    plan.handle(ONE)
    (lane,) = plan.lanes
    while lane.runs:
        plan.handle(CallFinished(min(_running(plan))))
    assert lane.left == 10 + len(lane.in_flight) - 1  # The last run has 10 calls; one was sent.
    out = plan.handle(TWO)
    assert [i.node_id for i in out if isinstance(i, SendCall)] == []  # All four are in flight.
    out = plan.handle(CallFinished(min(_running(plan))))
    assert [i.node_id for i in out if isinstance(i, SendCall)] == [B]
    assert [each.left for each in plan.lanes] == [7, 5]  # B computes the beginning too.


def test_calls_in_flight_fit_into_the_room_of_their_node() -> None:
    texts = [[1, 1, *[q] * 8] for q in range(6)]
    plan = plan_of(texts)
    plan.handle(PlanSawNodes((PlanNode(A, room_blocks=10),)))
    out = plan.handle(CallPrefilled(0))
    assert plan.lanes[0].used_blocks == 9  # 1 + 2 * 4; a third would make 13.
    assert sent(out) == [1]
    assert sent(plan.handle(CallFinished(0))) == [2]
    tiny = plan_of(texts)
    assert sent(tiny.handle(PlanSawNodes((PlanNode(A, room_blocks=1),)))) == [0]


def test_cancelling_lets_go_of_everything_and_sends_nothing_more() -> None:
    plan = plan_of(two_documents(3))
    plan.handle(ONE)
    plan.handle(CallPrefilled(0))
    assert plan.held
    out = plan.handle(Cancelled())
    assert {type(i) for i in out} == {LetGo}
    assert plan.over
    assert plan.handle(CallFinished(0)) == []


def test_the_worked_example_of_the_documentation() -> None:
    system, document_a, document_b = [1] * 128, [2] * 512, [3] * 512
    rows = [
        [*system, *document_a, 7], [*system, *document_b, 7],
        [*system, *document_a, 8], [*system, *document_b, 8],
    ]  # fmt: skip
    tree = tree_of(rows, 64)
    assert tree.shared_tokens == 1408
    plan = PlanState(tree, Effort(), max_in_flight=1)
    told = [plan.handle(ONE)]
    for row in (0, 2, 1, 3):
        told += [plan.handle(CallPrefilled(row)), plan.handle(CallFinished(row))]
    assert len(plan.runs) == 2
    assert told == [
        [SendCall(0, A, 640, 1, 640)],
        [Hold(2), Hold(1)],
        [SendCall(2, A, 640, 2, 128), Hold(3), PrefetchRun(1, A, 3, 640)],
        [LetGo(2)],
        [SendCall(1, A, 640, 1, 640)],
        [Hold(3)],
        [SendCall(3, A, 640, 0, 128)],
        [LetGo(3), LetGo(1)],
        [],
    ]
