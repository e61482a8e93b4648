"""In which order to run the calls of a batch without a plan, so that prefixes are computed once.

Sorted by token ids, calls with a common prefix are neighbours; the first of them computes the
prefix and the others wait until it has, instead of all computing it side by side. That is what
``tierkv.plan = off`` leaves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from tierkv.dbfront.contracts import CallTurn, PlanSummary, PreparedCall


class SortedCalls:
    """Implements CallPlan: one list, whoever is free takes the next call of it."""

    def __init__(self, calls: Sequence[PreparedCall], *, sort: bool) -> None:
        """Order calls.

        Args:
            calls: all of a batch.
            sort: by token ids, and wait for whoever computes a prefix; else as they come.
        """
        self._calls = calls
        self._order = list(range(len(calls)))
        self._leaders: list[int | None] = [None] * len(calls)
        if sort and calls:
            self._order.sort(key=lambda index: calls[index].request.token_ids)
            self._leaders = _leaders([calls[index] for index in self._order])
        self._prefilled = [asyncio.Event() for _ in calls]
        self._next = 0

    @property
    def summary(self) -> PlanSummary:
        """Nothing was planned."""
        return PlanSummary()

    async def take(self) -> CallTurn | None:
        """See CallPlan. A call's leader was always taken earlier, so waiting ends."""
        if self._next == len(self._order):
            return None
        at, self._next = self._next, self._next + 1
        leader = self._leaders[at]
        if leader is not None:
            await self._prefilled[self._order[leader]].wait()
        index = self._order[at]
        return CallTurn(index, self._calls[index])

    def prefilled(self, index: int) -> None:
        """See CallPlan."""
        self._prefilled[index].set()

    def ended(self, index: int, *, answered: bool) -> None:
        """See CallPlan."""
        self._prefilled[index].set()

    async def close(self) -> None:
        """Nothing is kept here."""


def _leaders(calls: Sequence[PreparedCall]) -> list[int | None]:
    if not all(call.request.use_cache for call in calls):
        return [None] * len(calls)
    return prefix_leaders(
        [call.request.token_ids for call in calls],
        block_tokens=calls[0].model.layout.block_tokens,
    )


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
