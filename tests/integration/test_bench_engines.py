"""The engines benchmark plays its chats on our own engine; what needs vLLM says how to get it."""

from __future__ import annotations

import pytest

from bench.engines_chats import Plan
from bench.engines_table import text
from tests.fix_bench import quick_metrics, run_bench

mark = pytest.mark
pytestmark = [mark.integration, mark.bench, mark.slow, mark.timeout(120)]


def test_a_round_fits_while_all_chats_lie_in_the_cache() -> None:
    plan = Plan(chats=2, rounds=3, start=100, turn=40, answer=10, cache=320, repeats=1)
    assert [plan.prompt_tokens(number) for number in range(4)] == [100, 150, 200, 250]
    assert [plan.phase(number) for number in range(4)] == ["cold", "fits", "exceeds", "restart"]
    assert plan.context == 260


def test_aims_are_met_or_missed() -> None:
    metrics = {
        "m_parameters": 1.0, "m_exceeds_vllm_tierkv_ttft_of_plain": 0.4,
        "m_fits_vllm_tierkv_ttft_of_plain": 1.06, "get_num_new_matched_tokens_p50_us": 2.0,
        "get_num_new_matched_tokens_p99_us": 9.0,
    }  # fmt: skip
    told = text(metrics, ["m"], ["vllm", "vllm_tierkv"])
    assert "at most 1 of plain vLLM | met: 0.4 |" in told
    assert "at most 1.05 of plain vLLM | missed: 1.06 |" in told
    assert "| `get_num_new_matched_tokens` | 2 | 9 |" in told


def test_every_phase_of_our_own_engine_is_told() -> None:
    metrics = quick_metrics("engines --without vllm vllm_tierkv vllm_example", timeout=110)
    for phase in ("cold", "fits", "exceeds", "restart"):
        assert metrics[f"tiny_{phase}_tierkv_ttft_ms"] > 0
    assert metrics["tiny_fits_tierkv_cached_share"] > 0
    assert metrics["tiny_answers"] == 12
    assert "| TierKV's own engine | " in text(metrics, ["tiny"], ["tierkv"])


def test_without_vllm_it_says_how_to_get_it(tmp_path) -> None:
    done = run_bench(f"engines --quick --venv {tmp_path}", timeout=110)
    assert done.returncode == 1
    assert "make test-engines" in done.stderr


def test_our_engine_is_timed_alone() -> None:
    """Prefill and decoding without vLLM: real servers, and a speed for each case."""
    metrics = quick_metrics("engines_speed --without-vllm", timeout=110)
    names = [f"tiny_1_threads_decode_{batch}_tierkv_tokens_per_s" for batch in (1, 8, 32)]
    names.append("tiny_1_threads_prefill_512_tierkv_tokens_per_s")
    assert all(metrics[name] > 0 for name in names), metrics
