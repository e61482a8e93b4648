"""bench.many runs on real servers, and what it counts is right; no time is judged."""

from __future__ import annotations

import pytest

from tests.fix_bench import quick_metrics

pytestmark = [pytest.mark.integration, pytest.mark.bench, pytest.mark.timeout(240)]


def test_losses_cost_no_block_and_shares_are_even() -> None:
    metrics = quick_metrics("many", timeout=230)
    assert (metrics["1_servers_reported_of_blocks"], metrics["3_servers_reported_of_blocks"]) == (
        1, 2,
    )  # fmt: skip
    assert metrics["killed_least_prefix_share"] == metrics["frozen_least_prefix_share"] == 1
    assert metrics["tenants_largest_share_of_mean"] < 1.2
    assert metrics["3_servers_largest_blocks_of_mean"] < 1.2
