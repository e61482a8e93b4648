"""What can be restored of a prefix: all pools must agree on a length."""

from __future__ import annotations

import pytest

from tierkv.integrations.sglang.host_pages import PrefixHit, SidePool, leading, prefix_hit

YES, NO = True, False


@pytest.mark.parametrize(
    ("there", "count"), [([], 0), ([NO], 0), ([YES, YES], 2), ([YES, NO, YES], 1)]
)
def test_leading_pages(there: list[bool], count: int) -> None:
    assert leading(there) == count


def test_keys_and_values_alone() -> None:
    assert prefix_hit("kv", [YES, YES, NO], []) == PrefixHit(2, {"kv": 2}, [1, 2])
    assert prefix_hit("kv", [NO, YES], []) == PrefixHit(0, {}, [])


def test_a_pool_that_must_have_all_pages_cuts_the_prefix() -> None:
    side = SidePool("indexer", [YES, NO, YES], trailing=None)
    assert prefix_hit("kv", [YES] * 3, [side]) == PrefixHit(1, {"kv": 3, "indexer": 1}, [1])


def test_a_pool_of_last_pages_leaves_only_some_lengths() -> None:
    state = SidePool("mamba", [NO, YES, NO, YES, YES], trailing=1)
    assert prefix_hit("kv", [YES] * 5, [state]).lengths == [2, 4, 5]
    window = SidePool("swa", [NO, YES, NO, YES, YES], trailing=2)
    hit = prefix_hit("kv", [YES] * 4 + [NO], [state, window])
    # A window may reach past the beginning; of 4 pages the window is [NO, YES]: nothing is left.
    assert hit == PrefixHit(0, {"kv": 4, "mamba": 4}, [])
    assert prefix_hit("kv", [YES] * 5, [state, window]).pages == 5
    short = SidePool("swa", [YES, NO], trailing=4)
    assert prefix_hit("kv", [YES, YES], [short]).lengths == [1]
