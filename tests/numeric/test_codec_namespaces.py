"""A codec per namespace on one node: never mixed, none stays exact, what is broken is a miss."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests.fix_model import (  # noqa: E402
    answer,
    make_request,
    running_node,
    tiny_config,
    write_calibration,
)
from tests.fix_pool import MemoryPoolNode  # noqa: E402
from tierkv.compute.codec.entropy import CodecLevel  # noqa: E402
from tierkv.compute.config import RandomModelSpec  # noqa: E402
from tierkv.compute.node import ComputeNode  # noqa: E402
from tierkv.dmp.pool_node import RangeRead  # noqa: E402
from tierkv.kvcore.block import block_keys, coarse_key  # noqa: E402
from tierkv.kvcore.errors import ConfigError  # noqa: E402
from tierkv.kvcore.ids import NamespaceKey  # noqa: E402
from tierkv.kvcore.layout import BlockLayout, KvCodec  # noqa: E402
from tierkv.kvcore.request import GenerateEvent  # noqa: E402

PROMPT = torch.randint(0, 128, (61,), generator=torch.Generator().manual_seed(5)).tolist()
OTHER = torch.randint(0, 128, (61,), generator=torch.Generator().manual_seed(6)).tolist()


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_calibration(tmp_path_factory.mktemp("tables"))


def key_of(codec: KvCodec) -> NamespaceKey:
    return NamespaceKey(codec.value.encode().ljust(32, b"."))


async def ask(
    node: ComputeNode, codec: KvCodec, tokens=PROMPT, **changes: Any
) -> tuple[list[int], GenerateEvent]:
    """Ask in the namespace of a codec."""
    request = make_request(tokens, namespace_key=key_of(codec), kv_codec=codec, **changes)
    return await answer(node, request)


async def fresh(node: ComputeNode) -> None:
    """Publish everything and empty L1."""
    assert await node.flush()
    await node.drop_cache()


async def test_namespaces_of_every_codec_share_a_node(tables) -> None:
    pool = MemoryPoolNode()
    async with running_node(pool, kv_calibration=tables, ttft_budget_s=100.0, l1_pages=200) as node:
        want = [(await ask(node, KvCodec.NONE, p, use_cache=False))[0] for p in (PROMPT, OTHER)]
        cold = await asyncio.gather(*[ask(node, c, p) for c in KvCodec for p in (PROMPT, OTHER)])
        assert [tokens for tokens, _ in cold] == want * len(KvCodec)
        await fresh(node)
        warm = await asyncio.gather(*[ask(node, c, p) for c in KvCodec for p in (PROMPT, OTHER)])
        assert [tokens for tokens, _ in warm[:2]] == want  # Codec none comes first, and is exact.
        for (_, last), codec in zip(warm[::2], KvCodec, strict=True):
            assert last.usage is not None
            assert last.usage.hit_tokens.l2 == 60 and last.usage.kv_codec is codec
        assert node.report().cache_errors == ()
        layout = node.model.layout
    for codec in KvCodec:
        for prompt in (PROMPT, OTHER):
            check_ranges(pool, layout, codec, prompt)


def check_ranges(pool: MemoryPoolNode, layout: BlockLayout, codec: KvCodec, prompt: Any) -> None:
    """Each block is what its namespace's codec makes."""
    keys = block_keys(key_of(codec), prompt, block_tokens=8)
    for index, key in enumerate(keys):
        ranges = pool.ranges(key)
        if codec.has_fixed_size:
            assert {len(r) for r in ranges} == {replace(layout, codec=codec).stored_layer_bytes}
            continue
        levels = {
            KvCodec.ENTROPY_MEDIUM: CodecLevel.MEDIUM,
            KvCodec.ENTROPY_COARSE: CodecLevel.COARSE,
        }
        want = CodecLevel.FINE if index == 0 else levels.get(codec, CodecLevel.FINE)
        assert {bytes(r[:2]) for r in ranges} == {b"KQ"} and {r[3] for r in ranges} == {want}
        if codec is KvCodec.ADAPTIVE and index:
            coarse = pool.ranges(coarse_key(key))
            assert {r[3] for r in coarse} == {CodecLevel.COARSE} and len(coarse[0]) <= len(
                ranges[0]
            )


