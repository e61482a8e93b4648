"""The split benchmark runs, compares its tokens and reports every metric; none is judged."""

from __future__ import annotations

import pytest

from tests.fix_bench import quick_metrics

mark = pytest.mark
pytestmark = [mark.integration, mark.bench, mark.slow, mark.timeout(120)]


def test_every_way_is_measured() -> None:
    metrics = quick_metrics("split --tokens 128 --rounds 1", timeout=100)
    for way in ("with_tail", "without_tail", "one_node"):
        assert metrics[f"second_token_{way}_ms"] > 0
    for speed in ("memory", "line"):
        for way in ("behind", "after"):
            assert metrics[f"in_the_pool_save_{way}_{speed}_of_prefill"] > 0
            assert metrics[f"first_token_save_{way}_{speed}_of_prefill"] > 0
