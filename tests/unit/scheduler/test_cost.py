"""The cost of one node in seconds: reuse where it is faster, overlap, latencies, steps."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from tests.fix_scheduler import LAYOUT
from tierkv.costing.node_cost import CachedPrefix, Rates, ServiceCost, known_rates
from tierkv.costing.node_service import lone_speeds, serve_one
from tierkv.costing.service_time import Line, StepCost
from tierkv.kvcore.node import NodeLoad
from tierkv.scheduler.config import SchedulerConfig

BLOCK = LAYOUT.payload_bytes
RATES = Rates(StepCost(1 / 16), Line(0, BLOCK * 100.0), Line(0, BLOCK * 10.0), Line(0, BLOCK * 0.5))


def service_cost(tokens: int, prefix: CachedPrefix, rates: Rates) -> ServiceCost:
    return serve_one(tokens, prefix, lone_speeds(rates), LAYOUT)


def test_nothing_cached_is_all_prefill() -> None:
    cost = service_cost(160, CachedPrefix(), RATES)
    assert (cost.reused_blocks, cost.load_s, cost.prefill_s, cost.total_s) == (0, 0.0, 10.0, 10.0)


def test_l1_blocks_cost_nothing_and_the_last_token_is_computed() -> None:
    cost = service_cost(160, CachedPrefix(10, 10, 10, 10), RATES)
    assert cost.reused_blocks == 9
    assert cost.prefill_s == pytest.approx(1.0)
    assert cost.load_s == 0.0


def test_each_tier_adds_its_own_load_time() -> None:
    cost = service_cost(160, CachedPrefix(1, 3, 7, 7), RATES)
    assert cost.reused_blocks == 7
    assert cost.tier_blocks == (1, 2, 4, 0)
    assert cost.load_s == pytest.approx(2 / 100 + 4 / 10)
    assert cost.total_s == pytest.approx(3.0 + cost.load_s / LAYOUT.layers)


def test_a_tier_slower_than_computing_is_used_only_as_far_as_it_hides() -> None:
    slow = replace(RATES, l3=Line(0, BLOCK * 0.8))
    cost = service_cost(160, CachedPrefix(0, 4, 9, 9), slow)
    assert cost.tier_blocks == (0, 4, 2, 0)
    assert cost.total_s == pytest.approx((4 / 100 + 2 / 0.8) / LAYOUT.layers + 4.0)


def test_a_path_of_no_use_is_not_used() -> None:
    cost = service_cost(160, CachedPrefix(0, 4, 9, 9), replace(RATES, l3=Line(0, 1.0)))
    assert cost.tier_blocks == (0, 4, 0, 0)


def test_what_rests_is_brought_up_before_its_first_layer_is_read() -> None:
    quick = replace(RATES, l4=Line(0, BLOCK * 10.0), l3=Line(0, BLOCK * 1e6))
    memory = service_cost(160, CachedPrefix(0, 0, 9, 9), quick)
    rests = service_cost(160, CachedPrefix(0, 0, 0, 9), quick)
    assert rests.total_s - memory.total_s == pytest.approx(0.9)


def test_a_latency_is_paid_once_per_layer_and_only_where_something_is_loaded() -> None:
    late = replace(RATES, l2=replace(RATES.l2, latency_s=0.1), l3=replace(RATES.l3, latency_s=50.0))
    cost = service_cost(160, CachedPrefix(0, 9, 9, 9), late)
    assert cost.load_s == pytest.approx(9 / 100 + LAYOUT.layers * 0.1)


def test_attention_makes_the_last_tokens_of_a_long_prompt_dearer() -> None:
    pairs = replace(RATES, cost=StepCost(1 / 16, 0.01))
    first = service_cost(80, CachedPrefix(), pairs).total_s
    second = service_cost(160, CachedPrefix(5), pairs).total_s
    assert second - first == pytest.approx(80 * 80 * 0.01)


def test_only_the_first_forward_pass_overlaps_with_a_load() -> None:
    steps = replace(RATES, cost=StepCost(1 / 16, 0.0, 1.0), step_tokens=32)
    cost = service_cost(160, CachedPrefix(0, 0, 4, 4), steps)
    assert cost.reused_blocks == 4
    assert cost.prefill_s == pytest.approx(96 / 16 + 3)
    assert cost.total_s == pytest.approx(9.0 + 0.4 / LAYOUT.layers)


def test_unknown_rates_take_the_documented_defaults() -> None:
    config = SchedulerConfig()
    rates = known_rates(NodeLoad(prefill_tokens_per_s=5.0), config.rates)
    assert rates.prefill_tokens_per_s == 5.0
    assert rates.l2.bytes_per_s == config.l2_bytes_per_s
    assert rates.step_tokens == math.inf


def test_a_fitted_cost_is_taken_before_a_plain_rate() -> None:
    load = NodeLoad(prefill_tokens_per_s=5.0, prefill_token_s=0.5, prefill_pair_s=0.1)
    rates = known_rates(load, SchedulerConfig().rates)
    assert (rates.prefill_tokens_per_s, rates.cost.per_pair_s) == (2.0, 0.1)
    only_pairs = known_rates(NodeLoad(prefill_pair_s=0.1), SchedulerConfig().rates)
    assert only_pairs.prefill_tokens_per_s == math.inf
    assert service_cost(160, CachedPrefix(), only_pairs).total_s == pytest.approx(1288.0)
