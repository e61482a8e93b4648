"""The SQL benchmark runs with its relay, compares its answers and reports; none is judged."""

from __future__ import annotations

import pytest

from tests.fix_bench import quick_metrics

mark = pytest.mark
pytestmark = [mark.integration, mark.bench, mark.slow, mark.timeout(400)]


def test_every_workload_is_measured() -> None:
    metrics = quick_metrics("sql --relay", timeout=380)
    for workload in ("filter", "join", "questions"):
        assert metrics[f"{workload}_cache_off_hit_ratio"] == 0
        for way in ("written", "sorted", "planned"):
            assert 0 < metrics[f"{workload}_{way}_hit_ratio"] < 1
        assert 0 < metrics[f"{workload}_calls"] <= metrics[f"{workload}_naive_calls"]
    assert metrics["join_planned_hit_ratio"] > metrics["join_written_hit_ratio"]
    assert metrics["relay_update_rows"] == 5 * metrics["relay_update_distinct_prompts"]
    for name in ("pgbench_simple_8", "pgbench_prepared_8", "select", "copy"):
        assert metrics[f"relay_{name}_of_direct"] > 0
