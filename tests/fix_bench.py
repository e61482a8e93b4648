"""Runs a script of ``bench/`` as its users do, and returns the metrics that the script prints."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def run_bench(line: str, *, timeout: float) -> subprocess.CompletedProcess[str]:
    """Run ``python -m bench.LINE --format json`` from the top of the tree, to its end."""
    return subprocess.run(
        [sys.executable, "-m", *f"bench.{line} --format json".split()],
        cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False,
    )  # fmt: skip


def quick_metrics(line: str, *, timeout: float) -> dict[str, Any]:
    """Return the metrics of a quick run; fail with the end of its complaints if the run failed."""
    done = run_bench(f"{line} --quick", timeout=timeout)
    assert done.returncode == 0, done.stderr[-4000:]
    metrics: dict[str, Any] = json.loads(done.stdout)
    return metrics
