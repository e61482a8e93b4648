"""The plan's benchmark runs, compares its answers and reports every metric; none is judged."""

from __future__ import annotations

import pytest

from tests.fix_bench import quick_metrics

mark = pytest.mark
pytestmark = [mark.integration, mark.bench, mark.slow, mark.timeout(400)]


def test_every_way_is_measured() -> None:
    metrics = quick_metrics("plan", timeout=380)
    for nodes in (1, 2):
        for way in ("one_by_one", "table_order", "sorted", "plan"):
            computed = metrics[f"nodes_{nodes}_{way}_computed_tokens"]
            assert metrics["tree_tokens"] <= computed <= metrics["prompt_tokens"]
            hits = metrics[f"nodes_{nodes}_{way}_hit_tokens"]
            assert hits + computed == metrics["prompt_tokens"]
            assert metrics[f"nodes_{nodes}_{way}_peak_needed_blocks"] > 0
