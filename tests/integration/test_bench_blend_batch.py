"""The bench of blending beside exact reuse runs and reports each cell; none is judged by time."""

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


def test_a_cell_has_every_ratio() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench.blend_batch", "--quick", "--format", "json"],
        cwd=ROOT, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    metrics = json.loads(done.stdout)
    for cell in ("4_notes_at_once", "4_notes_one_by_one"):
        assert metrics[f"{cell}_blended_of_exact"] > 0 < metrics[f"{cell}_first_blended_of_exact"]
        assert metrics[f"{cell}_exact_right"] > 0.5 < metrics[f"{cell}_blended_right"]
