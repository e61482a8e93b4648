"""The compute benchmark runs, compares its tokens and reports every metric; none is judged."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.integration,
    pytest.mark.bench,
    pytest.mark.slow,
    pytest.mark.timeout(120),
]
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
    drawn = picture.read_text()
    assert "128 tokens of history: TTFT, s" in drawn
    assert all(f">{name}</text>" in drawn for name in ("off", "L1", "L2", "L3", "L4"))


def run_gpu_bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "bench.compute_gpu", "--format", "json", *arguments],
        cwd=ROOT, capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip


def test_the_gpu_benchmark_runs_its_code_without_one() -> None:
    done = run_gpu_bench(
        "--device",
        "cpu",
        "--tiny",
        "--quick",
        "--parts",
        "chat,long,arrivals,prefill,decode,loading",
    )
    assert done.returncode == 0, done.stderr[-4000:]
    metrics = json.loads(done.stdout)
    for name in ("chat_times_faster", "arrivals_on_mean_ttft_s", "prefill_of_matmul",
                 "decode_batch_64_of_copy_bandwidth", "loading_of_bus"):  # fmt: skip
        assert metrics[f"tiny_{name}"] > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_the_gpu_benchmark_refuses_without_one() -> None:
    done = run_gpu_bench()
    assert done.returncode == 2 and "no CUDA device" in done.stderr
