"""The trace of a statement goes from the wire to the model and the pool; its counts add up."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.bench, pytest.mark.timeout(120)]
ROOT = Path(__file__).parents[2]


def run_journey(output: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "bench.journey", "--quick", "--format", output],
        cwd=ROOT, capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_counts_of_rooms_add_up() -> None:
    metrics = json.loads(run_journey("json"))
    rooms = [name.removesuffix("_files") for name in metrics if name.endswith("_files")]
    assert len(rooms) == metrics["rooms"] < metrics["switches"]
    assert sum(metrics[f"{room}_files"] for room in rooms) == metrics["files"]
    assert sum(metrics[f"{room}_functions"] for room in rooms) == metrics["functions"]
    assert {"dbfront", "sql", "scheduler", "compute", "metaserver", "dmp"} <= set(rooms)


def test_the_stops_of_the_journey_page_are_in_the_trace() -> None:
    text = run_journey("text")
    touched = {
        f"{file.strip()}::{function.strip()}"
        for file, _, functions in (line.partition(":") for line in text.splitlines())
        for function in functions.split(",")
    }
    page = (ROOT / "docs/journey.md").read_text()
    stops = re.findall(r"`([a-z_/0-9]+\.py::[A-Za-z_.]+)`", page)
    # The page says so: what the prompts share is in L1, so nothing is loaded.
    missing = [each for each in stops if each not in touched]
    assert missing == ["compute/tiers/loader.py::Loader.run"]
