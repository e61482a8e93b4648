"""The benchmarks of layers and of block sizes run and report every metric; no time is judged."""

from __future__ import annotations

import pytest

from tests.fix_bench import quick_metrics

mark = pytest.mark
pytestmark = [mark.integration, mark.bench, mark.slow, mark.timeout(120)]


def test_every_ratio_has_both_ways_beside_the_formula() -> None:
    metrics = quick_metrics("pipeline --history 128 --new 8 --rounds 1", timeout=100)
    for ratio in ("0.5", "1", "2"):
        for way in ("layers", "whole"):
            for beside in ("compute", "formula"):
                assert metrics[f"load_{ratio}x_{way}_of_{beside}"] > 0
        assert metrics[f"load_{ratio}x_speedup_over_whole"] > 0
    assert metrics["load_1x_formula_speedup"] == pytest.approx(2 / (1 + 1 / 12))


def test_every_size_of_blocks_reuses_what_the_prefix_tree_has() -> None:
    metrics = quick_metrics("block_size --prompts 4", timeout=100)
    for size in (16, 64):
        assert metrics[f"rows_{size}_l1_hit_share"] >= 0.98 * metrics["rows_tree_share"]
        assert metrics[f"rows_{size}_pool_hit_share"] >= 0.98 * metrics["rows_tree_share"]
        assert metrics[f"rows_{size}_directory_blocks"] > 0
