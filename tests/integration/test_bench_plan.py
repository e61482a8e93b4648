"""The plan's benchmark runs, compares its answers and reports every metric; none is judged."""

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


def test_every_way_is_measured() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench.plan", "--quick", "--format", "json"],
        cwd=ROOT, capture_output=True, text=True, timeout=380, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    metrics = json.loads(done.stdout)
    for nodes in (1, 2):
        for way in ("one_by_one", "table_order", "sorted", "plan"):
            computed = metrics[f"nodes_{nodes}_{way}_computed_tokens"]
            assert metrics["tree_tokens"] <= computed <= metrics["prompt_tokens"]
            hits = metrics[f"nodes_{nodes}_{way}_hit_tokens"]
            assert hits + computed == metrics["prompt_tokens"]
            assert metrics[f"nodes_{nodes}_{way}_peak_needed_blocks"] > 0
