"""Which blocks are fine: as many leading ones as the budget allows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.costing.load_controller import BlockSizes, LevelChoice, choose_levels

CHAIN = [BlockSizes(8, 8), *[BlockSizes(8, 4)] * 3]


@pytest.mark.parametrize(
    ("budget_s", "want"),
    [
        (3.2, LevelChoice(4, 3.2)),
        (3.1, LevelChoice(3, 2.8)),
        (2.4, LevelChoice(2, 2.4)),
        (2.0, LevelChoice(1, 2.0)),  # The first is stored at one level only.
        (0.5, LevelChoice(0, 2.0)),  # Nothing fits: the fastest.
    ],
)
def test_leading_blocks_are_fine_first(budget_s: float, want: LevelChoice) -> None:
    got = choose_levels(CHAIN, bytes_per_s=10.0, budget_s=budget_s)
    assert got.fine == want.fine and got.predicted_s == pytest.approx(want.predicted_s)


def test_nothing_found_costs_nothing() -> None:
    assert choose_levels([], bytes_per_s=1.0, budget_s=0.0) == LevelChoice(0, 0.0)


@given(
    st.lists(st.tuples(st.integers(1, 99), st.integers(1, 99)), max_size=20),
    st.floats(0.1, 1e3),
    st.floats(0, 1e3),
)
def test_one_more_fine_block_would_be_late(sizes, rate, budget_s) -> None:
    blocks = [BlockSizes(max(pair), min(pair)) for pair in sizes]
    got = choose_levels(blocks, bytes_per_s=rate, budget_s=budget_s)

    def seconds(fine: int) -> float:
        parts = [b.fine for b in blocks[:fine]] + [b.coarse for b in blocks[fine:]]
        return sum(parts) / rate

    assert got.predicted_s == pytest.approx(seconds(got.fine), abs=1e-9)
    assert got.fine == 0 or got.predicted_s <= budget_s
    later = range(got.fine + 1, len(blocks) + 1)
    assert all(seconds(fine) > budget_s * (1 - 1e-9) for fine in later)
