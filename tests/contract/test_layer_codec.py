"""The LayerCodec contract (compute/codec/layer_codec.py) on every codec of fixed size, by sentence.

Frames of the entropy codec have sizes and errors of their own (tests/unit/compute and
tests/property, test_entropy_codec.py).
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from tierkv.compute.codec.layer_codec import TORCH_DTYPES, make_codec  # noqa: E402
from tierkv.kvcore.layout import BlockLayout, KvCodec, KvDtype  # noqa: E402

FIXED = [codec for codec in KvCodec if codec.has_fixed_size]
LAYOUTS = st.builds(
    BlockLayout,
    layers=st.just(1),
    kv_heads=st.integers(1, 3),
    head_dim=st.integers(1, 9),
    dtype=st.sampled_from(KvDtype),
    block_tokens=st.integers(1, 9),
    codec=st.sampled_from(FIXED),
)


def layout(codec: KvCodec, *, tokens=4, heads=2, dim=3, dtype=KvDtype.FLOAT32) -> BlockLayout:
    return BlockLayout(1, heads, dim, dtype, tokens, codec)


def kv(shape: BlockLayout, blocks: int = 3, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    size = (blocks, 2, shape.block_tokens, shape.kv_heads, shape.head_dim)
    return torch.randn(size, generator=generator).to(TORCH_DTYPES[shape.dtype])


@pytest.mark.parametrize("codec", FIXED)
@pytest.mark.parametrize("dtype", list(KvDtype))
@pytest.mark.parametrize(("tokens", "heads", "dim"), [(1, 1, 1), (3, 1, 5), (8, 2, 24)])
def test_1_any_shape_has_the_promised_size(codec, dtype, tokens, heads, dim) -> None:
    shape = layout(codec, tokens=tokens, heads=heads, dim=dim, dtype=dtype)
    stored = make_codec(shape).encode(kv(shape))
    assert stored.dtype == torch.uint8 and stored.shape == (3, shape.stored_layer_bytes)
    back = make_codec(shape).decode(stored)
    assert back.shape == kv(shape).shape and back.dtype == TORCH_DTYPES[dtype]


@settings(max_examples=60, deadline=None)
@given(LAYOUTS)
def test_1_no_codec_makes_a_float32_block_of_useful_size_larger(layout: BlockLayout) -> None:
    if layout.dtype is KvDtype.FLOAT32 and layout.block_tokens >= 3 and layout.head_dim >= 3:
        assert layout.stored_bytes <= layout.payload_bytes


@pytest.mark.parametrize("codec", FIXED)
def test_2_a_block_does_not_depend_on_its_neighbours(codec) -> None:
    shape = layout(codec)
    blocks = kv(shape)
    lossy = make_codec(shape)
    together = lossy.encode(blocks)
    assert torch.equal(make_codec(shape).encode(blocks.clone()), together)
    for i in range(len(blocks)):
        assert torch.equal(lossy.encode(blocks[i : i + 1])[0], together[i])
        assert torch.equal(lossy.decode(together[i : i + 1])[0], lossy.decode(together)[i])


@st.composite
def some_blocks(draw: st.DrawFn):
    """Blocks whose channels have sizes of their own, with outliers, zeros and far offsets."""
    layout = draw(LAYOUTS)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 30)))
    shape = (2, 2, layout.block_tokens, layout.kv_heads, layout.head_dim)
    numbers = torch.randn(shape, generator=generator)
    numbers *= 10.0 ** draw(st.integers(-3, 3))
    numbers += draw(st.sampled_from([0.0, 1.0, -300.0]))
    numbers *= torch.rand(shape[-1], generator=generator) * draw(st.sampled_from([1.0, 8.0]))
    numbers[torch.rand(shape, generator=generator) < draw(st.sampled_from([0.0, 0.3]))] = 0.0
    return layout, numbers.to(TORCH_DTYPES[layout.dtype])


def allowed_error(layout: BlockLayout, blocks):
    """Return how far each number may be off, as the codecs' docstrings say."""
    numbers = blocks.float()
    if layout.codec is KvCodec.NONE:
        return torch.zeros_like(numbers)
    if layout.codec is KvCodec.FP8:
        scale = numbers.abs().amax(dim=(2, 4), keepdim=True) / 448
        return torch.maximum(numbers.abs() / 16, scale * 2**-10)
    levels = 255 if layout.codec is KvCodec.INT8 else 15
    steps = []
    for half, dim in ((0, 1), (1, 3)):
        part = numbers[:, half]
        low, high = part.amin(dim, keepdim=True), part.amax(dim, keepdim=True)
        # Lowest and step are rounded outwards to bfloat16: by 2**-7 of themselves at most.
        step = (high - low + low.abs() * 2**-7) / levels * (1 + 2**-7)
        steps.append(step.expand_as(part) / 2)
    return torch.stack(steps, dim=1)


@settings(max_examples=150, deadline=None)
@given(some_blocks())
def test_3_a_round_trip_stays_within_the_bound(case) -> None:
    layout, blocks = case
    codec = make_codec(layout)
    stored = codec.encode(blocks)
    assert stored.shape == (len(blocks), layout.stored_layer_bytes)
    error = (codec.decode(stored).float() - blocks.float()).abs()
    # What is decoded is rounded once more, to the dtype of the pages.
    own = torch.finfo(blocks.dtype).eps if layout.codec.is_lossy else 0.0
    slack = blocks.float().abs().amax() * (own + (1e-6 if own else 0.0))
    assert (error <= allowed_error(layout, blocks) + slack).all()


@pytest.mark.parametrize("codec", FIXED)
def test_3_any_bytes_decode_to_something(codec) -> None:
    shape = layout(codec)
    generator = torch.Generator().manual_seed(1)
    size = (50, shape.stored_layer_bytes)
    raw = torch.randint(0, 256, size, dtype=torch.uint8, generator=generator)
    assert make_codec(shape).decode(raw).shape == kv(shape, 50).shape


@pytest.mark.parametrize("codec", FIXED)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_3_broken_kv_never_looks_sound(codec, bad) -> None:
    shape = layout(codec)
    for half in (0, 1):
        blocks = kv(shape)
        blocks[1, half, 2, 1, 0] = bad
        back = make_codec(shape).decode(make_codec(shape).encode(blocks))
        assert not back[1, half].isfinite().all()
        assert back[[0, 2]].isfinite().all()
