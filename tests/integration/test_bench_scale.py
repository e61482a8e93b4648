"""bench.scale runs on a real server, and its sums are sums; no time is judged."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.bench, pytest.mark.timeout(120)]
ROOT = Path(__file__).parents[2]


def test_a_server_knows_all_nodes_and_costs_are_summed() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench.scale", "--quick", "--format", "json"],
        cwd=ROOT, capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    metrics = json.loads(done.stdout)
    for nodes in (10, 50):
        cores = metrics[f"{nodes}_nodes_server_cores"]
        beats = nodes * metrics[f"{nodes}_nodes_cpu_us_per_heartbeat"] / 1e6
        lists = metrics[f"{nodes}_nodes_cpu_ms_per_list"] / 1e3
        assert cores == pytest.approx(beats + 10 * lists)
        all_list = metrics[f"{nodes}_nodes_server_cores_if_all_list"]
        assert all_list == pytest.approx(beats + (10 + nodes) * lists)
