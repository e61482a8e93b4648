"""The bench of load policies runs, compares tokens and reports each cell; none is judged."""

from __future__ import annotations

import pytest

from tests.fix_bench import quick_metrics

pytestmark = [pytest.mark.integration, pytest.mark.bench, pytest.mark.timeout(120)]


def test_a_cell_has_every_ratio() -> None:
    metrics = quick_metrics("load_choice --only l2", timeout=100)
    cell = "l2_small_8_calls_0%_in_l1"
    assert metrics[f"{cell}_auto_of_better"] > 0 and metrics[f"{cell}_always_of_never"] > 0
    assert metrics[f"{cell}_prediction_error"] >= 0
    assert metrics["worst_auto_of_better"] == metrics[f"{cell}_auto_of_better"]
