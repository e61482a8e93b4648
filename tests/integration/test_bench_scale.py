"""bench.scale runs on a real server, and its sums are sums; no time is judged."""

from __future__ import annotations

import pytest

from tests.fix_bench import quick_metrics

pytestmark = [pytest.mark.integration, pytest.mark.bench, pytest.mark.timeout(120)]


def test_a_server_knows_all_nodes_and_costs_are_summed() -> None:
    metrics = quick_metrics("scale", timeout=110)
    for nodes in (10, 50):
        cores = metrics[f"{nodes}_nodes_server_cores"]
        beats = nodes * metrics[f"{nodes}_nodes_cpu_us_per_heartbeat"] / 1e6
        lists = metrics[f"{nodes}_nodes_cpu_ms_per_list"] / 1e3
        assert cores == pytest.approx(beats + 10 * lists)
        all_list = metrics[f"{nodes}_nodes_server_cores_if_all_list"]
        assert all_list == pytest.approx(beats + (10 + nodes) * lists)
