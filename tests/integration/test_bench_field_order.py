"""The field order benchmark runs and reports every metric; what it shares never gets less."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.bench]
ROOT = Path(__file__).parents[2]


def test_every_order_is_measured() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench.field_order", "--quick", "--format", "json"],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    metrics = json.loads(done.stdout)
    for table in ("reviews", "tickets", "wide"):
        shares = [metrics[f"{table}_{method}_hit_share"] for method in ("off", "stats")]
        assert 0 < shares[0] < shares[1] < 1
        for method in ("off", "stats"):
            assert metrics[f"{table}_{method}_planning_cpu_s"] > 0
            blocks = metrics[f"{table}_{method}_block_hit_share"]
            assert 0 <= blocks < metrics[f"{table}_{method}_hit_share"]
