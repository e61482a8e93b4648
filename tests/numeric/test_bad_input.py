"""Requests and blocks that do not fit a node: refused or missed, never computed with."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.fix_model import answer, make_request, running_node
from tests.memory_store import MemoryBlockStore
from tierkv.kvcore.block import ROOT_PARENT, BlockSpec, RangeShape, block_keys
from tierkv.kvcore.errors import TransportError, UserError
from tierkv.kvcore.layout import KvDtype
from tierkv.kvcore.request import Blend

PROMPT = [i * 3 % 128 for i in range(40)]


async def test_a_prompt_without_tokens_is_refused() -> None:
    async with running_node() as node:
        with pytest.raises(UserError, match="no tokens"):
            await answer(node, make_request([]))
        with pytest.raises(UserError, match="at least one prompt token"):
            await answer(node, make_request(PROMPT, resumed_tokens=len(PROMPT)))


async def test_a_chunk_behind_the_prompt_is_refused() -> None:
    async with running_node() as node:
        with pytest.raises(UserError, match="chunk ends at 41"):
            await answer(node, make_request(PROMPT, blend=Blend(chunks=((8, 41),))))


async def test_a_request_for_another_layout_or_other_weights_goes_elsewhere() -> None:
    async with running_node(dtype="bfloat16") as node:
        model = node.model
        fine, _ = await answer(node, make_request(PROMPT, prepared_for=model.identity))
        assert fine == (await answer(node, make_request(PROMPT)))[0]
        half = replace(model, layout=replace(model.layout, dtype=KvDtype.FLOAT16))
        assert half.layout.stored_bytes == model.layout.stored_bytes
        for other in (half, replace(model, revision="00")):
            with pytest.raises(TransportError, match="other weights or another KV layout"):
                await answer(node, make_request(PROMPT, prepared_for=other.identity))


async def test_blocks_of_another_size_in_an_archive_are_not_loaded() -> None:
    store = MemoryBlockStore(capacity_bytes=1 << 20)
    request = make_request(PROMPT)
    async with running_node() as node:
        want, _ = await answer(node, request)
        layout = node.model.layout
    keys = block_keys(request.namespace_key, PROMPT, block_tokens=layout.block_tokens)
    for key in keys:
        half = BlockSpec(
            key, ROOT_PARENT, 8, ranges=RangeShape(layout.layer_bytes // 2, layout.layers)
        )
        store.put(half, memoryview(bytes(half.ranges.payload_bytes)))
    async with running_node(archive=store) as node:
        got, last = await answer(node, request)
        assert got == want and last.usage.hit_tokens.total == 0
        assert dict(node.report().cache_errors)["layout_mismatch"] >= 1
