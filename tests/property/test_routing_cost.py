"""The scheduler's cost: never worse than recomputing, monotone in queues, and the node's own."""

from __future__ import annotations

import math
from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fix_scheduler import LAYOUT, make_info
from tierkv.costing.load_controller import Level, Prompt, Run, choose
from tierkv.costing.node_cost import CachedPrefix, Rates, ServiceCost
from tierkv.costing.node_service import lone_speeds, serve_one
from tierkv.costing.service_time import Line, StepCost
from tierkv.kvcore.block import Tier
from tierkv.kvcore.ids import NodeId, RequestId
from tierkv.kvcore.layout import KvCodec
from tierkv.kvcore.node import NodeLoad
from tierkv.scheduler.choosing.choice import Costs, weigh
from tierkv.scheduler.choosing.choice import choose as choose_node
from tierkv.scheduler.choosing.router import weigh_lone
from tierkv.scheduler.config import SchedulerConfig
from tierkv.scheduler.events import RequestArrived, SeenNode, WantedModel
from tierkv.scheduler.nodes.fleet import Fleet
from tierkv.scheduler.nodes.node_record import Work
from tierkv.scheduler.request_record import RequestRecord

BLOCKS = st.integers(0, 40)
PREFIXES = st.builds(CachedPrefix, BLOCKS, BLOCKS, BLOCKS, BLOCKS)
SECONDS = st.floats(0.0, 0.1)
LINES = st.builds(Line, SECONDS, st.floats(1e3, 1e10))
RATES = st.builds(
    Rates,
    st.builds(StepCost, st.floats(1e-5, 1.0), st.floats(0.0, 1e-6), SECONDS, SECONDS),
    LINES,
    LINES,
    LINES,
    st.sampled_from([32, 256, math.inf]),
)
TOKENS = st.integers(1, 800)


def _served(tokens: int, prefix: CachedPrefix, rates: Rates, *waits_s: float) -> ServiceCost:
    compute_s, *paths_s = waits_s or [0.0] * 4
    speeds = lone_speeds(rates)
    return serve_one(tokens, prefix, speeds, LAYOUT, compute_s=compute_s, paths_s=paths_s)


@given(TOKENS, PREFIXES, RATES)
def test_what_can_be_loaded_never_makes_it_slower(
    tokens: int, prefix: CachedPrefix, rates: Rates
) -> None:
    cost = _served(tokens, prefix, rates)
    here = CachedPrefix(prefix.l1_blocks)
    assert cost.total_s <= _served(tokens, here, rates).total_s * (1 + 1e-9)
    assert sum(cost.tier_blocks) == cost.reused_blocks <= max(0, tokens - 1) // LAYOUT.block_tokens
    assert min(cost.tier_blocks) >= 0


@given(TOKENS, PREFIXES, RATES, st.lists(SECONDS, min_size=4, max_size=4), st.integers(0, 3))
def test_a_longer_queue_never_makes_it_faster(
    tokens: int, prefix: CachedPrefix, rates: Rates, waits_s: list[float], longer: int
) -> None:
    before = _served(tokens, prefix, rates, *waits_s).total_s
    waits_s[longer] += 1.0
    # The depth that just hides is found as if between straight lines: good to some per cent.
    assert _served(tokens, prefix, rates, *waits_s).total_s >= before * 0.9


