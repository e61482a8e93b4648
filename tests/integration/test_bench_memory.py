"""The bench of memory: documents reused at any position, exact prefixes, and no cache."""

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
    pytest.mark.timeout(200),
]
ROOT = Path(__file__).parents[2]


def test_documents_after_another_beginning_are_reused_only_by_blending() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench.memory", "--quick", "--format", "json"],
        cwd=ROOT, capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    metrics = json.loads(done.stdout)
    assert metrics["nearest_prefixes_equal_answers_share"] == 1
    assert metrics["after_note_prefixes_equal_answers_share"] == 1
    prompt = metrics["after_note_prompt_tokens"]
    assert metrics["after_note_uncached_computed_tokens"] == prompt
    assert metrics["after_note_prefixes_computed_tokens"] > 0.9 * prompt
    assert metrics["after_note_blended_computed_tokens"] < 0.7 * prompt
