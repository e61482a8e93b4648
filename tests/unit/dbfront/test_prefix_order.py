"""Who waits for whom in a batch of prompts that share prefixes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tierkv.dbfront.calls.question_runner import prefix_leaders

prompts = st.lists(st.lists(st.integers(0, 2), max_size=8), max_size=12)


def test_a_tree_of_documents_under_one_instruction() -> None:
    instruction = [1, 1]
    sorted_prompts = [
        [*instruction, 2, 2, 5],
        [*instruction, 2, 2, 6],
        [*instruction, 3, 3, 5],
        [*instruction, 3, 3, 6],
        [9, 9, 9, 9],
    ]
    assert prefix_leaders(sorted_prompts, block_tokens=2) == [None, 0, 0, 2, None]


def test_nothing_shared() -> None:
    assert prefix_leaders([], block_tokens=4) == []
    assert prefix_leaders([[1], [2], [2]], block_tokens=4) == [None, None, None]


@given(prompts, st.integers(1, 3))
def test_leader_is_the_first_prompt_with_the_longest_shared_prefix(
    unsorted: list[list[int]], block_tokens: int
) -> None:
    batch = sorted(unsorted)

    def shared(left: list[int], right: list[int]) -> int:
        blocks = 0
        while (end := (blocks + 1) * block_tokens) <= min(len(left), len(right)) and left[
            :end
        ] == right[:end]:
            blocks += 1
        return blocks

    for index, leader in enumerate(prefix_leaders(batch, block_tokens=block_tokens)):
        most = max((shared(batch[i], batch[index]) for i in range(index)), default=0)
        first = next((i for i in range(index) if shared(batch[i], batch[index]) == most), None)
        assert leader == (first if most else None)
