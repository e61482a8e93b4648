"""A prompt that a user waits for, behind a statement of many calls, on a running engine."""

from __future__ import annotations

import asyncio
import random

import pytest

from tests.fix_model import answer, make_request, running_node
from tierkv.compute.batching.answers import Delivery
from tierkv.compute.engine.engine import Engine

MOST_STEPS = 3
"""Steps of the engine from the arrival of the urgent prompt to its first token: the step that was
running, and the prompt's own step or two."""


@pytest.mark.parametrize("l1_pages", [257, 33], ids=["places are short", "pages are short"])
@pytest.mark.parametrize("prompt_tokens", [5, 60])
async def test_an_urgent_prompt_waits_at_most_three_steps_behind_bulk(
    prompt_tokens: int, l1_pages: int
) -> None:
    rng = random.Random(1)

    def prompt(tokens: int) -> list[int]:
        return [rng.randrange(1, 128) for _ in range(tokens)]

    async with running_node(l1_pages=l1_pages) as node:
        engine = node._engine
        bulk = [
            asyncio.create_task(answer(node, make_request(prompt(40), priority=1)))
            for _ in range(60)
        ]
        while engine.steps < 3:  # The batch is full by now, and more prompts wait.
            await asyncio.sleep(0)
        first = note_first_tokens(engine)
        taken = []
        for _ in range(3):
            before = engine.steps
            await answer(node, make_request(prompt(prompt_tokens), sampling={"max_tokens": 1}))
            taken.append(first[max(first)] - before)  # The newest sequence.
        assert not all(task.done() for task in bulk), "bulk ended too early to delay a prompt"
        assert max(taken) <= MOST_STEPS, taken
        tokens = [(await task)[0] for task in bulk]
        assert [len(each) for each in tokens] == [12] * 60  # Bulk is delayed, not starved.


def note_first_tokens(engine: Engine) -> dict[int, int]:
    """Note from now on, in the engine's thread, the step of each sequence's first token."""
    first: dict[int, int] = {}
    deliver = engine._deliver

    def noting(deliveries: list[Delivery]) -> None:
        for delivery in deliveries:
            first.setdefault(delivery.seq_id, engine.steps)
        deliver(deliveries)

    engine._deliver = noting
    return first
