"""The bench of jobs: each way writes each row once, and a kill costs less than a batch."""

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
    pytest.mark.timeout(200),
]
ROOT = Path(__file__).parents[2]


def test_jobs_are_measured_and_a_kill_costs_less_than_a_batch() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench.jobs", "--quick", "--rows", "200", "--format", "json"],
        cwd=ROOT, capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    metrics = json.loads(done.stdout)
    assert metrics["rows"] == 200 and metrics["batch_rows"] == 20
    # A question is a token longer or shorter than another.
    assert metrics["calls_asked_again_after_a_kill"] <= 1.05 * metrics["batch_rows"]
    assert metrics["ai_table_refresh_to_full_ratio"] > 0


def test_the_first_question_about_an_indexed_document_is_measured() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench.kv_index", "--quick", "--documents", "8", "--format", "json"],
        cwd=ROOT, capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    metrics = json.loads(done.stdout)
    assert metrics["documents"] == 8 and metrics["document_tokens"] > 500
    assert metrics["first_token_speedup"] > 1 and metrics["pool_mib_per_document"] > 0
