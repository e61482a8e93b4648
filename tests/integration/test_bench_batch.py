"""The bench of a statement's batch runs on real processes and reports; nothing is judged."""

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


def test_shares_and_waits_are_reported() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench.batch", "--quick", "--format", "json", "--nodes", "2"],
        cwd=ROOT, capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    metrics = json.loads(done.stdout)
    for question in (1, 2, 3):
        assert 1 <= metrics[f"2_nodes_question_{question}_most_of_mean"] <= 2
    assert 0 <= metrics["2_nodes_question_2_rows_to_their_kv"] <= 1
    assert metrics["bulk_yields_chat_ttft_p50_s"] > 0 and metrics["bulk_throughput_kept"] > 0
