"""The compute benchmark runs, compares its tokens and reports every metric; none is judged."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]
ROOT = Path(__file__).parents[2]


def test_every_tier_stands_beside_the_cache_being_off(tmp_path) -> None:
    picture = tmp_path / "ttft.svg"
    done = subprocess.run(
        [sys.executable, "-m", "bench.compute", "--quick", "--format", "json", "--parts", "ttft",
         "--histories", "128", "--rounds", "1", "--plot", str(picture)],
        cwd=ROOT, capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    metrics = json.loads(done.stdout)
    assert metrics["history_128_off_ttft_s"] > 0
    for tier in ("L1", "L2", "L3", "L4"):
        assert metrics[f"history_128_{tier}_ttft_s"] > 0
        assert metrics[f"history_128_{tier}_times_faster_than_off"] > 0
    assert picture.read_text().count("<polyline") == 5
