"""What the prompts of a statement share, and the runs it is cut into."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fix_scheduler import tree_of
from tierkv.scheduler.plans.plan_runs import Effort, cut, deal

prompts = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), max_size=16)


SYSTEM, DOC_A, DOC_B = [1, 1], [2, 2, 2, 2], [3, 3, 3, 3]


def test_a_tree_of_documents_under_one_instruction() -> None:
    tree = tree_of([[*SYSTEM, *DOC_B, 7], [*SYSTEM, *DOC_A, 5], [*SYSTEM, *DOC_B, 6, 6, 6],
                    [*SYSTEM, *DOC_A, 4]])  # fmt: skip
    assert [tree.order.index(i) for i in range(4)] == [3, 1, 2, 0]
    spans = [(s.parent, s.start_block, s.end_block, s.first, s.stop) for s in tree.stems]
    assert spans == [(0, 0, 0, 0, 4), (0, 0, 1, 0, 4), (1, 1, 3, 0, 2), (1, 1, 3, 2, 4)]
    assert tree.deepest == (2, 2, 3, 3)
    assert [tree.own_blocks(p) for p in range(4)] == [1, 1, 2, 1]
    assert tree.shared_tokens == 2 * 3 + 4 + 4


def test_others_blocks_and_uncached_prompts_share_nothing() -> None:
    text = [1, 2, 3, 4]
    tenants = [b"ann", b"bob", b"ann", b"ann"]
    tree = tree_of([text] * 4, tenants=tenants, shares=[True, True, False, False])
    assert len(tree.stems) == 1
    assert tree.shared_tokens == 0


def test_nothing_to_plan() -> None:
    tree = tree_of([])
    assert tree.order == ()
    assert cut(tree, Effort(), 3) == ()


@given(prompts, st.integers(1, 3))
def test_the_tree_says_of_any_two_prompts_what_they_share(
    texts: list[list[int]], block_tokens: int
) -> None:
    tree = tree_of(texts, block_tokens)
    assert sorted(tree.order) == list(range(len(texts)))

    def shared(left: int, right: int) -> int:
        a, b = texts[tree.order[left]], texts[tree.order[right]]
        blocks = 0
        while (end := (blocks + 1) * block_tokens) <= min(len(a), len(b)) and a[:end] == b[:end]:
            blocks += 1
        return blocks

    for left in range(len(texts)):
        for right in range(left + 1, len(texts)):
            both = [s for s in tree.path(left) if s in tree.path(right)]
            found = max((tree.stems[s].end_block for s in both), default=0)
            assert found == shared(left, right)
        own = tree.tokens[left] - tree.own_tokens(left)
        most = max((shared(*sorted((left, o))) for o in range(len(texts)) if o != left), default=0)
        assert own == most * block_tokens
    for number, stem in enumerate(tree.stems[1:], start=1):
        above = tree.stems[stem.parent]
        assert stem.parent < number
        assert above.first <= stem.first < stem.stop - 1 < stem.stop <= above.stop
        assert above.end_block == stem.start_block < stem.end_block


@given(prompts, st.integers(1, 4), st.floats(0, 20))
def test_runs_are_a_partition_in_depth_first_order(
    texts: list[list[int]], nodes: int, answer_s: float
) -> None:
    tree = tree_of(texts)
    runs = cut(tree, Effort(1.0, answer_s), nodes)
    assert [p for run in runs for p in range(run.first, run.stop)] == list(range(len(texts)))
    for run in runs:
        stem = tree.stems[run.stem]
        assert stem.first <= run.first < run.stop <= stem.stop
        assert all(run.stem in [*tree.path(p), 0] for p in range(run.first, run.stop))
        assert run.work_s > 0
    dealt = [run for lane in deal(runs, [1.0] * nodes) for run in lane]
    assert [p for run in dealt for p in range(run.first, run.stop)] == list(range(len(texts)))
    assert sum(run.work_s for run in dealt) == pytest.approx(sum(run.work_s for run in runs))


def test_small_subtrees_stay_whole_and_a_big_one_is_cut_below_its_prefix() -> None:
    small = [[9, 9, doc, doc, doc, doc, q] for doc in (1, 2, 3, 4) for q in range(4)]
    runs = cut(tree_of(small), Effort(), 1)
    assert [(run.first, run.stop) for run in runs] == [(0, 4), (4, 8), (8, 12), (12, 16)]
    big = [[9, 9, 1, 1, *[q] * 8] for q in range(16)]
    runs = cut(tree_of(big), Effort(), 2)
    assert len(runs) == 8
    assert {tree_of(big).stems[run.stem].end_block for run in runs} == {2}
    assert [len(lane) for lane in deal(runs, [1.0, 1.0])] == [4, 4]


def test_a_run_is_cut_where_a_share_ends_only_between_runs_with_its_prefix() -> None:
    texts = [[9, 9, *[q] * 2] for q in range(25)]
    runs = cut(tree_of(texts), Effort(), 3)
    calls = [sum(run.calls for run in lane) for lane in deal(runs, [1.0] * 3)]
    assert max(run.calls for run in runs) > 1
    assert sorted(calls) == [8, 8, 9]
    documents = [[9, 9, *[doc] * 8, q, q] for doc in range(3) for q in range(3)]
    runs = cut(tree_of(documents), Effort(), 1)
    assert [run.calls for run in runs] == [3, 3, 3]
    assert [[run.calls for run in lane] for lane in deal(runs, [1.0, 1.0])] == [[3], [3, 3]]


def test_a_long_prefix_is_not_computed_twice_for_a_little_balance() -> None:
    long_prefix = [[*[5] * 400, q, q] for q in range(16)]
    assert len(cut(tree_of(long_prefix), Effort(), 4)) == 1


def test_deeply_nested_prefixes_need_no_recursion() -> None:
    tree = tree_of([[1] * (2 * n + 2) for n in range(2_000)])
    assert len(tree.stems) == 2_000
    runs = cut(tree, Effort(), 2)
    assert runs[0].first == 0
    assert runs[-1].stop == 2_000
