"""The benchmark of front processes runs and reports every metric."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.fix_cluster import ROOT

pytestmark = [
    pytest.mark.integration,
    pytest.mark.bench,
    pytest.mark.slow,
    pytest.mark.timeout(300),
]


def test_one_worker_and_two_are_measured() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench.front_workers", "--quick", "--format", "json"],
        cwd=ROOT, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    metrics = json.loads(done.stdout)
    for name in ("", "postgres_"):
        assert metrics[f"{name}1_workers_calls_per_s"] > 0
        assert metrics[f"{name}2_workers_of_1"] > 0
    assert metrics["cores"] >= 1
