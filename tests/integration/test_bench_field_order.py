"""The field order benchmark runs and reports every metric; what it shares never gets less."""

from __future__ import annotations

import pytest

from tests.fix_bench import quick_metrics

pytestmark = [pytest.mark.integration, pytest.mark.bench]


def test_every_order_is_measured() -> None:
    metrics = quick_metrics("field_order", timeout=60)
    for table in ("reviews", "tickets", "wide"):
        shares = [metrics[f"{table}_{method}_hit_share"] for method in ("off", "stats")]
        assert 0 < shares[0] < shares[1] < 1
        for method in ("off", "stats"):
            assert metrics[f"{table}_{method}_planning_cpu_s"] > 0
            blocks = metrics[f"{table}_{method}_block_hit_share"]
            assert 0 <= blocks < metrics[f"{table}_{method}_hit_share"]
