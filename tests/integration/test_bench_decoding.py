"""The benchmarks of decoding and of short rests run and compare their tokens; none is judged."""

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
    pytest.mark.timeout(240),
]
ROOT = Path(__file__).parents[2]


def test_guesses_and_shared_reads_stand_beside_the_plain_way() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench.decoding", "--quick", "--format", "json",
         "--rounds", "1", "--probes", "1", "--tokens", "4", "--rows", "2",
         "--shared-tokens", "512"],
        cwd=ROOT, capture_output=True, text=True, timeout=230, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    metrics = json.loads(done.stdout)
    for case in ("copies_batch_1", "labels_batch_8", "random_batch_4"):
        assert metrics[f"{case}_guessing_speedup_of_answers"] > 0
    assert metrics["random_batch_1_guessing_speedup"] > 0
    assert metrics["rows_2_sharing_speedup"] > 0


def test_short_rests_together_stand_beside_rests_one_by_one() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench.warm_rests", "--quick", "--format", "json",
         "--rounds", "1", "--tokens", "128"],
        cwd=ROOT, capture_output=True, text=True, timeout=230, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    metrics = json.loads(done.stdout)
    for model in ("shipped", "random"):
        for case in ("rest_34", "rest_2_to_64", "rest_34_nothing_shared"):
            assert metrics[f"{model}_{case}_speedup"] > 0
            assert metrics[f"{model}_{case}_processor_speedup"] > 0


def test_parts_of_a_prefill_are_parts() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench.prefill_parts", "--quick", "--format", "json"],
        cwd=ROOT, capture_output=True, text=True, timeout=230, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    metrics = json.loads(done.stdout)
    for threads in (1, 2):
        name = f"{threads}_threads_prefill_512"
        parts = [metrics[f"{name}_{part}_share"] for part in ("products", "attention")]
        assert min(parts) > 0 and sum(parts) < 1 and metrics[f"{name}_tokens_per_s"] > 0
