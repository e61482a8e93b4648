"""The bench of the answer cache: all runs give the same answers, all are found again."""

from __future__ import annotations

import pytest

from tests.fix_bench import quick_metrics

mark = pytest.mark
pytestmark = [mark.integration, mark.bench, mark.slow, mark.timeout(200)]


def test_answers_are_found_again_also_after_a_kill() -> None:
    metrics = quick_metrics("answers --rows 200", timeout=180)
    assert metrics["rows"] == 200
    assert metrics["found_after_restart_share"] == 1
    assert metrics["miss_with_to_without_ratio"] > 0
