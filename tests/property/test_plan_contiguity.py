"""What a plan keeps together: neighbours of the prefix tree stay on one node, whatever the tree."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from tests.fix_scheduler import tree_of
from tierkv.scheduler.plans.plan_runs import RUNS_PER_NODE, Effort, cut, deal

BLOCK_TOKENS = 2

texts = st.lists(st.lists(st.integers(0, 2), max_size=12), min_size=1, max_size=20)


def computed(prompts: list[list[int]], calls: list[int]) -> int:
    """Count the tokens to compute for some calls by themselves, each shared block once."""
    blocks = {
        tuple(prompts[call][: end + BLOCK_TOKENS])
        for call in calls
        for end in range(0, len(prompts[call]) // BLOCK_TOKENS * BLOCK_TOKENS, BLOCK_TOKENS)
    }
    rests = sum(len(prompts[call]) % BLOCK_TOKENS for call in calls)
    return len(blocks) * BLOCK_TOKENS + rests


@given(texts, st.integers(1, 4))
def test_each_node_gets_one_stretch_of_the_tree(prompts: list[list[int]], nodes: int) -> None:
    tree = tree_of(prompts)
    dealt = deal(cut(tree, Effort(), nodes), [1.0] * nodes)
    positions = [[p for run in lane for p in range(run.first, run.stop)] for lane in dealt]
    assert [p for lane in positions for p in lane] == list(range(len(prompts)))


@given(texts, st.integers(1, 4))
def test_a_subtree_of_a_fair_size_is_one_run(prompts: list[list[int]], nodes: int) -> None:
    """Only a stem with more work below it than a share, and than its own prefix, is cut."""
    tree = tree_of(prompts)
    runs = cut(tree, Effort(), nodes)
    whole = computed(prompts, list(range(len(prompts))))
    for stem in tree.stems[1:]:
        calls = list(tree.order[stem.first : stem.stop])
        below = computed(prompts, calls) - stem.end_tokens
        if below <= max(whole / (RUNS_PER_NODE * nodes), stem.end_tokens):
            inside = [r for r in runs if r.first < stem.stop and stem.first < r.stop]
            assert len(inside) == 1


@given(texts, st.integers(1, 4))
def test_what_nodes_compute_again_is_at_most_what_the_cuts_share(
    prompts: list[list[int]], nodes: int
) -> None:
    """Between two nodes' stretches lies one cut: only the prefix there is computed on both."""
    tree = tree_of(prompts)
    dealt = deal(cut(tree, Effort(), nodes), [1.0] * nodes)
    lanes = [[tree.order[p] for r in lane for p in range(r.first, r.stop)] for lane in dealt]
    apart = sum(computed(prompts, lane) for lane in lanes)
    edges = [(left[-1], right[0]) for left, right in pairwise(lane for lane in lanes if lane)]
    again = sum(
        computed(prompts, [a]) + computed(prompts, [b]) - computed(prompts, [a, b])
        for a, b in edges
    )
    assert apart == computed(prompts, list(range(len(prompts)))) + again
