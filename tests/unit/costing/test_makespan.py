"""The recurrence of the pipeline against its closed forms, and columns against single prompts."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierkv.costing.service_time import StepCost, pipeline_ends, pipelined

SECOND = st.floats(0.0, 10.0)
SECONDS = st.lists(st.tuples(st.floats(0.0, 10.0), st.floats(0.0, 10.0)), min_size=1, max_size=12)


@pytest.mark.parametrize(("load", "compute"), [(1.0, 1.0), (0.5, 2.0), (3.0, 0.25), (0.0, 1.0)])
@pytest.mark.parametrize("layers", [1, 2, 32])
def test_equal_layers_cost_the_slower_stage_and_once_the_faster(layers, load, compute) -> None:
    got = pipelined([load] * layers, [compute] * layers)
    assert got == pytest.approx(layers * max(load, compute) + min(load, compute))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(times=SECONDS)
def test_without_a_limit_it_is_the_longest_way_through_both_stages(times) -> None:
    loads, computes = [t for t, _ in times], [c for _, c in times]
    ways = (sum(loads[: k + 1]) + sum(computes[k:]) for k in range(len(times)))
    assert pipelined(loads, computes) == pytest.approx(max(ways))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(times=SECONDS, buffers=st.integers(1, 12))
def test_fewer_buffers_never_help_and_none_beats_one_after_the_other(times, buffers) -> None:
    loads, computes = [t for t, _ in times], [c for _, c in times]
    limited = pipelined(loads, computes, buffers=buffers)
    assert pipelined(loads, computes) <= limited + 1e-9
    assert limited <= sum(loads) + sum(computes) + 1e-9
    assert pipelined(loads, computes, buffers=len(times)) == pipelined(loads, computes)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(SECOND, SECOND, st.integers(1, 40), SECOND, SECOND)
def test_three_sums_say_when_equal_layers_end(load, compute, layers, load_from, compute_from):
    ends = pipeline_ends(load, compute, layers, load_from_s=load_from, compute_from_s=compute_from)
    loads, computes = [load / layers] * layers, [compute / layers] * layers
    loads[0] += load_from
    expected = max(pipelined(loads, computes), compute_from + compute)
    assert ends.latest() == pytest.approx(expected)


@given(st.lists(st.tuples(SECOND, SECOND, SECOND, SECOND), min_size=1, max_size=9))
def test_a_column_of_pipelines_is_what_each_would_be_alone(rows) -> None:
    load, compute, load_from, compute_from = np.array(rows).T
    together = pipeline_ends(load, compute, 7, load_from_s=load_from, compute_from_s=compute_from)
    alone = [
        pipeline_ends(a, b, 7, load_from_s=c, compute_from_s=d).latest() for a, b, c, d in rows
    ]
    assert together.latest(np.maximum).tolist() == alone


@given(
    st.builds(StepCost, SECOND, SECOND, SECOND, SECOND),
    st.lists(st.tuples(st.integers(0, 900), st.integers(1, 900)), min_size=1, max_size=9),
    st.sampled_from([32, 256, math.inf]),
)
def test_a_column_of_prompts_takes_what_each_would_alone(cost, prompts, step_tokens) -> None:
    start, tokens = np.array(prompts, float).T
    together = cost.in_steps(start, tokens, step_tokens, least=np.minimum)
    own_s = cost.own_passes_s(start, tokens, step_tokens, most=np.maximum)
    saved_s = cost.shared_pass_s(tokens, step_tokens, least=np.minimum)
    for at, (first, count) in enumerate(prompts):
        alone = cost.in_steps(first, count, step_tokens)
        assert (together.first_s[at], together.later_s[at]) == alone
        assert own_s[at] == cost.own_passes_s(first, count, step_tokens)
        assert saved_s[at] == cost.shared_pass_s(count, step_tokens)
