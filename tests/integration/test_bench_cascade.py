"""The bench of the cascade: a classifier answers rows, and agrees with the model as it promised."""

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
    pytest.mark.timeout(400),
]
ROOT = Path(__file__).parents[2]


def test_calls_are_saved_at_the_agreement_asked_for() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench.cascade", "--quick", "--format", "json"],
        cwd=ROOT, capture_output=True, text=True, timeout=380, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    metrics = json.loads(done.stdout)
    assert metrics["rows"] == 1_500
    for way in ("cascade", "kept"):
        assert 0 < metrics[f"tone_{way}_calls_saved_share"] < 1
        assert metrics[f"tone_{way}_bound"] >= 0.95
        assert metrics[f"tone_{way}_agreement_of_classifier"] >= 0.93
        assert metrics[f"tone_model_to_{way}_ratio"] > 0
