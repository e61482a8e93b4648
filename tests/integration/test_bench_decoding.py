"""The benchmarks of decoding and of short rests run and compare their tokens; none is judged."""

from __future__ import annotations

import pytest

from tests.fix_bench import quick_metrics

mark = pytest.mark
pytestmark = [mark.integration, mark.bench, mark.slow, mark.timeout(240)]


def test_guesses_and_shared_reads_stand_beside_the_plain_way() -> None:
    metrics = quick_metrics(
        "decoding --rounds 1 --probes 1 --tokens 4 --rows 2 --shared-tokens 512", timeout=230
    )
    for case in ("copies_batch_1", "labels_batch_8", "random_batch_4"):
        assert metrics[f"{case}_guessing_speedup_of_answers"] > 0
    assert metrics["random_batch_1_guessing_speedup"] > 0
    assert metrics["rows_2_sharing_speedup"] > 0


def test_short_rests_together_stand_beside_rests_one_by_one() -> None:
    metrics = quick_metrics("warm_rests --rounds 1 --tokens 128", timeout=230)
    for model in ("shipped", "random"):
        for case in ("rest_34", "rest_2_to_64", "rest_34_nothing_shared"):
            assert metrics[f"{model}_{case}_speedup"] > 0
            assert metrics[f"{model}_{case}_processor_speedup"] > 0


def test_parts_of_a_prefill_are_parts() -> None:
    metrics = quick_metrics("prefill_parts", timeout=230)
    for threads in (1, 2):
        name = f"{threads}_threads_prefill_512"
        parts = [metrics[f"{name}_{part}_share"] for part in ("products", "attention")]
        assert min(parts) > 0 and sum(parts) < 1 and metrics[f"{name}_tokens_per_s"] > 0
