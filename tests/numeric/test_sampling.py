"""Shaped answers and log-probabilities of a real node: the same whoever computes them and when."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.fix_model import answer, make_request, running_node, tiny_config
from tests.fix_pool import MemoryPoolNode
from tierkv.compute.config import RandomModelSpec
from tierkv.compute.node import ComputeNode
from tierkv.kvcore.errors import UserError
from tierkv.kvcore.request import FinishReason, GenerateRequest, TokenLogprobs

BLOCK, NEW = 8, 41
LOOPING = RandomModelSpec(tiny_config("qwen2"), seed=2)
"""Its answers soon go in circles, so that guesses would be right and penalties have work."""

PROMPTS = [
    [(i * step + 1) % 128 for i in range(length)]
    for step, length in ((3, 27), (5, 29), (7, 31), (11, 34))
]
SHAPES: list[dict[str, Any]] = [
    {"presence_penalty": 1.5, "frequency_penalty": 0.5},
    {"repetition_penalty": 1.6},
    {"temperature": 1.0, "seed": 7, "top_k": 20, "frequency_penalty": 1.0, "logprobs": 3},
    {"logit_bias": ((5, 6.0), (9, -100.0)), "temperature": 0.8, "seed": 3, "min_p": 0.02},
]


def requests(**changes: Any) -> list[GenerateRequest]:
    return [
        make_request(prompt, sampling={"max_tokens": NEW} | shape, **changes)
        for prompt, shape in zip(PROMPTS, SHAPES, strict=True)
    ]


async def told(
    node: ComputeNode, request: GenerateRequest
) -> tuple[list[int], list[TokenLogprobs]]:
    """Return an answer's tokens and log-probabilities."""
    tokens, logprobs = [], []
    async for event in node.generate(request):
        assert len(event.logprobs) in (0, len(event.token_ids))
        tokens.extend(event.token_ids)
        logprobs.extend(event.logprobs)
    return tokens, logprobs


async def alone(**changes: Any) -> list[tuple[list[int], list[TokenLogprobs]]]:
    async with running_node(random_model=LOOPING, l1_pages=300, **changes) as node:
        return [await told(node, request) for request in requests()]


async def test_every_shape_is_another_answer() -> None:
    async with running_node(random_model=LOOPING, l1_pages=300) as node:
        asked = [make_request(prompt, sampling={"max_tokens": NEW}) for prompt in PROMPTS]
        plain = [await told(node, request) for request in asked]
    shaped = await alone()
    for (old, _), (new, _) in zip(plain, shaped, strict=True):
        assert old != new and len(new) == NEW
    assert max(map(plain[0][0].count, plain[0][0])) > max(map(shaped[0][0].count, shaped[0][0]))
    assert 9 not in shaped[3][0] and 5 in shaped[3][0]


async def test_preemption_changes_no_token() -> None:
    want = await alone()
    async with running_node(
        MemoryPoolNode(), random_model=LOOPING, l1_pages=22, speculative_tokens=8
    ) as node:
        got = await asyncio.gather(*(told(node, request) for request in requests()))
        assert node._engine.batcher.preemptions > 0
    assert [tokens for tokens, _ in got] == [tokens for tokens, _ in want]
    assert_same_logprobs(got[2][1], want[2][1])


