"""A plan's wish for a node bends the cost and forbids nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fix_scheduler import LAYOUT, make_info
from tierkv.costing.node_cost import CachedPrefix
from tierkv.kvcore.ids import NodeId, RequestId
from tierkv.kvcore.node import NodeInfo, NodeLoad, PreferredNode
from tierkv.scheduler.choosing import router
from tierkv.scheduler.config import SchedulerConfig
from tierkv.scheduler.events import (
    ChainLocated,
    Dispatch,
    NodesSeen,
    RequestArrived,
    SeenNode,
    WantedModel,
)
from tierkv.scheduler.requests.state import SchedulerState

MODEL = WantedModel("tiny")
PROMPT = 10 * LAYOUT.block_tokens
C1, C2 = NodeId("c1"), NodeId("c2")


def chosen(
    preferred: NodeId | None,
    *,
    infos: tuple[NodeInfo, ...] = (make_info("c1"), make_info("c2")),
    near: dict[NodeId, CachedPrefix] | None = None,
    waiting: dict[NodeId, int] | None = None,
    planned_tokens: int = 0,
) -> NodeId:
    """Send one request and say where it went."""
    state = SchedulerState(SchedulerConfig(prefill_tokens_per_s=1_000.0))
    loads = {n: NodeLoad(waiting_prefill_tokens=t) for n, t in (waiting or {}).items()}
    seen = tuple(SeenNode(i, loads.get(i.node_id, NodeLoad())) for i in infos)
    state.handle(NodesSeen(seen), 0.0)
    request_id = RequestId("q")
    wish = preferred and PreferredNode(preferred, planned_tokens)
    arrived = RequestArrived(request_id, MODEL, PROMPT, locatable=True, preferred_node=wish)
    state.handle(arrived, 0.0)
    located = ChainLocated(request_id, near or {}, CachedPrefix())
    (dispatch,) = [i for i in state.handle(located, 0.0) if isinstance(i, Dispatch)]
    state.check_invariants()
    return dispatch.node_id


def test_among_equals_the_preferred_node_is_taken() -> None:
    assert chosen(C1) == C1
    assert chosen(C2) == C2


def test_a_little_more_cost_is_accepted_and_much_more_is_not() -> None:
    half = {C1: CachedPrefix(l1_blocks=2, l2_blocks=2)}  # C2 computes a quarter more.
    assert chosen(None, near=half) == C1
    assert chosen(C2, near=half) == C2
    most = {C1: CachedPrefix(l1_blocks=8, l2_blocks=8)}  # C2 computes five times as much.
    assert chosen(C2, near=most) == C1
    assert chosen(C2, near=most, planned_tokens=8 * LAYOUT.block_tokens) == C2
    assert chosen(C2, waiting={C2: 20 * PROMPT}) == C2  # The plan sends no more there than end.


def test_a_wish_for_a_node_that_is_not_there_is_no_wish() -> None:
    assert chosen(NodeId("c9")) in (C1, C2)


@given(
    near=st.dictionaries(
        st.sampled_from(["c1", "c2", "c3"]), st.tuples(st.integers(0, 10), st.integers(0, 10))
    ),
    preferred=st.sampled_from(["c1", "c2", "c3"]),
    planned=st.integers(0, PROMPT),
    waiting=st.dictionaries(st.sampled_from([C1, C2]), st.integers(0, 20 * PROMPT)),
)
def test_the_short_cut_for_a_plans_node_chooses_as_the_comparison_does(
    near: dict[str, tuple[int, int]],
    preferred: str,
    planned: int,
    waiting: dict[NodeId, int],
) -> None:
    def choose() -> NodeId:
        return chosen(
            NodeId(preferred),
            infos=tuple(make_info(f"c{n}") for n in (1, 2, 3)),
            near={NodeId(n): CachedPrefix(l1, max(l1, l2)) for n, (l1, l2) in near.items()},
            waiting=waiting,
            planned_tokens=planned,
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(router, "_FEW_NODES", 0)
        compared = choose()
    assert choose() == compared
