"""bench.leaving runs on real processes, and no call fails when one dies; no share is judged."""

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


def test_no_call_fails_when_a_process_is_lost() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench.leaving", "--quick", "--format", "json"],
        cwd=ROOT, capture_output=True, text=True, timeout=230, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    metrics = json.loads(done.stdout)
    assert metrics["failed"] == 0 and metrics["answers"] > 100
    for role in ("meta", "front", "dmp", "compute"):
        assert metrics[f"{role}_hit_share_before"] > 0
