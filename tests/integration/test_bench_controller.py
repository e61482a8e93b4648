"""The controller's benchmark runs, compares its tokens and reports every rate; none is judged."""

from __future__ import annotations

import pytest

from tests.fix_bench import quick_metrics

pytestmark = [pytest.mark.integration, pytest.mark.bench, pytest.mark.timeout(120)]


def test_every_rate_has_a_choice_a_prediction_and_what_it_took() -> None:
    metrics = quick_metrics("controller --tokens 192 --rounds 1", timeout=100)
    assert metrics["compute_s"] > 0
    for rate in ("0.25", "0.5", "1", "2", "4", "8"):
        assert metrics[f"rate_{rate}x_choice"] in (0, 1, 2)
        assert metrics[f"rate_{rate}x_predicted_of_actual"] > 0
        assert metrics[f"rate_{rate}x_ttft_of_compute"] > 0
