"""The pipeline benchmark runs, compares its tokens and reports every metric; none is judged."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.bench, pytest.mark.timeout(120)]
ROOT = Path(__file__).parents[2]


def test_every_ratio_has_both_ways_beside_the_formula() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench.pipeline", "--quick", "--format", "json",
         "--history", "128", "--new", "8", "--rounds", "1"],
        cwd=ROOT, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    metrics = json.loads(done.stdout)
    for ratio in ("0.5", "1", "2"):
        for way in ("layers", "whole"):
            for beside in ("compute", "formula"):
                assert metrics[f"load_{ratio}x_{way}_of_{beside}"] > 0
        assert metrics[f"load_{ratio}x_speedup_over_whole"] > 0
    assert metrics["load_1x_formula_speedup"] == pytest.approx(2 / (1 + 1 / 12))
