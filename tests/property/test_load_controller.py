"""The loading controller against trying every depth, and what must hold for any figures."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.costing.blend_controller import BlendWork, choose_ratio
from tierkv.costing.load_controller import (
    Chain,
    Level,
    Prompt,
    Run,
    _computing,
    _loaded_to,
    beside_s,
    choose,
    makespan,
)
from tierkv.costing.service_time import Line, StepCost
from tierkv.kvcore.block import Tier
from tierkv.kvcore.layout import KvCodec

BLOCK = 16
costs = st.builds(
    StepCost,
    per_token_s=st.floats(1e-6, 1e-2),
    per_pair_s=st.sampled_from([0.0, 1e-8, 1e-6]),
    per_step_s=st.sampled_from([0.0, 1e-3, 1e-1]),
)
lines = st.builds(
    Line,
    latency_s=st.sampled_from([0.0, 1e-4, 1e-2, 1.0]),
    bytes_per_s=st.floats(1e4, 1e10),
)
runs = st.lists(
    st.builds(
        Run,
        tier=st.sampled_from([Tier.L2, Tier.L3, Tier.L4]),
        blocks=st.integers(1, 40),
        line=lines,
        promote=st.none() | lines,
        place=st.sampled_from(["a", "b", "c"]),
    ),
    min_size=1,
    max_size=5,
)
levels = st.lists(
    st.builds(
        Level,
        codec=st.sampled_from(KvCodec),
        layer_bytes=st.floats(100, 1e6),
        decode_bytes_per_s=st.just(math.inf) | st.floats(1e5, 1e10),
        read_bytes=st.sampled_from([0, 1 << 12, 1 << 20]),
    ),
    min_size=1,
    max_size=3,
    unique_by=lambda level: level.codec,
)


@st.composite
def prompts(draw, chain: list[Run]) -> Prompt:
    start = draw(st.integers(0, 50)) * BLOCK
    found = sum(run.blocks for run in chain) * BLOCK
    return Prompt(
        start=start,
        stop=start + found + draw(st.integers(1, 200)),
        block_tokens=BLOCK,
        layers=draw(st.integers(1, 40)),
        step_tokens=draw(st.sampled_from([1, 24, 64, 1024])),
        cost=draw(costs),
        compute_from_s=draw(st.sampled_from([0.0, 0.01, 1.0])),
        load_from_s=draw(st.sampled_from([0.0, 0.05])),
        shares_steps=draw(st.booleans()),
    )


@given(st.data(), runs, levels)
def test_no_depth_at_any_level_is_predicted_faster(data, chain, forms) -> None:
    prompt = data.draw(prompts(chain))
    decision = choose(prompt, chain, forms)
    found = sum(run.blocks for run in chain)
    tried = [
        makespan(prompt, Chain(chain, level, prompt.layers), depth)
        for level in forms
        for depth in range(1, found + 1)
    ]
    assert 0 <= decision.depth <= found
    assert decision.predicted_s <= decision.compute_s
    assert decision.predicted_s == pytest.approx(min([decision.compute_s, *tried]), rel=1e-9)
    assert dict(decision.alternatives)[decision.choice] == decision.predicted_s


@given(st.data(), runs, levels, st.integers(0, 100), st.floats(0, 25), st.integers(0, 9))
def test_no_depth_costs_a_batch_less(
    data, chain, forms, prompts_waiting, loads_waiting, after
) -> None:
    prompt = replace(
        data.draw(prompts(chain)),
        after=after,
        computing_delays=prompts_waiting,
        loading_delays=loads_waiting,
    )
    decision = choose(prompt, chain, forms[:1])
    loads = Chain(chain, forms[0], prompt.layers)

    def cost_s(depth: int) -> float:
        at = _loaded_to(prompt, depth) if depth else prompt.start
        own_s = makespan(prompt, loads, depth) if depth else decision.compute_s
        load_s = loads.seconds(depth).total_s if depth else 0.0
        delays_s = prompts_waiting * sum(_computing(prompt, at)) + loads_waiting * load_s
        return own_s + delays_s

    best = min(range(sum(run.blocks for run in chain) + 1), key=cost_s)
    most_s = 2.0 * (decision.compute_s + beside_s(prompt, 0))
    if decision.depth:
        assert decision.predicted_s < most_s
        assert cost_s(decision.depth) == pytest.approx(cost_s(best), rel=1e-9)
    elif cost_s(best) < cost_s(0) * (1 - 1e-9):
        assert makespan(prompt, loads, best) >= most_s * (1 - 1e-9)


@given(st.data(), runs, levels, st.floats(0, 10))
def test_a_budget_buys_quality_but_never_more_time_than_computing(data, chain, forms, budget):
    prompt = data.draw(prompts(chain))
    fastest = choose(prompt, chain, forms)
    decision = choose(prompt, chain, forms, budget_s=budget)
    assert decision.predicted_s <= max(fastest.predicted_s, min(budget, decision.compute_s))
    assert decision.predicted_s <= decision.compute_s
    order = [level.codec for level in forms]
    if decision.codec is not None and fastest.codec is not None:
        assert order.index(decision.codec) <= order.index(fastest.codec)


@given(st.integers(1, 40), st.floats(1e3, 1e10), st.floats(1.0, 1e4), st.integers(1, 32), costs)
def test_more_bandwidth_never_loads_less(blocks, rate, faster, layers, cost) -> None:
    prompt = Prompt(0, blocks * BLOCK + 5, BLOCK, layers, 64, cost)
    level = [Level(KvCodec.NONE, 10_000.0)]
    slow, fast = (
        choose(prompt, [Run(Tier.L3, blocks, Line(0.0, rate * factor))], level)
        for factor in (1.0, faster)
    )
    assert fast.predicted_s <= slow.predicted_s * (1 + 1e-12)
    assert slow.depth <= fast.depth


@given(st.data(), st.lists(st.nothing()) | runs, levels, st.floats(0.01, 1.0))
def test_ratio_stays_in_bounds_and_blending_is_never_predicted_slower(data, chain, forms, least):
    prompt = data.draw(prompts(chain))
    tokens = prompt.stop - prompt.start
    work = BlendWork(
        reused_tokens=data.draw(st.integers(1, tokens - 1)) if tokens > 1 else 1,
        min_ratio=least,
        scan_layers=data.draw(st.integers(0, 3)),
        fresh_passes=data.draw(st.integers(0, 1)),
    )
    decision = choose_ratio(prompt, work, chain, forms[0])
    assert decision.predicted_s <= decision.compute_s
    assert decision.recompute_ratio is None or least <= decision.recompute_ratio <= 1.0
