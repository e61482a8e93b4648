"""The bench of conversations: the same answers with hints and without, in little memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.integration,
    pytest.mark.bench,
    pytest.mark.slow,
    pytest.mark.timeout(240),
]
ROOT = Path(__file__).parents[2]


def test_conversations_answer_alike_with_hints_and_without() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench.sessions", "--quick", "--format", "json"],
        cwd=ROOT, capture_output=True, text=True, timeout=220, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    metrics = json.loads(done.stdout)
    assert metrics["sessions"] == 8 and 0 < metrics["memory_share"] <= 1
    assert all(metrics[f"{way}_first_token_s"] > 0 for way in ("told", "learned", "unknown", "lru"))
    assert metrics["tool_token_ratio"] > 0


def test_kept_turns_answer_as_a_sent_history_does() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench.response_history", "--quick", "--format", "json"],
        cwd=ROOT, capture_output=True, text=True, timeout=220, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    metrics = json.loads(done.stdout)
    assert metrics["turns"] == 8 and 0 < metrics["kept_to_sent_request_bytes"] < 1
    assert all(metrics[f"{way}_front_cpu_s"] > 0 for way in ("kept", "sent"))
    assert all(metrics[f"{way}_first_token_s"] > 0 for way in ("kept", "sent"))
