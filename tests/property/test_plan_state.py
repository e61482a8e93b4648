"""Any statement, any failures, any nodes: each call is sent once and nothing stays held."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

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
from tierkv.scheduler.plans.plan_tree import PrefixTree

BLOCK_TOKENS = 2
prompts = st.lists(
    st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=10), st.booleans()), max_size=14
)


class Statement:
    """A plan and a naive account of what it said."""

    def __init__(self, tree: PrefixTree, max_in_flight: int) -> None:
        self.tree = tree
        self.plan = PlanState(tree, Effort(), max_in_flight=max_in_flight)
        self.max_in_flight = max_in_flight
        self.nodes: set[NodeId] = set()
        self.sent: list[int] = []
        self.running: set[int] = set()
        self.prefilled: set[int] = set()
        self.ended: set[int] = set()
        self.held: set[int] = set()

    def see(self, nodes: dict[str, int]) -> None:
        self.nodes = {NodeId(n) for n in nodes}
        self.take(
            self.plan.handle(PlanSawNodes(tuple(PlanNode(NodeId(n), r) for n, r in nodes.items())))
        )

    def take(self, instructions: list[PlanInstruction]) -> None:
        for instruction in instructions:
            match instruction:
                case SendCall():
                    assert instruction.call not in self.sent
                    assert instruction.node_id is None or instruction.node_id in self.nodes
                    assert (instruction.node_id is None) == (not self.nodes)
                    self.sent.append(instruction.call)
                    self.running.add(instruction.call)
                    self.check_hint(instruction)
                case Hold():
                    assert self.pending(instruction.stem), "held for nobody"
                    self.held.add(instruction.stem)
                case LetGo():
                    self.held.remove(instruction.stem)
                case PrefetchRun():
                    assert instruction.call not in self.sent
        assert len(self.running) <= self.max_in_flight
        assert self.held == self.plan.held
        assert all(self.pending(stem) for stem in self.held)
        self.plan.check_invariants()

    def pending(self, stem: int) -> set[int]:
        found = self.tree.stems[stem]
        calls = {self.tree.order[p] for p in range(found.first, found.stop)}
        return calls - self.prefilled - self.ended

    def check_hint(self, instruction: SendCall) -> None:
        position = self.tree.order.index(instruction.call)
        for number in self.tree.path(position):
            stem = self.tree.stems[number]
            calls = {self.tree.order[p] for p in range(stem.first, stem.stop)}
            if unsent := len(calls - set(self.sent)):
                assert instruction.pending_calls >= 1
                assert instruction.pending_tokens == stem.end_tokens
                assert unsent >= instruction.pending_calls
                return
        path = [self.tree.stems[s].end_tokens for s in self.tree.path(position)]
        assert (instruction.pending_calls, instruction.pending_tokens) == (0, min(path, default=0))


@settings(max_examples=30)
@given(prompts, st.integers(1, 5), st.data())
def test_every_call_is_sent_once_and_everything_is_let_go_of(
    texts: list[tuple[list[int], bool]], max_in_flight: int, data: st.DataObject
) -> None:
    tree = tree_of([t for t, _ in texts], BLOCK_TOKENS, shares=[shares for _, shares in texts])
    statement = Statement(tree, max_in_flight)
    node_sets = st.dictionaries(st.sampled_from("abc"), st.integers(0, 12), max_size=3)
    statement.see(data.draw(node_sets))
    while statement.running:
        call = data.draw(st.sampled_from(sorted(statement.running)))
        match data.draw(st.integers(0, 9)):
            case 0:
                statement.see(data.draw(node_sets))
            case 1 if statement.nodes:
                lost = data.draw(st.sampled_from(sorted(statement.nodes)))
                statement.nodes.discard(lost)
                statement.take(statement.plan.handle(PlanLostNode(lost)))
            case 2 | 3 | 4:
                statement.prefilled.add(call)
                statement.take(statement.plan.handle(CallPrefilled(call)))
            case 5:
                statement.running.discard(call)
                statement.ended.add(call)
                statement.take(statement.plan.handle(CallFailed(call)))
            case 6 if data.draw(st.integers(0, 9)) == 0:
                instructions = statement.plan.handle(Cancelled())
                assert {i.stem for i in instructions if isinstance(i, LetGo)} == statement.held
                assert all(isinstance(i, LetGo) for i in instructions)
                assert statement.plan.over
                return
            case _:
                statement.running.discard(call)
                statement.ended.add(call)
                statement.take(statement.plan.handle(CallFinished(call)))
    assert sorted(statement.sent) == list(range(len(texts)))
    assert statement.plan.over
    assert not statement.held


@given(prompts, st.integers(1, 4))
def test_one_node_and_one_call_at_a_time_is_the_depth_first_order(
    texts: list[tuple[list[int], bool]], nodes: int
) -> None:
    tree = tree_of([t for t, _ in texts], BLOCK_TOKENS)
    statement = Statement(tree, 1)
    statement.see({"a": 0})
    while statement.running:
        (call,) = statement.running
        statement.running.clear()
        statement.ended.add(call)
        statement.take(statement.plan.handle(CallFinished(call)))
    assert statement.sent == list(tree.order)
