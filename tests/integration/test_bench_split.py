"""The split benchmark runs, compares its tokens and reports every metric; none is judged."""

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
    pytest.mark.timeout(120),
]
ROOT = Path(__file__).parents[2]


def test_every_way_is_measured() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench.split", "--quick", "--format", "json",
         "--tokens", "128", "--rounds", "1"],
        cwd=ROOT, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    metrics = json.loads(done.stdout)
    for way in ("with_tail", "without_tail", "one_node"):
        assert metrics[f"second_token_{way}_ms"] > 0
    for speed in ("memory", "line"):
        for way in ("behind", "after"):
            assert metrics[f"in_the_pool_save_{way}_{speed}_of_prefill"] > 0
            assert metrics[f"first_token_save_{way}_{speed}_of_prefill"] > 0
