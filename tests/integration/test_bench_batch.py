"""The bench of a statement's batch runs on real processes and reports; nothing is judged."""

from __future__ import annotations

import pytest

from tests.fix_bench import quick_metrics

mark = pytest.mark
pytestmark = [mark.integration, mark.bench, mark.slow, mark.timeout(200)]


def test_shares_and_waits_are_reported() -> None:
    metrics = quick_metrics("batch --nodes 2", timeout=180)
    for question in (1, 2, 3):
        assert 1 <= metrics[f"2_nodes_question_{question}_most_of_mean"] <= 2
    assert 0 <= metrics["2_nodes_question_2_rows_to_their_kv"] <= 1
    assert metrics["bulk_yields_chat_ttft_p50_s"] > 0 and metrics["bulk_throughput_kept"] > 0
