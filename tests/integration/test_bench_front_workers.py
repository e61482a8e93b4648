"""The benchmark of front processes runs and reports every metric."""

from __future__ import annotations

import pytest

from tests.fix_bench import quick_metrics

mark = pytest.mark
pytestmark = [mark.integration, mark.bench, mark.slow, mark.timeout(300)]


def test_one_worker_and_two_are_measured() -> None:
    metrics = quick_metrics("front_workers", timeout=240)
    for name in ("", "postgres_"):
        assert metrics[f"{name}1_workers_calls_per_s"] > 0
        assert metrics[f"{name}2_workers_of_1"] > 0
    assert metrics["cores"] >= 1
