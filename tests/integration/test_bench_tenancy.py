"""The benches of tenants: a loud tenant keeps to its limit; no time is judged."""

from __future__ import annotations

import pytest

from tests.fix_bench import quick_metrics

mark = pytest.mark
pytestmark = [mark.integration, mark.bench, mark.slow, mark.timeout(240)]


def test_a_limit_is_kept_beside_a_quiet_tenant() -> None:
    metrics = quick_metrics("tenancy", timeout=230)
    assert 0 < metrics["loud_highest_use_of_capacity"] <= 1
    assert metrics["switch_blocks"] == 50_000 and metrics["get_metered_of_free"] > 0
    assert metrics["weight_one_share"] < metrics["weight_two_share"] < metrics["weight_four_share"]
    assert metrics["quiet_hit_share_with_limit"] >= metrics["quiet_hit_share_alone"] - 0.05


def test_policies_of_namespaces_hit_as_in_the_simulator_and_a_version_goes() -> None:
    metrics = quick_metrics("namespace_table", timeout=230)
    assert metrics["switch_blocks"] == 50_000
    apart = [value for name, value in metrics.items() if name.endswith("simulator_points")]
    assert len(apart) == 14 and max(map(abs, apart)) < 1.0


def test_bytes_are_shared_by_weight_only_with_turns() -> None:
    metrics = quick_metrics("transfer_turns", timeout=230)
    assert metrics["turns_share_of_four"] > 1.5 * metrics["turns_share_of_one"]
    shares = [value for name, value in metrics.items() if name.startswith("turns_share")]
    assert len(shares) == 3 and abs(sum(shares) - 1) < 1e-6