@given(
    tokens=st.integers(17, 800),
    rates=RATES,
    l2=st.integers(0, 20),
    l3=st.integers(0, 20),
    compute_s=SECONDS,
    load_s=SECONDS,
)
def test_the_scheduler_predicts_what_the_node_would_decide(
    tokens: int, rates: Rates, l2: int, l3: int, compute_s: float, load_s: float
) -> None:
    """The node tries every depth, so it may find a better plan; never a much better one."""
    usable = (tokens - 1) // LAYOUT.block_tokens
    l2, l3 = min(l2, usable), min(l3, usable - min(l2, usable))
    cost = replace(rates.cost, per_step_s=0.0, per_sequence_s=0.0)
    prompt = Prompt(
        start=0,
        stop=tokens,
        block_tokens=LAYOUT.block_tokens,
        layers=LAYOUT.layers,
        step_tokens=int(min(rates.step_tokens, 1 << 30)),
        cost=cost,
        compute_from_s=compute_s,
        load_from_s=load_s,
    )
    runs = [
        Run(Tier.L2, l2, rates.l2, place="here"),
        Run(Tier.L3, l3, rates.l3, place="there"),
    ]
    level = Level(KvCodec.NONE, LAYOUT.stored_layer_bytes)
    decided = choose(prompt, [run for run in runs if run.blocks], [level])
    prefix = CachedPrefix(0, l2, l2 + l3, l2 + l3)
    waits_s = (compute_s, load_s, load_s, load_s)
    predicted = _served(tokens, prefix, replace(rates, cost=cost), *waits_s).total_s
    assert decided.predicted_s <= predicted * (1 + 1e-9)
    assert predicted <= decided.compute_s * (1 + 1e-9)
    assert predicted <= decided.predicted_s * 1.5


def _weigh(loads: dict[str, NodeLoad], tokens: int, prefix: CachedPrefix, **more: object) -> Costs:
    fleet = Fleet(SchedulerConfig())
    fleet.pool_nodes = int(more.get("pool_nodes", 0))  # type: ignore[call-overload]
    fleet.see([SeenNode(make_info(name), load) for name, load in loads.items()], 0.0)
    request = RequestRecord(
        RequestArrived(RequestId("q"), WantedModel("tiny"), tokens), total_tokens=tokens
    )
    request.near = {
        NodeId(name): CachedPrefix(prefix.l1_blocks, prefix.l2_blocks) for name in loads
    }
    request.pool = prefix
    sent = more.get("sent")
    if isinstance(sent, Work):
        fleet.records[NodeId("c1")].take(RequestId("before"), sent, 0.0)
    records = list(fleet.records.values())
    return weigh(request, records, fleet=fleet, now=float(more.get("now", 0.0)))  # type: ignore[arg-type]


