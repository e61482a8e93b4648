"""bench.leaving runs on real processes, and no call fails when one dies; no share is judged."""

from __future__ import annotations

import pytest

from tests.fix_bench import quick_metrics

mark = pytest.mark
pytestmark = [mark.integration, mark.bench, mark.slow, mark.timeout(240)]


def test_no_call_fails_when_a_process_is_lost() -> None:
    metrics = quick_metrics("leaving", timeout=230)
    assert metrics["failed"] == 0 and metrics["answers"] > 100
    for role in ("meta", "front", "dmp", "compute"):
        assert metrics[f"{role}_hit_share_before"] > 0