def assert_same_logprobs(got: list[TokenLogprobs], want: list[TokenLogprobs]) -> None:
    """Compare up to rounding: a batch adds up in another order than a single sequence."""
    assert len(got) == len(want)
    for one, other in zip(got, want, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert [t for t, _ in one.top] == [t for t, _ in other.top]


@pytest.mark.parametrize("done", [1, 5, 17])
async def test_another_node_goes_on_with_the_same_tokens(done: int) -> None:
    """A lost node's tokens come back as resumed tokens: counts begin from them."""
    want = await alone()
    async with running_node(random_model=LOOPING, l1_pages=300) as node:
        for request, (tokens, logprobs) in zip(requests(), want, strict=True):
            resumed = replace(
                request,
                token_ids=request.token_ids + tuple(tokens[:done]),
                resumed_tokens=done,
            )
            rest, told_rest = await told(node, resumed)
            assert rest == tokens[done:]
            assert_same_logprobs(told_rest, logprobs[done:])


async def test_guesses_are_for_plain_answers_only() -> None:
    shaped = [{"logprobs": 0}, {"logit_bias": ((5, 1.0),)}, {"frequency_penalty": 0.1}]
    async with running_node(random_model=LOOPING, l1_pages=300, speculative_tokens=8) as node:
        for shape in shaped:
            request = make_request(PROMPTS[0], sampling={"max_tokens": 100} | shape)
            await answer(node, request)
        assert node.speculation.guessed_tokens == 0
        plain = make_request(PROMPTS[0], sampling={"max_tokens": 100, "top_k": 5})
        await answer(node, plain)
        assert node.speculation.guessed_tokens > 0


async def test_logprobs_are_the_models_own_and_ask_for_nothing_else() -> None:
    """Oracle: the scores that a request for token probabilities gives, one position at a time."""
    shape: dict[str, Any] = {"max_tokens": 6, "logprobs": 2, "temperature": 1.3, "seed": 1}
    shape["logit_bias"] = ((5, 8.0),)
    async with running_node() as node:
        request = make_request(PROMPTS[0], sampling=shape)
        tokens, logprobs = await told(node, request)
        silent = make_request(PROMPTS[0], sampling=shape | {"logprobs": None})
        assert await told(node, silent) == (tokens, [])
        for place, one in enumerate(logprobs):
            before = (*PROMPTS[0], *tokens[:place])
            asked = (tokens[place], *(token for token, _ in one.top))
            (_, last) = await answer(
                node, make_request(before, sampling={"max_tokens": 1}, score_token_ids=asked)
            )
            got = [one.logprob, *(logprob for _, logprob in one.top)]
            assert got == pytest.approx(list(last.scores), abs=1e-4)
            (_, every) = await answer(
                node,
                make_request(before, sampling={"max_tokens": 1}, score_token_ids=tuple(range(128))),
            )
            best = torch.tensor(every.scores).topk(2).indices.tolist()
            assert [token for token, _ in one.top] == best
            assert math.fsum(map(math.exp, every.scores)) == pytest.approx(1.0, abs=1e-4)
    assert len(logprobs) == 6


async def test_the_end_waits_for_min_tokens() -> None:
    async with running_node(random_model=LOOPING, l1_pages=300) as node:
        greedy = make_request(PROMPTS[0], sampling={"max_tokens": 30})
        tokens, _ = await answer(node, greedy)
        end = tokens[4]
        first = tokens.index(end)
        for least, want in ((0, first), (first, first)):
            shape = {"max_tokens": 30, "stop_token_ids": (end,), "min_tokens": least}
            got, last = await answer(node, make_request(PROMPTS[0], sampling=shape))
            assert got == tokens[:want] and last.finish_reason is FinishReason.STOP
        shape = {"max_tokens": 30, "stop_token_ids": (end,), "min_tokens": first + 3}
        got, last = await answer(node, make_request(PROMPTS[0], sampling=shape))
        assert got[:first] == tokens[:first] and len(got) >= first + 3
        assert end not in got


async def test_a_bias_outside_the_vocabulary_is_refused_before_the_batch() -> None:
    async with running_node() as node:
        wrong = make_request(PROMPTS[0], sampling={"logit_bias": ((128, 1.0),)})
        good = make_request(PROMPTS[1])
        want, _ = await answer(node, good)
        with pytest.raises(UserError, match="token ids must be in"):
            await answer(node, wrong)
        assert (await answer(node, replace(good, request_id=wrong.request_id)))[0] == want


async def test_seeds_draw_the_same_beside_other_requests() -> None:
    shape = {"temperature": 1.0, "seed": 5, "top_k": 30, "min_p": 0.01, "presence_penalty": 1.0}
    async with running_node(random_model=LOOPING, l1_pages=300) as node:
        one = await answer(node, make_request(PROMPTS[0], sampling=shape))
        mixed = await asyncio.gather(
            answer(node, make_request(PROMPTS[0], sampling=shape)),
            *(answer(node, request) for request in requests()),
        )
    assert mixed[0][0] == one[0]
