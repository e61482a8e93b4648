"""The bench of the answer cache: all runs give the same answers, all are found again."""

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


def test_answers_are_found_again_also_after_a_kill() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench.answers", "--quick", "--rows", "200", "--format", "json"],
        cwd=ROOT, capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    metrics = json.loads(done.stdout)
    assert metrics["rows"] == 200
    assert metrics["found_after_restart_share"] == 1
    assert metrics["miss_with_to_without_ratio"] > 0
