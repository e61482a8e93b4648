"""The recurrence of the pipeline against its closed forms."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierkv.costing.pipeline import pipelined

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
