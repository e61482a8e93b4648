"""Prompts made of documents, for tests of blending in a node."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tests.fix_model import answer, make_request
from tierkv.compute.node import ComputeNode
from tierkv.kvcore.block import block_keys
from tierkv.kvcore.ids import BlockKey
from tierkv.kvcore.request import Blend, BlendSelector, GenerateEvent, GenerateRequest

_RNG = random.Random(11)


def some_tokens(count: int) -> tuple[int, ...]:
    """Return random tokens of the tiny model's vocabulary, the same in every run."""
    return tuple(_RNG.choices(range(128), k=count))


HEAD = some_tokens(13)
DOCS = [some_tokens(count) for count in (40, 33, 29, 8, 3)]
QUESTION = some_tokens(9)


def doc_request(
    docs: Sequence[Sequence[int]],
    *,
    head: Sequence[int] = HEAD,
    question: Sequence[int] = QUESTION,
    ratio: float = 0.2,
    selector: BlendSelector = BlendSelector.HKVD,
    gradual: bool = False,
    **changes: Any,
) -> GenerateRequest:
    """Return a request whose documents may be blended; a token stands between two of them."""
    ids, chunks = list(head), []
    for doc in docs:
        chunks.append((len(ids), len(ids) + len(doc)))
        ids += [*doc, 1]
    blend = Blend(tuple(chunks), ratio, selector, gradual)
    return make_request([*ids, *question], **({"blend": blend} | changes))


async def exact(node: ComputeNode, request: GenerateRequest) -> list[int]:
    """Answer a request without any reuse."""
    return (await answer(node, replace(request, use_cache=False, blend=None)))[0]


async def known(node: ComputeNode, *docs: Sequence[int], **changes: Any) -> None:
    """Have documents computed in isolation and published, and none of them right after the head."""
    await answer(node, doc_request([(2, 2, 2), *docs], **changes))
    assert await node.flush()
    await node.drop_cache()


async def all_given_back(node: ComputeNode) -> None:
    """Wait until nobody holds a page; publishers and loaders give theirs back a little later."""
    async with asyncio.timeout(20):
        while node._engine.pool.used:
            await asyncio.sleep(0.001)


def exact_keys(request: GenerateRequest, tokens: Sequence[int]) -> list[BlockKey]:
    """Name every full block of a prompt and its answer, as exact KV is named."""
    ids = [*request.token_ids, *tokens]
    return block_keys(request.namespace_key, ids, block_tokens=8)


def hits(event: GenerateEvent) -> dict[str, int]:
    """Return what was not computed, by tier, without zeros."""
    assert event.usage is not None
    found = event.usage.hit_tokens
    tiers = {"l1": found.l1, "l2": found.l2, "l3": found.l3, "l4": found.l4}
    return {tier: tokens for tier, tokens in tiers.items() if tokens}
