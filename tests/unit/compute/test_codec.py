"""Codecs on small cases whose bytes and errors can be worked out by hand."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from tierkv.compute.codec.layer_codec import TORCH_DTYPES, make_codec  # noqa: E402
from tierkv.kvcore.layout import BlockLayout, KvCodec, KvDtype  # noqa: E402

FIXED = [codec for codec in KvCodec if codec.has_fixed_size]
LOSSY = [codec for codec in FIXED if codec.is_lossy]


def layout(codec: KvCodec, *, tokens=4, heads=2, dim=3, dtype=KvDtype.FLOAT32) -> BlockLayout:
    return BlockLayout(1, heads, dim, dtype, tokens, codec)


def kv(shape: BlockLayout, blocks: int = 3, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    size = (blocks, 2, shape.block_tokens, shape.kv_heads, shape.head_dim)
    return torch.randn(size, generator=generator).to(TORCH_DTYPES[shape.dtype])


def test_sizes_are_known_before_anything_is_encoded() -> None:
    big = {
        codec: layout(codec, tokens=64, heads=8, dim=128, dtype=KvDtype.BFLOAT16) for codec in FIXED
    }
    assert [big[codec].stored_layer_bytes for codec in FIXED] == [
        262_144,  # 2 * 64 * 8 * 128 numbers of two bytes
        131_072 + 64,  # one byte each, 16 scales
        131_072 + 4 * 8 * (128 + 64),  # one byte each, two bfloat16 per channel and per token
        65_536 + 4 * 8 * (128 + 64),
    ]
    assert {one.payload_bytes for one in big.values()} == {262_144}


@pytest.mark.parametrize("dtype", list(KvDtype))
def test_none_keeps_every_bit(dtype) -> None:
    shape = layout(KvCodec.NONE, dtype=dtype)
    size = (2, 2, shape.block_tokens, shape.kv_heads, shape.head_dim)
    raw = torch.randint(0, 256, (2, shape.stored_layer_bytes), dtype=torch.uint8)
    codec = make_codec(shape)
    assert codec.decode(raw).shape == size  # NaN and all
    assert torch.equal(codec.encode(codec.decode(raw)), raw)


@pytest.mark.parametrize("codec", LOSSY)
def test_zeros_stay_zeros_and_constants_stay(codec) -> None:
    shape = layout(codec)
    lossy = make_codec(shape)
    for number in (0.0, 1.0, -2.5):  # Exact in bfloat16, and as the largest of its head in e4m3.
        same = torch.full_like(kv(shape), number)
        assert torch.equal(lossy.decode(lossy.encode(same)), same)


@pytest.mark.parametrize(("codec", "levels"), [(KvCodec.INT8, 255), (KvCodec.INT4, 15)])
def test_integer_grids_are_exact(codec, levels) -> None:
    """Numbers on a grid that bfloat16 can name come back as they were; so do extreme ones."""
    shape = layout(codec, tokens=levels + 1, heads=1, dim=levels + 1)
    grid = torch.arange(levels + 1, dtype=torch.float32) * 0.5 - 3
    block = torch.stack([grid[:, None, None].expand(-1, 1, levels + 1),
                         grid[None, None, :].expand(levels + 1, 1, -1)])  # fmt: skip
    lossy = make_codec(shape)
    assert torch.equal(lossy.decode(lossy.encode(block[None]))[0], block)


def test_int4_puts_a_key_and_a_value_into_one_byte() -> None:
    shape = layout(KvCodec.INT4, tokens=2, heads=1, dim=2)
    keys = torch.tensor([[[0.0, 15.0]], [[15.0, 0.0]]])
    values = torch.tensor([[[0.0, 15.0]], [[3.0, 18.0]]])
    stored = make_codec(shape).encode(torch.stack([keys, values])[None])[0]
    assert stored[-4:].tolist() == [0x00, 0xFF, 0x0F, 0xF0]


def test_fp8_scales_each_head_alone() -> None:
    shape = layout(KvCodec.FP8, tokens=1, heads=2, dim=2)
    block = torch.tensor([[[[448.0, 1.0], [4.48, 0.01]]], [[[0.0, 0.0], [-7.0, 3.5]]]])[None]
    stored = make_codec(shape).encode(block)[0]
    scales = stored[:16].clone().view(torch.float32)
    assert torch.allclose(scales, torch.tensor([1.0, 0.01, 1.0, 7.0 / 448]))
    assert torch.allclose(make_codec(shape).decode(stored[None]), block)


def test_fp8_reads_every_code_as_torch_does() -> None:
    shape = layout(KvCodec.FP8, tokens=16, heads=1, dim=8)
    codes = torch.arange(256, dtype=torch.uint8)
    stored = torch.cat([torch.ones(2).view(torch.uint8), codes])
    want = codes.view(torch.float8_e4m3fn).float()
    got = make_codec(shape).decode(stored[None]).flatten()
    assert torch.equal(got[want.isfinite()], want[want.isfinite()])  # NaN is never written.
