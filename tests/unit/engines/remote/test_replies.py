"""Numbers of a metrics page, in the words vLLM 0.32 writes them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tierkv.integrations.remote.openai_http import MetricsPage

PAGE = r"""
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a"} 2.0
vllm:num_requests_running{engine="1",model_name="a"} 3.0
vllm:num_requests_waiting{engine="0"} nan
vllm:kv_cache_usage_perc{engine="0",model_name="a"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="a"} 0.5
process_start_time_seconds 1.79535611346e+09
vllm:cache_config_info{block_size="32",cache_dtype="auto",note="a \"b\", c=\\",engine="0"} 1.0
this is no sample at all
"""


def test_ranks_are_summed_and_labels_are_read() -> None:
    page = MetricsPage(PAGE)
    assert page.total("vllm:num_requests_running") == 5.0
    assert page.most("vllm:kv_cache_usage_perc") == 0.5
    assert page.most("process_start_time_seconds") == 1.79535611346e9
    assert page.labels("vllm:cache_config_info")["block_size"] == "32"
    assert page.labels("vllm:cache_config_info")["engine"] == "0"


def test_what_is_not_there_is_nothing() -> None:
    page = MetricsPage(PAGE)
    assert page.total("vllm:num_requests_waiting") == page.most("none") == page.total("none") == 0.0
    assert page.labels("none") == {}


@given(st.text(), st.floats(-1e9, 1e9, allow_nan=False))
def test_a_sample_is_found_whatever_stands_around_it(noise: str, value: float) -> None:
    clean = noise.replace("wanted", "")
    assert MetricsPage(f"{clean}\nwanted {value!r}\n{clean}").total("wanted") == value
