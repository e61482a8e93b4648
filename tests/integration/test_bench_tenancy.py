"""The benches of tenants: a loud tenant keeps to its limit; no time is judged."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.integration,
    pytest.mark.bench,
    pytest.mark.slow,
    pytest.mark.timeout(240),
]
ROOT = Path(__file__).parents[2]


def test_a_limit_is_kept_beside_a_quiet_tenant() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench.tenancy", "--quick", "--format", "json"],
        cwd=ROOT, capture_output=True, text=True, timeout=230, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    metrics = json.loads(done.stdout)
    assert 0 < metrics["loud_highest_use_of_capacity"] <= 1
    assert metrics["switch_blocks"] == 50_000 and metrics["get_metered_of_free"] > 0
    assert metrics["weight_one_share"] < metrics["weight_two_share"] < metrics["weight_four_share"]
    assert metrics["quiet_hit_share_with_limit"] >= metrics["quiet_hit_share_alone"] - 0.05


def test_policies_of_namespaces_hit_as_in_the_simulator_and_a_version_goes() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench.namespace_table", "--quick", "--format", "json"],
        cwd=ROOT, capture_output=True, text=True, timeout=230, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    metrics = json.loads(done.stdout)
    assert metrics["switch_blocks"] == 50_000
    apart = [value for name, value in metrics.items() if name.endswith("simulator_points")]
    assert len(apart) == 14 and max(map(abs, apart)) < 1.0


def test_bytes_are_shared_by_weight_only_with_turns() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench.transfer_turns", "--quick", "--format", "json"],
        cwd=ROOT, capture_output=True, text=True, timeout=230, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    metrics = json.loads(done.stdout)
    assert metrics["turns_share_of_four"] > 1.5 * metrics["turns_share_of_one"]
    shares = [value for name, value in metrics.items() if name.startswith("turns_share")]
    assert len(shares) == 3 and abs(sum(shares) - 1) < 1e-6
