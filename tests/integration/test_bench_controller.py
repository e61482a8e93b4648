"""The controller's benchmark runs, compares its tokens and reports every rate; none is judged."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.bench, pytest.mark.timeout(120)]
ROOT = Path(__file__).parents[2]


def test_every_rate_has_a_choice_a_prediction_and_what_it_took() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench.controller", "--quick", "--format", "json",
         "--tokens", "192", "--rounds", "1"],
        cwd=ROOT, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    metrics = json.loads(done.stdout)
    assert metrics["compute_s"] > 0
    for rate in ("0.25", "0.5", "1", "2", "4", "8"):
        assert metrics[f"rate_{rate}x_choice"] in (0, 1, 2)
        assert metrics[f"rate_{rate}x_predicted_of_actual"] > 0
        assert metrics[f"rate_{rate}x_ttft_of_compute"] > 0
