"""Whatever the numbers are, a codec keeps its promised size and error."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from tierkv.compute.codec.layer_codec import TORCH_DTYPES, make_codec  # noqa: E402
from tierkv.kvcore.layout import BlockLayout, KvCodec, KvDtype  # noqa: E402

LAYOUTS = st.builds(
    BlockLayout,
    layers=st.just(1),
    kv_heads=st.integers(1, 3),
    head_dim=st.integers(1, 9),
    dtype=st.sampled_from(KvDtype),
    block_tokens=st.integers(1, 9),
    codec=st.sampled_from([codec for codec in KvCodec if codec.has_fixed_size]),
)


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
def test_round_trip_stays_within_the_bound(case) -> None:
    layout, blocks = case
    codec = make_codec(layout)
    stored = codec.encode(blocks)
    assert stored.shape == (len(blocks), layout.stored_layer_bytes)
    error = (codec.decode(stored).float() - blocks.float()).abs()
    # What is decoded is rounded once more, to the dtype of the pages.
    own = torch.finfo(blocks.dtype).eps if layout.codec.is_lossy else 0.0
    slack = blocks.float().abs().amax() * (own + (1e-6 if own else 0.0))
    assert (error <= allowed_error(layout, blocks) + slack).all()
    assert torch.equal(codec.encode(blocks), stored)


@settings(max_examples=60, deadline=None)
@given(LAYOUTS)
def test_no_codec_makes_a_float32_block_of_useful_size_larger(layout: BlockLayout) -> None:
    if layout.dtype is KvDtype.FLOAT32 and layout.block_tokens >= 3 and layout.head_dim >= 3:
        assert layout.stored_bytes <= layout.payload_bytes