async def test_one_codec_answers_alike_whoever_else_is_there(tables) -> None:
    async with running_node(MemoryPoolNode(), kv_calibration=tables) as node:
        await ask(node, KvCodec.INT4)
        await fresh(node)
        alone, _ = await ask(node, KvCodec.INT4)
        for codec in (KvCodec.NONE, KvCodec.ENTROPY_COARSE, KvCodec.FP8):
            await ask(node, codec)
        await fresh(node)
        assert (await ask(node, KvCodec.INT4))[0] == alone


@pytest.mark.parametrize("codec", [c for c in KvCodec if not c.has_fixed_size])
async def test_without_tables_nothing_is_stored_and_answers_are_exact(
    codec, caplog, monkeypatch
) -> None:
    pool = MemoryPoolNode()
    with caplog.at_level(logging.WARNING):
        async with running_node(pool) as node:
            monkeypatch.setattr(node._engine.tiers.finder, "find", lambda *_, **__: pytest.fail())
            want, _ = await ask(node, codec, use_cache=False)
            for _ in range(3):
                got, last = await ask(node, codec)
                assert got == want and last.usage is not None
                assert last.usage.hit_tokens.l2 == 0 and last.usage.kv_codec is KvCodec.NONE
                await fresh(node)
            assert dict(node.report().cache_errors) == {"codec_unavailable": 1}
    assert pool.sealed == {} and "tierkv calibrate" in caplog.text


async def test_blocks_of_other_tables_are_misses(tables, tmp_path: Path) -> None:
    pool = MemoryPoolNode()
    async with running_node(pool, kv_calibration=tables) as node:
        want, _ = await ask(node, KvCodec.ENTROPY_FINE)
        await fresh(node)
    others = write_calibration(tmp_path, seed=2)
    async with running_node(pool, kv_calibration=others) as node:
        got, last = await ask(node, KvCodec.ENTROPY_FINE)
        assert got == want and last.usage is not None and last.usage.hit_tokens.total == 0
        assert dict(node.report().cache_errors)["layout_mismatch"] >= 1


class ForgingPoolNode(MemoryPoolNode):
    """Gives bytes that nobody encoded for one layer of the third block, with a good checksum."""

    def __init__(self, forged: bytes) -> None:
        super().__init__()
        self._forged = forged

    def read_ranges(self, reads: list[RangeRead]) -> None:  # type: ignore[override]
        super().read_ranges(reads)
        for read in reads:
            if self.number_of(read.location) == 3 and read.index == 1:
                size = len(read.destination)
                read.destination[:] = (self._forged or bytes(read.destination[:16])).ljust(
                    size, b"\xee"
                )[:size]


@pytest.mark.parametrize("forged", [b"", b"KQ", b"\x28\xb5\x2f\xfd" * 8])
async def test_a_forged_frame_is_recomputed_and_counted(forged, tables) -> None:
    pool = ForgingPoolNode(forged)
    async with running_node(pool, kv_calibration=tables) as node:
        await ask(node, KvCodec.ENTROPY_MEDIUM)
        await fresh(node)
        got, last = await ask(node, KvCodec.ENTROPY_MEDIUM)
        assert last.usage is not None and last.usage.hit_tokens.l2 == 16 and len(got) == 12
        errors = dict(node.report().cache_errors)
        assert errors.get("layout_mismatch", 0) + errors.get("checksum_mismatch", 0) >= 1


class ShortPoolNode(MemoryPoolNode):
    """Says that its slots have lengths that no encoder makes."""

    def lookup(self, keys):  # type: ignore[no-untyped-def]
        found = super().lookup(keys)
        return [at and replace(at, length=at.length + 1) for at in found]


