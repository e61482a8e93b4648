"""The cost in seconds: reuse where it is faster, overlap, queue and its charge."""

from __future__ import annotations

import pytest

from kvcore.node import NodeLoad
from scheduler.config import SchedulerConfig
from scheduler.cost import (
    CachedPrefix,
    Rates,
    known_rates,
    overlapped,
    service_cost,
    total_cost,
    wait_cost,
)
from tests.fix_scheduler import LAYOUT

BLOCK = LAYOUT.payload_bytes
RATES = Rates(
    prefill_tokens_per_s=16.0,
    l2_bytes_per_s=BLOCK * 100.0,
    l3_bytes_per_s=BLOCK * 10.0,
    l4_bytes_per_s=BLOCK * 0.5,
)


def test_nothing_cached_is_all_prefill() -> None:
    cost = service_cost(160, CachedPrefix(), RATES, LAYOUT)
    assert (cost.reused_blocks, cost.load_s, cost.prefill_s, cost.total_s) == (0, 0.0, 10.0, 10.0)


def test_l1_blocks_cost_nothing_and_the_last_token_is_computed() -> None:
    cost = service_cost(160, CachedPrefix(10, 10, 10, 10), RATES, LAYOUT)
    assert cost.reused_blocks == 9
    assert cost.prefill_s == pytest.approx(1.0)
    assert cost.load_s == 0.0


def test_each_tier_adds_its_own_load_time() -> None:
    cost = service_cost(160, CachedPrefix(1, 3, 7, 7), RATES, LAYOUT)
    assert cost.reused_blocks == 7
    assert cost.load_s == pytest.approx(2 / 100 + 4 / 10)
    assert cost.total_s == pytest.approx(3.0 + cost.load_s / LAYOUT.layers)


def test_a_tier_slower_than_computing_is_not_used() -> None:
    cost = service_cost(160, CachedPrefix(0, 4, 4, 9), RATES, LAYOUT)
    assert cost.reused_blocks == 4


def test_overlap_is_never_faster_than_either_stage() -> None:
    assert overlapped(2.0, 8.0, 4) == 8.5
    assert overlapped(8.0, 2.0, 1) == 10.0


def test_unknown_rates_take_the_documented_defaults() -> None:
    config = SchedulerConfig()
    rates = known_rates(NodeLoad(prefill_tokens_per_s=5.0), config)
    assert rates.prefill_tokens_per_s == 5.0
    assert rates.l2_bytes_per_s == config.l2_bytes_per_s


def test_queue_charge_grows_with_outstanding_requests_only() -> None:
    service = service_cost(160, CachedPrefix(), RATES, LAYOUT)
    idle = total_cost(1.0, service, mean_outstanding=0.0, queue_weight=3.0)
    busy = total_cost(1.0, service, mean_outstanding=2.0, queue_weight=3.0)
    assert idle.total_s == 11.0 == idle.ttft_s
    assert busy.total_s == 1.0 + 7 * 10.0
    assert busy.ttft_s == 11.0


def test_wait_counts_queued_tokens_and_running_requests() -> None:
    assert wait_cost(31, 1, RATES) == 2.0