@given(
    tokens=TOKENS,
    load=st.builds(
        NodeLoad,
        requests_running=st.integers(0, 9),
        waiting_prefill_tokens=st.integers(0, 9_000),
        decodes_running=st.integers(0, 9),
        decode_step_s=SECONDS,
        prefill_token_s=SECONDS,
        prefill_pair_s=st.floats(0.0, 1e-6),
        prefill_step_s=SECONDS,
        prefill_sequence_s=SECONDS,
        step_tokens=st.sampled_from([0, 32, 256]),
    ),
    sent=st.lists(st.builds(Work, TOKENS, SECONDS, corrected_s=SECONDS), max_size=3),
    answered_s=SECONDS,
    waiting=st.integers(0, 3),
    awaited_tokens=st.integers(0, 900),
    now=st.floats(0.0, 0.2),
    l1_blocks=BLOCKS,
)
def test_a_node_that_loads_nothing_costs_what_it_would_among_others(
    tokens: int,
    load: NodeLoad,
    sent: list[Work],
    answered_s: float,
    waiting: int,
    awaited_tokens: int,
    now: float,
    l1_blocks: int,
) -> None:
    fleet = Fleet(SchedulerConfig())
    fleet.see([SeenNode(make_info("c1"), load)], 0.0)
    node = fleet.records[NodeId("c1")]
    for number, work in enumerate(sent):
        node.take(RequestId(f"before{number}"), work, 0.0)
    node.answered(RequestId("before0"), answered_s)
    request = RequestRecord(
        RequestArrived(RequestId("q"), WantedModel("tiny"), tokens), total_tokens=tokens
    )
    l1_blocks = min(l1_blocks, (tokens - 1) // LAYOUT.block_tokens)
    request.near = {NodeId("c1"): CachedPrefix(l1_blocks, l1_blocks)}
    costs = weigh(request, [node], fleet=fleet, now=now, waiting=waiting)
    costs = costs.behind(awaited_tokens * costs.figures.speeds.cost.per_token_s)
    lone = weigh_lone(
        request,
        node,
        config=fleet.config,
        now=now,
        waiting=waiting,
        awaited_tokens=awaited_tokens,
        l1_blocks=l1_blocks,
    )
    assert lone.split == costs[0]
    assert lone.work == costs.work(0, tokens, LAYOUT)


@given(
    TOKENS,
    PREFIXES,
    st.sampled_from(["requests_running", "waiting_prefill_tokens", "decodes_running"]),
    st.integers(1, 1_000),
)
def test_a_busier_node_never_costs_less(
    tokens: int, prefix: CachedPrefix, what: str, more: int
) -> None:
    idle = NodeLoad(prefill_token_s=1e-3)
    busy = replace(idle, **{what: more})
    costs = _weigh({"c1": idle, "c2": busy}, tokens, prefix)
    assert costs[1].total_s >= costs[0].total_s
    for cost in costs:
        parts = cost.wait_s + cost.service.total_s + cost.charge * cost.taken_s
        parts += cost.harm_s + cost.handoff_s
        assert math.isclose(parts, cost.total_s)


def test_bytes_sent_over_a_path_delay_the_next_load_until_recomputing_is_as_good() -> None:
    load = NodeLoad(prefill_token_s=1e-3, l3_bytes_per_s=1e6)
    prefix = CachedPrefix(0, 0, 40, 40)
    free = _weigh({"c1": load}, 800, prefix)[0]
    queued = _weigh({"c1": load}, 800, prefix, sent=Work(0, 0.0, (0.0, 1e6, 0.0)))[0]
    assert free.service.tier_blocks[2] > 0
    assert queued.service.tier_blocks[2] == 0
    assert queued.service.prefill_s == 0.8


def test_what_others_load_from_the_same_pool_nodes_delays_a_load() -> None:
    load = NodeLoad(prefill_token_s=1e-3, l3_bytes_per_s=1e6)
    busy = replace(load, l3_queued_bytes=2_000_000)
    prefix = CachedPrefix(0, 0, 40, 40)
    nodes = {"c1": load, "c2": busy}
    unknown = _weigh(nodes, 800, prefix)[0]
    one, many = (_weigh(nodes, 800, prefix, pool_nodes=n)[0] for n in (1, 1_000))
    assert one.service.reused_blocks == 0
    assert many.service.reused_blocks == unknown.service.reused_blocks > 0


def test_a_node_that_is_late_is_expected_to_be_later() -> None:
    load = NodeLoad(prefill_token_s=1e-3)
    sent = Work(100, 0.1, corrected_s=0.1)
    waits = [_weigh({"c1": load}, 100, CachedPrefix(), sent=sent, now=t)[0].wait_s for t in (0, 9)]
    assert waits[1] > 50 * waits[0]


@pytest.mark.parametrize("number", [5e-324, 1e-310, 1e-30, 1e30, 1.7e308])
@pytest.mark.parametrize("field", [n for n, v in asdict(NodeLoad()).items() if type(v) is float])
def test_a_node_that_reports_what_cant_be_spoils_no_choice(field: str, number: float) -> None:
    liar = NodeLoad(**{field: number})
    busy = replace(liar, waiting_prefill_tokens=100, decodes_running=2, l3_queued_bytes=1_000)
    for load in (liar, busy):
        for prefix in (CachedPrefix(), CachedPrefix(1, 2, 3, 4)):
            costs = _weigh({"c1": load, "c2": NodeLoad()}, 100, prefix)
            assert all(math.isfinite(total) for total in costs.total_s)
            choose_node(costs, range(2), last_node=None)
