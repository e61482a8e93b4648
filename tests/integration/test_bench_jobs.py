"""The bench of jobs: each way writes each row once, and a kill costs less than a batch."""

from __future__ import annotations

import pytest

from tests.fix_bench import quick_metrics

mark = pytest.mark
pytestmark = [mark.integration, mark.bench, mark.slow, mark.timeout(200)]


def test_jobs_are_measured_and_a_kill_costs_less_than_a_batch() -> None:
    metrics = quick_metrics("jobs --rows 200", timeout=180)
    assert metrics["rows"] == 200 and metrics["batch_rows"] == 20
    # A question is a token longer or shorter than another.
    assert metrics["calls_asked_again_after_a_kill"] <= 1.05 * metrics["batch_rows"]
    assert metrics["ai_table_refresh_to_full_ratio"] > 0


def test_the_first_question_about_an_indexed_document_is_measured() -> None:
    metrics = quick_metrics("kv_index --documents 8", timeout=180)
    assert metrics["documents"] == 8 and metrics["document_tokens"] > 500
    assert metrics["first_token_speedup"] > 1 and metrics["pool_mib_per_document"] > 0