async def test_a_lying_length_is_a_miss(tables) -> None:
    async with running_node(ShortPoolNode(), kv_calibration=tables) as node:
        want, _ = await ask(node, KvCodec.ENTROPY_FINE)
        await fresh(node)
        got, last = await ask(node, KvCodec.ENTROPY_FINE)
        assert got == want and last.usage is not None and last.usage.hit_tokens.total == 0
        assert dict(node.report().cache_errors)["layout_mismatch"] >= 1


async def test_adaptive_loads_coarse_when_time_is_short_and_fine_when_not(tables) -> None:
    pool = MemoryPoolNode()
    read: list[set[int]] = []
    for budget_s in (100.0, 1e-9):
        async with running_node(pool, kv_calibration=tables, ttft_budget_s=budget_s) as node:
            await ask(node, KvCodec.ADAPTIVE)
            await fresh(node)
            levels: set[int] = set()
            plain = pool.read_ranges

            def spying(reads, plain=plain, levels=levels):  # type: ignore[no-untyped-def]
                plain(reads)
                levels.update(bytes(one.destination)[3] for one in reads)

            pool.read_ranges = spying  # type: ignore[method-assign]
            _, last = await ask(node, KvCodec.ADAPTIVE)
            pool.read_ranges = plain  # type: ignore[method-assign]
            assert last.usage is not None and last.usage.hit_tokens.l2 == 60
            read.append(levels)
    assert read == [
        {CodecLevel.FINE},
        {CodecLevel.FINE, CodecLevel.COARSE},
    ]  # The first block is always fine.


async def test_adaptive_goes_on_with_coarse_blocks_where_fine_ones_are_gone(tables) -> None:
    pool = MemoryPoolNode()
    async with running_node(pool, kv_calibration=tables, ttft_budget_s=100.0, l1_pages=200) as node:
        await ask(node, KvCodec.ADAPTIVE)
        await fresh(node)
        keys = block_keys(key_of(KvCodec.ADAPTIVE), PROMPT, block_tokens=8)
        for key in keys[3:]:
            pool.forget(key)
        _, last = await ask(node, KvCodec.ADAPTIVE)
        assert last.usage is not None and last.usage.hit_tokens.l2 == 60


def test_the_nodes_own_codec_without_tables_is_refused_at_start(tmp_path: Path) -> None:
    async def start(**changes: Any) -> None:
        async with running_node(kv_codec=KvCodec.ENTROPY_FINE, **changes):
            raise AssertionError("it started")

    with pytest.raises(ConfigError, match="no tables") as refused:
        asyncio.run(start())
    assert "tierkv calibrate" in refused.value.hint
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(b"\xff" * 100)
    with pytest.raises(ConfigError, match="can't be read"):
        asyncio.run(start(kv_calibration=str(broken)))


def test_tables_of_another_model_are_refused(tables) -> None:
    async def start() -> None:
        async with running_node(kv_calibration=tables, block_tokens=8, dtype="bfloat16"):
            pass  # The dtype does not matter.
        other = RandomModelSpec(tiny_config(), seed=4)
        async with running_node(kv_calibration=tables, random_model=other):
            raise AssertionError("it started")

    with pytest.raises(ConfigError, match="another model"):
        asyncio.run(start())


@pytest.mark.parametrize("budget_s", [0.0, 100.0])
async def test_coarse_blocks_behind_one_that_is_gone_are_not_taken_for_it(tables, budget_s) -> None:
    pool = MemoryPoolNode()
    async with running_node(pool, kv_calibration=tables, ttft_budget_s=budget_s) as node:
        want, _ = await ask(node, KvCodec.ADAPTIVE)
        await fresh(node)
        pool.forget(block_keys(key_of(KvCodec.ADAPTIVE), PROMPT, block_tokens=8)[0])
        got, last = await ask(node, KvCodec.ADAPTIVE)
        assert last.usage is not None and last.usage.hit_tokens.total == 0
        assert got == want
