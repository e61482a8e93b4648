"""The benchmark of starts measures all it names, and says so."""

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
    pytest.mark.timeout(180),
]


def test_it_runs_and_shows_floors_and_ratios() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench.start_time", "--quick", "--format", "json"],
        capture_output=True, text=True, timeout=170, cwd=Path(__file__).parents[2], check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    metrics = json.loads(done.stdout)
    floors = {"duckdb": ("first_row", "tierkv_help"), "import_torch": ("first_answer", "up_ready")}
    for floor, names in floors.items():
        for name in names:
            # One round: the ratio is that of the two times.
            assert metrics[f"{name}_of_{floor}"] == metrics[f"{name}_s"] / metrics[f"{floor}_s"]
    assert 0 < metrics["idle_before_first_call_mib"] < metrics["idle_after_first_call_mib"] < 600
