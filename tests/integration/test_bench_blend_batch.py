"""The bench of blending beside exact reuse runs and reports each cell; none is judged by time."""

from __future__ import annotations

import pytest

from tests.fix_bench import quick_metrics

mark = pytest.mark
pytestmark = [mark.integration, mark.bench, mark.slow, mark.timeout(120)]


def test_a_cell_has_every_ratio() -> None:
    metrics = quick_metrics("blend_batch", timeout=100)
    for cell in ("4_notes_at_once", "4_notes_one_by_one"):
        assert metrics[f"{cell}_blended_of_exact"] > 0 < metrics[f"{cell}_first_blended_of_exact"]
        assert metrics[f"{cell}_exact_right"] > 0.5 < metrics[f"{cell}_blended_right"]
