"""Chances of tokens and embeddings are what transformers computes, however the prompt's KV came."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.fix_blend import DOCS, all_given_back, doc_request, known
from tests.fix_logits import CASES, Pair, close
from tests.fix_model import answer, make_request
from tests.fix_model import layerwise_node as running_node
from tests.fix_pool import GatedPoolNode, MemoryPoolNode
from tierkv.compute.config import LoadPolicy
from tierkv.compute.node import ComputeNode
from tierkv.kvcore.errors import RowLevelError, UserError
from tierkv.kvcore.request import FinishReason, GenerateRequest

LENGTHS = [1, 7, 8, 9, 40, 64, 65, 150]
ASKED = (3, 100, 127, 0, 3)


def prompt_of(length: int) -> list[int]:
    return random.Random(length).choices(range(128), k=length)


@dataclass(frozen=True)
class Reference:
    """A model on disk, and what transformers computes with it."""

    pair: Pair
    folder: Path

    @property
    def node(self) -> dict[str, object]:
        return {"random_model": None, "model_folder": str(self.folder)}

    def scores(self, ids: list[int]) -> torch.Tensor:
        return torch.log_softmax(self.pair.reference(ids)[-1], dim=-1)[list(ASKED)]

    def embedding(self, ids: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            hidden = self.pair.theirs.model(torch.tensor([ids])).last_hidden_state[0, -1].float()
        return hidden / hidden.norm()


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def reference(request, tmp_path_factory) -> Iterator[Reference]:
    folder = tmp_path_factory.mktemp("model")
    yield Reference(Pair(CASES[request.param], folder), folder)


def scoring(ids: list[int], **changes: object) -> GenerateRequest:
    return make_request(ids, score_token_ids=ASKED, **changes)


def embedding(ids: list[int], **changes: object) -> GenerateRequest:
    return make_request(ids, embed=True, **changes)


async def check(node: ComputeNode, reference: Reference, ids: list[int], **changes: object) -> int:
    """Compare both readouts of a prompt with the reference; returns the tokens that were hit."""
    tokens, scored = await answer(node, scoring(ids, **changes))
    close(torch.tensor(scored.scores), reference.scores(ids))
    more, embedded = await answer(node, embedding(ids, **changes))
    close(torch.tensor(embedded.embedding), reference.embedding(ids))
    for last in (scored, embedded):
        assert last.finish_reason is FinishReason.STOP and last.usage is not None
        assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (len(ids), 0)
    assert tokens == more == [] and scored.embedding == embedded.scores == ()
    return scored.usage.hit_tokens.total


async def test_readouts_equal_transformers_with_and_without_cache(reference: Reference) -> None:
    async with running_node(**reference.node) as node:
        for length in LENGTHS:
            ids = prompt_of(length)
            for use_cache in (False, True):
                assert await check(node, reference, ids, use_cache=use_cache) == 0
            # The last token is computed even where every block of the prompt is there.
            assert await check(node, reference, ids) == length - 1
        await all_given_back(node)


@pytest.mark.parametrize("host", ["here", "there"])
async def test_readouts_of_a_prompt_in_the_pool(reference: Reference, host: str) -> None:
    pool = MemoryPoolNode(host=host)
    prompts = [prompt_of(length) for length in LENGTHS]
    # A quarter of its pages may be in flight; blocks beyond that would be given up.
    async with running_node(pool, **reference.node, l1_pages=257) as node:
        for ids in prompts:
            await answer(node, embedding(ids))
            assert await node.flush()
        assert len(pool.sealed_keys) == sum(len(ids) // 8 for ids in prompts)
    for ids in prompts:
        async with running_node(pool, **reference.node) as node:
            assert await check(node, reference, ids) == (len(ids) - 1) // 8 * 8


@pytest.mark.parametrize("ask", [scoring, embedding])
async def test_a_readout_is_computed_behind_its_load(reference: Reference, ask) -> None:
    pool, ids = GatedPoolNode(), prompt_of(61)
    async with running_node(pool, **reference.node) as node:
        want = (await answer(node, ask(ids)))[1]
        assert await node.flush()
        await node.drop_cache()
        asked = asyncio.create_task(answer(node, ask(ids)))
        async with asyncio.timeout(20):
            while not any(load.chunk for load in node._engine._loads.behind.values()):
                await asyncio.sleep(0.001)
        pool.gate.set()
        _, last = await asked
        assert last.usage.hit_tokens.l2 == 56
        close(torch.tensor(last.scores), torch.tensor(want.scores))
        close(torch.tensor(last.embedding), torch.tensor(want.embedding))


async def test_a_cancelled_readout_reads_nothing_out() -> None:
    pool, ids = GatedPoolNode(), prompt_of(61)
    async with running_node(pool) as node:
        await answer(node, make_request(ids))
        assert await node.flush()
        await node.drop_cache()
        request = scoring(ids)
        asked = asyncio.create_task(answer(node, request))
        async with asyncio.timeout(20):
            while not node._engine._loads.behind:
                await asyncio.sleep(0.001)
        assert await node.cancel(request.request_id)
        _, last = await asked
        assert last.finish_reason is FinishReason.CANCELLED and last.scores == ()
        pool.gate.set()
        await all_given_back(node)


async def test_blending_everything_again_reads_out_the_exact_numbers() -> None:
    async with running_node(MemoryPoolNode()) as node:
        await known(node, *DOCS[:3])
        for form in ({"score_token_ids": ASKED}, {"embed": True}):
            asked = doc_request([DOCS[2], DOCS[0], DOCS[1]], ratio=1.0, **form)
            _, blended = await answer(node, asked)
            assert blended.usage.recomputed_tokens > 0 and blended.usage.completion_tokens == 0
            _, plain = await answer(node, make_request(asked.token_ids, use_cache=False, **form))
            close(torch.tensor(blended.scores), torch.tensor(plain.scores))
            close(torch.tensor(blended.embedding), torch.tensor(plain.embedding))


@pytest.mark.parametrize("form", [{"score_token_ids": ASKED}, {"embed": True}])
async def test_chunks_of_readouts_are_computed_in_isolation_too(form) -> None:
    async with running_node(MemoryPoolNode()) as node:
        _, last = await answer(node, doc_request(DOCS[:3], **form))
        assert last.usage.selector is None
        assert await node.flush()
        _, last = await answer(node, doc_request([DOCS[2], DOCS[0], DOCS[1]], **form))
        assert last.usage.blended_tokens > 60 and last.finish_reason is FinishReason.STOP
        assert bool(last.scores) != bool(last.embedding)


async def test_readouts_beside_answers_change_neither() -> None:
    """Few pages, so that some of them lose theirs and begin again."""
    prompts = [prompt_of(length) for length in (30, 31, 33, 38)]
    async with running_node() as node:
        want = [(await answer(node, make_request(ids, sampling={"max_tokens": 41})))[0]
                for ids in prompts]  # fmt: skip
        numbers = [(await answer(node, scoring(ids, use_cache=False)))[1] for ids in prompts]
    async with running_node(l1_pages=22, load_policy=LoadPolicy.NEVER) as node:
        asked = [make_request(ids, sampling={"max_tokens": 41}, priority=i)
                 for i, ids in enumerate(prompts)]  # fmt: skip
        asked += [scoring(ids, use_cache=False, priority=9) for ids in prompts]
        asked += [embedding(ids, priority=8) for ids in prompts]
        got = await asyncio.gather(*(answer(node, request) for request in asked))
        assert node._engine.batcher.preemptions > 0
    assert [tokens for tokens, _ in got[:4]] == want
    for (_, last), alone in zip(got[4:8], numbers, strict=True):
        close(torch.tensor(last.scores), torch.tensor(alone.scores))
    assert all(len(last.embedding) == 64 for _, last in got[8:])


async def test_weights_that_are_no_numbers_fail_the_readout() -> None:
    async with running_node() as node:
        norm = node._engine._model.weights.final_norm
        good = norm.clone()
        norm.fill_(float("nan"))
        for ask in (scoring, embedding):
            with pytest.raises(RowLevelError, match="not finite"):
                await answer(node, ask(prompt_of(9), use_cache=False))
        norm.copy_(good)
        assert len((await answer(node, scoring(prompt_of(9))))[1].scores) == len(ASKED)


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        ({"score_token_ids": (128,)}, "token ids"),
        ({"score_token_ids": (-1,)}, "token ids"),
        ({"score_token_ids": (1,), "embed": True}, "one of"),
    ],
)
async def test_what_cannot_be_read_out_is_refused(form, reason) -> None:
    async with running_node() as node:
        with pytest.raises(UserError, match=reason):
            await answer(node, make_request([1, 2], **form))


async def test_a_prompt_that_fills_the_context_can_be_read_out() -> None:
    async with running_node(l1_pages=9) as node:
        ids = prompt_of(64)
        assert node.model.context_tokens == 64
        _, last = await answer(node, scoring(ids))
        assert len(last.scores) == len(ASKED)
