"""The bench of load policies runs, compares tokens and reports each cell; none is judged."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.bench, pytest.mark.timeout(120)]
ROOT = Path(__file__).parents[2]


def test_a_cell_has_every_ratio() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench.load_choice", "--quick", "--format", "json", "--only", "l2"],
        cwd=ROOT, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    metrics = json.loads(done.stdout)
    cell = "l2_small_8_calls_0%_in_l1"
    assert metrics[f"{cell}_auto_of_better"] > 0 and metrics[f"{cell}_always_of_never"] > 0
    assert metrics[f"{cell}_prediction_error"] >= 0
    assert metrics["worst_auto_of_better"] == metrics[f"{cell}_auto_of_better"]
