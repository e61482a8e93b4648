"""KV that passed through a codec: exact where it says so, named where not, never mixed up."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests.fix_model import answer, make_request, running_node, write_calibration  # noqa: E402
from tests.fix_pool import CorruptingPoolNode, MemoryPoolNode  # noqa: E402
from tierkv.compute.codec.entropy import LEVELS, CodecLevel, coarsest_of  # noqa: E402
from tierkv.compute.model.pages import L1Pages  # noqa: E402
from tierkv.kvcore.block import namespace_key  # noqa: E402
from tierkv.kvcore.ids import NamespaceKey  # noqa: E402
from tierkv.kvcore.layout import BlockLayout, KvCodec, KvDtype  # noqa: E402

LOSSY = [codec for codec in KvCodec if codec.is_lossy]
FIXED = [codec for codec in KvCodec if codec.has_fixed_size]
PROMPT = torch.randint(0, 128, (61,), generator=torch.Generator().manual_seed(5)).tolist()


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Every node here has tables of the tiny model and time for the fine level."""
    file = write_calibration(tmp_path_factory.mktemp("tables"))
    return {"kv_calibration": file, "ttft_budget_s": 100.0}


def name(node) -> NamespaceKey:
    """Name a namespace as the meta server does."""
    return namespace_key(
        b"s" * 32,
        tenant="default",
        model_revision=node.model.revision,
        layout_fingerprint=node.model.layout.fingerprint(),
    )


async def from_pool(node, prompt=PROMPT, **changes):
    """Answer with nothing in L1."""
    await node.flush()
    await node.drop_cache()
    return await answer(node, make_request(prompt, namespace_key=name(node), **changes))


@pytest.mark.parametrize("codec", list(KvCodec))
async def test_loaded_kv_answers_alike_again_and_again(codec, tables) -> None:
    pool = MemoryPoolNode()
    async with running_node(pool, kv_codec=codec, **tables) as node:
        want, off = await from_pool(node, use_cache=False)
        first, cold = await from_pool(node)
        assert first == want  # Nothing was loaded: L1 is never encoded.
        loaded, warm = await from_pool(node)
        assert warm.usage.hit_tokens.l2 == 60  # Its answer filled the prompt's last block.
        assert [(await from_pool(node))[0] for _ in range(3)] == [loaded] * 3
        if not codec.is_lossy:
            assert loaded == want
        assert node.report().cache_errors == ()
        stored = node.model.layout.stored_bytes
        assert node.report().transfer_bytes_out % (stored if codec in FIXED else 64) == 0
    assert off.usage.kv_codec is KvCodec.NONE
    assert cold.usage.kv_codec is warm.usage.kv_codec is codec
    sizes = {len(part) for key in pool.sealed_keys for part in pool.ranges(key)}
    largest = node.model.layout.stored_layer_bytes
    assert sizes == {largest} if codec in FIXED else max(sizes) <= largest


@pytest.mark.parametrize("codec", LOSSY)
async def test_a_second_node_reads_what_the_first_encoded(codec, tables) -> None:
    pool = MemoryPoolNode(host="there")
    async with (
        running_node(pool, kv_codec=codec, **tables) as one,
        running_node(pool, kv_codec=codec, **tables, host="other") as two,
    ):
        whole = PROMPT[:57]  # Of an unfinished block each would have encoded its own.
        await from_pool(one, whole)
        mine, _ = await from_pool(one, whole)
        theirs, last = await from_pool(two, whole)
        assert last.usage.hit_tokens.l3 == 56 and theirs == mine


async def test_nodes_with_different_codecs_share_no_block(tables) -> None:
    pool = MemoryPoolNode()
    seen: set[NamespaceKey] = set()
    for codec in (*KvCodec, *KvCodec):
        before = len(pool.sealed_keys)
        async with running_node(pool, kv_codec=codec, **tables) as node:
            _, last = await from_pool(node)
            assert await node.flush()
            hits = last.usage.hit_tokens.total
            assert hits == (56 if name(node) in seen else 0), codec
            if not hits:
                # Of 61 tokens and 12 answered ones; all but the first at two levels.
                blocks = 17 if codec is KvCodec.ADAPTIVE else 9
                assert len(pool.sealed_keys) == before + blocks
            seen.add(name(node))
            assert node.report().cache_errors == ()
    assert len(seen) == len(KvCodec)


def may_read(reader: KvCodec, writer: KvCodec) -> bool:
    """Frames say how coarse they are: finer ones than asked for do no harm."""
    if reader.has_fixed_size or writer.has_fixed_size:
        return reader is writer
    return coarsest_of(reader) >= LEVELS.get(writer, CodecLevel.FINE)


@pytest.mark.parametrize("reader", list(KvCodec))
@pytest.mark.parametrize("writer", list(KvCodec))
async def test_even_under_one_name_a_foreign_block_is_a_miss(writer, reader, tables) -> None:
    """A namespace key that leaves the codec out is a bug; it must still never give wrong tokens."""
    pool = MemoryPoolNode()
    async with running_node(pool, kv_codec=writer, **tables) as first:
        want, _ = await answer(first, make_request(PROMPT, use_cache=False))
        await answer(first, make_request(PROMPT))
        assert await first.flush()
    async with running_node(pool, kv_codec=reader, **tables) as second:
        got, last = await answer(second, make_request(PROMPT))
    if may_read(reader, writer):
        assert last.usage.hit_tokens.l2 == 56
    elif reader.has_fixed_size or writer.has_fixed_size:
        assert last.usage.hit_tokens.total == 0 and got == want
    else:
        assert last.usage.hit_tokens.total == 8  # The first block is always a finest one.


@pytest.mark.parametrize("codec", LOSSY)
async def test_a_corrupt_encoded_block_is_recomputed(codec, tables) -> None:
    pool = CorruptingPoolNode(4 if codec is KvCodec.ADAPTIVE else 3, 1)  # Of the third block.
    async with running_node(pool, kv_codec=codec, **tables) as node:
        want, _ = await from_pool(node)
        got, last = await from_pool(node)
        assert last.usage.hit_tokens.l2 == 16
        assert dict(node.report().cache_errors)["checksum_mismatch"] >= 1
        assert len(got) == len(want) and (await from_pool(node))[0] == got


@pytest.mark.parametrize("codec", FIXED)
def test_only_good_ranges_reach_their_pages(codec) -> None:
    layout = BlockLayout(2, 2, 4, KvDtype.FLOAT32, 8, codec)
    pages = L1Pages(layout, 5, device=torch.device("cpu"))
    pages.kv[:, 1:3] = torch.randn((2, 2, 2, 8, 2, 4), generator=torch.Generator().manual_seed(0))
    ranges = pages.read_ranges(1, [1, 2])
    assert {len(one) for one in ranges} == {layout.stored_layer_bytes}
    window = pages.window(1, [4, 3])
    for target, source in zip(window.ranges, ranges, strict=True):
        target[:] = source
    window.commit(1)
    if codec is KvCodec.NONE:
        assert not window.is_staged and torch.equal(pages.kv[1, [4, 3]], pages.kv[1, 1:3])
        return
    assert window.is_staged and not pages.kv[1, 3].any() and not pages.kv[0, 4].any()
    assert (pages.kv[1, 4] - pages.kv[1, 1]).abs().max() < 0.3
    window.commit(2)
    assert (pages.kv[1, 3] - pages.kv[1, 2]).abs().max() < 0.3
