"""The bench of conversations: the same answers with hints and without, in little memory."""

from __future__ import annotations

import pytest

from tests.fix_bench import quick_metrics

mark = pytest.mark
pytestmark = [mark.integration, mark.bench, mark.slow, mark.timeout(240)]


def test_conversations_answer_alike_with_hints_and_without() -> None:
    metrics = quick_metrics("sessions", timeout=220)
    assert metrics["sessions"] == 8 and 0 < metrics["memory_share"] <= 1
    assert all(metrics[f"{way}_first_token_s"] > 0 for way in ("told", "learned", "unknown", "lru"))
    assert metrics["tool_token_ratio"] > 0


def test_kept_turns_answer_as_a_sent_history_does() -> None:
    metrics = quick_metrics("response_history", timeout=220)
    assert metrics["turns"] == 8 and 0 < metrics["kept_to_sent_request_bytes"] < 1
    assert all(metrics[f"{way}_front_cpu_s"] > 0 for way in ("kept", "sent"))
    assert all(metrics[f"{way}_first_token_s"] > 0 for way in ("kept", "sent"))
