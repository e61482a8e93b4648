"""Cohorts are a partition, what they share is shared, and none would spare more in one piece."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tierkv.compute.model.row_groups import find_cohorts

ROWS = st.lists(
    st.tuples(st.lists(st.integers(1, 3), min_size=1, max_size=7), st.integers(0, 7)),
    min_size=1,
    max_size=9,
)


def tables(rows) -> tuple[np.ndarray, np.ndarray]:
    full = np.array([min(len(pages), most) for pages, most in rows])
    table = np.zeros((len(rows), max(1, int(full.max()))), dtype=np.int64)
    for row, (pages, _) in enumerate(rows):
        table[row, : full[row]] = pages[: full[row]]
    return table, full


def shared(rows, members) -> int:
    """Count the leading pages that all members have, one by one."""
    pages = [rows[m][0][: rows[m][1]] for m in members]
    common = 0
    while all(len(p) > common for p in pages) and len({p[common] for p in pages}) == 1:
        common += 1
    return common


@settings(max_examples=400, deadline=None, derandomize=True)
@given(rows=ROWS, least=st.integers(0, 6))
def test_cohorts_share_what_they_say(rows, least) -> None:
    table, full = tables(rows)
    cohorts = find_cohorts(table, full, least_saved=least)
    assert sorted(m for c in cohorts for m in c.members) == list(range(len(rows)))
    for cohort in cohorts:
        assert cohort.shared_pages <= shared(rows, cohort.members)
        if cohort.shared_pages:
            assert cohort.saved_pages >= max(1, least)
            assert cohort.shared_pages == shared(rows, cohort.members)
    assert sum(c.shared_pages == 0 for c in cohorts) <= 1


@settings(max_examples=200, deadline=None, derandomize=True)
@given(rows=ROWS)
def test_no_two_rows_would_spare_more_than_all_cohorts(rows) -> None:
    table, full = tables(rows)
    saved = sum(c.saved_pages for c in find_cohorts(table, full, least_saved=0))
    assert saved >= shared(rows, range(len(rows))) * (len(rows) - 1)
    for i in range(len(rows)):
        for j in range(i):
            assert saved >= shared(rows, (i, j))


def test_two_groups_below_one_beginning_are_told_apart() -> None:
    table = np.array([[1, 2, 2, 2], [1, 3, 3, 3], [1, 2, 2, 2], [1, 3, 3, 3], [9, 9, 9, 9]])
    cohorts = find_cohorts(table, np.array([4, 4, 4, 4, 4]), least_saved=2)
    assert [(c.members, c.shared_pages) for c in cohorts] == [((0, 2), 4), ((1, 3), 4), ((4,), 0)]


def test_little_in_common_is_not_worth_it() -> None:
    table = np.array([[1, 2], [1, 3], [1, 4]])
    full = np.array([2, 2, 2])
    assert [c.shared_pages for c in find_cohorts(table, full, least_saved=3)] == [0]
    assert [c.shared_pages for c in find_cohorts(table, full, least_saved=2)] == [1]
