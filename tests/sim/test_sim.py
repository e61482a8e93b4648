"""Two hundred seeds of a cluster in bad weather, fifty of them in ``make test``.

``make sim SEED=n`` tells the story of a seed.

Clusters (one or three meta servers, one or two fronts, a clock of its own for each process),
requests and faults are drawn per seed. What must hold is in world.py and the nodes.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.sim.world import REQUESTS, World

SEEDS = 200
QUICK_SEEDS = 50
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(seed, marks=[] if seed < QUICK_SEEDS else [pytest.mark.slow])
        for seed in range(SEEDS)
    ],
)
def test_a_cluster_survives(seed: int) -> None:
    outcome = World(seed).play()
    assert sum(outcome.ended.values()) == REQUESTS
    # Bad weather and cancels cost some; whoever is left gets an answer.
    assert outcome.ended["finished"] >= REQUESTS / 3, outcome.ended


def test_the_weather_is_bad_enough() -> None:
    """Over some seeds everything happens that the checks are about."""
    counts: Counter[str] = Counter()
    for seed in range(10):
        counts += World(1_000 + seed).play().counts
    for what in (
        *(
            "crashes",
            "partitions",
            "messages lost",
            "stale references",
            "evicted slots",
            "evicted pages",
        ),
        *("loaded", "reused", "computed", "gave_way", "refused events", "stale batches"),
        *("leases committed", "leases aborted", "leases expired", "leases extended"),
    ):
        assert counts[what], f"no {what}: {counts}"


def test_a_seed_is_a_history() -> None:
    """The same seed tells the same story in another process, whatever the order of its sets."""
    stories = {
        subprocess.run(
            [sys.executable, "-m", "tests.sim.run", "7"],
            check=True,
            capture_output=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
        ).stdout
        for hash_seed in ("1", "2")
    }
    assert len(stories) == 1
    assert b"finished" in stories.pop()
