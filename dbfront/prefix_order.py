"""In which order to run the calls of a batch, so that shared prefixes are computed once.

Pure. Sorted by token ids, calls with a common prefix are neighbours; the first of them computes
the prefix and the others wait until it has, instead of all computing it side by side.
"""

from __future__ import annotations

from collections.abc import Sequence


def prefix_leaders(prompts: Sequence[Sequence[int]], *, block_tokens: int) -> list[int | None]:
    """Say whose prefill each prompt should wait for.

    Only whole blocks count, because only whole blocks are shared.

    Args:
        prompts: token ids, sorted.
        block_tokens: tokens per KV block.

    Returns:
        Per prompt the index of the first prompt that has its longest shared prefix, always lower
        than its own; None when no whole block is shared with an earlier one.
    """
    leaders: list[int | None] = []
    path: list[tuple[int, int]] = []  # (blocks, first prompt that has them), blocks ascending
    for index, prompt in enumerate(prompts):
        shared = _shared_blocks(prompts[index - 1], prompt, block_tokens) if index else 0
        popped: tuple[int, int] | None = None
        while path and path[-1][0] > shared:
            popped = path.pop()
        if popped is not None and shared and (not path or path[-1][0] < shared):
            path.append((shared, popped[1]))
        leaders.append(path[-1][1] if path and shared else None)
        blocks = len(prompt) // block_tokens
        if blocks > shared:
            path.append((blocks, index))
    return leaders


def _shared_blocks(left: Sequence[int], right: Sequence[int], block_tokens: int) -> int:
    shared = 0
    for start in range(0, min(len(left), len(right)) - block_tokens + 1, block_tokens):
        if left[start : start + block_tokens] != right[start : start + block_tokens]:
            break
        shared += 1
    return shared
