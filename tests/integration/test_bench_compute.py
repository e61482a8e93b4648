"""The compute benchmark runs, compares its tokens and reports every metric; none is judged."""

from __future__ import annotations

import pytest
import torch

from tests.fix_bench import quick_metrics, run_bench

mark = pytest.mark
pytestmark = [mark.integration, mark.bench, mark.slow, mark.timeout(120)]


def test_every_tier_stands_beside_the_cache_being_off(tmp_path) -> None:
    picture = tmp_path / "ttft.svg"
    metrics = quick_metrics(
        f"compute --parts ttft --histories 128 --rounds 1 --plot {picture}", timeout=110
    )
    assert metrics["history_128_off_ttft_s"] > 0
    for tier in ("L1", "L2", "L3", "L4"):
        assert metrics[f"history_128_{tier}_ttft_s"] > 0
        assert metrics[f"history_128_{tier}_times_faster_than_off"] > 0
    drawn = picture.read_text()
    assert "128 tokens of history: TTFT, s" in drawn
    assert all(f">{name}</text>" in drawn for name in ("off", "L1", "L2", "L3", "L4"))


def test_the_gpu_benchmark_runs_its_code_without_one() -> None:
    parts = "chat,long,arrivals,prefill,decode,loading"
    metrics = quick_metrics(f"compute_gpu --device cpu --tiny --parts {parts}", timeout=110)
    for name in ("chat_times_faster", "arrivals_on_mean_ttft_s", "prefill_of_matmul",
                 "decode_batch_64_of_copy_bandwidth", "loading_of_bus"):  # fmt: skip
        assert metrics[f"tiny_{name}"] > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_the_gpu_benchmark_refuses_without_one() -> None:
    done = run_bench("compute_gpu", timeout=110)
    assert done.returncode == 2 and "no CUDA device" in done.stderr
