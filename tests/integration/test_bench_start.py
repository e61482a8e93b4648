"""The benchmark of starts measures all it names, and says so."""

from __future__ import annotations

import pytest

from tests.fix_bench import quick_metrics

mark = pytest.mark
pytestmark = [mark.integration, mark.bench, mark.slow, mark.timeout(180)]


def test_it_runs_and_shows_floors_and_ratios() -> None:
    metrics = quick_metrics("start_time", timeout=170)
    floors = {"duckdb": ("first_row", "tierkv_help"), "import_torch": ("first_answer", "up_ready")}
    for floor, names in floors.items():
        for name in names:
            # One round: the ratio is that of the two times.
            assert metrics[f"{name}_of_{floor}"] == metrics[f"{name}_s"] / metrics[f"{floor}_s"]
    assert 0 < metrics["idle_before_first_call_mib"] < metrics["idle_after_first_call_mib"] < 600
