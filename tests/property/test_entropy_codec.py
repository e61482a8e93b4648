"""Whatever numbers come in, frames keep their bound; whatever bytes come in, nothing breaks."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from tierkv.compute.codec.entropy import (  # noqa: E402
    CodecLevel,
    EntropyCodec,
    make_calibration,
)
from tierkv.compute.codec.layer_codec import TORCH_DTYPES  # noqa: E402
from tierkv.kvcore.errors import CacheError  # noqa: E402
from tierkv.kvcore.layout import BlockLayout, KvCodec, KvDtype  # noqa: E402

LEVELS = (CodecLevel.FINE, CodecLevel.MEDIUM, CodecLevel.COARSE)


@st.composite
def cases(draw: st.DrawFn):
    layout = BlockLayout(
        layers=draw(st.integers(1, 3)),
        kv_heads=draw(st.integers(1, 3)),
        head_dim=draw(st.integers(1, 9)),
        dtype=draw(st.sampled_from(KvDtype)),
        block_tokens=draw(st.integers(1, 9)),
        codec=KvCodec.ENTROPY_FINE,
    )
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 30)))
    shape = (layout.layers, 2, layout.block_tokens, layout.kv_heads, layout.head_dim)
    mean = torch.randn(shape[:2] + shape[3:], generator=generator)
    steps = torch.rand((3, *shape[:2]), generator=generator) + 2.0 ** draw(st.integers(-9, 2))
    numbers = torch.randn(shape, generator=generator) * 10.0 ** draw(st.integers(-3, 3))
    wild = torch.rand(shape, generator=generator) < draw(st.sampled_from([0.0, 0.02, 1.0]))
    numbers[wild] *= draw(st.sampled_from([0.0, 1e4, float("inf"), float("nan")]))
    calibration = make_calibration(mean, steps)
    codec = EntropyCodec(layout, calibration, device="cpu")
    return layout, calibration, codec, numbers.to(TORCH_DTYPES[layout.dtype])


@settings(max_examples=100, deadline=None)
@given(cases(), st.sampled_from(LEVELS))
def test_round_trip_stays_within_half_a_step(case, level) -> None:
    layout, calibration, codec, numbers = case
    ranges = codec.encode(numbers, level)
    assert ranges.shape[0] == layout.layers and ranges.shape[1] <= layout.stored_layer_bytes
    out = torch.empty_like(numbers)
    for layer, frame in enumerate(ranges):
        codec.decode(layer, memoryview(frame), out[layer], level)
    finite = numbers.isfinite()
    assert torch.equal(out[~finite].nan_to_num(1.0), numbers[~finite].nan_to_num(1.0))
    steps = calibration.steps[LEVELS.index(level)][:, :, None, None, None].expand_as(numbers)
    mean = calibration.mean[:, :, None].expand_as(numbers)
    # What is decoded is rounded twice, to the dtype of the pages: after the product and the sum.
    own = torch.finfo(numbers.dtype).eps * (numbers.float().abs() * 2 + mean.abs() + steps)
    error = (out.float() - numbers.float()).abs()
    assert (error <= steps / 2 * (1 + 1e-4) + own)[finite].all()
    assert (codec.encode(numbers, level) == ranges).all()


@settings(max_examples=200, deadline=None)
@given(cases(), st.sampled_from(LEVELS), st.data())
def test_broken_frames_are_misses_or_numbers(case, level, data) -> None:
    _, _, codec, numbers = case
    good = codec.encode(numbers, level)[0].tobytes()
    flips = data.draw(st.lists(st.tuples(st.integers(0, len(good) - 1), st.integers(0, 255))))
    bad = bytearray(good)
    for at, value in flips:
        bad[at] = value
    cut = data.draw(st.integers(0, len(good)))
    for frame in (bytes(bad), good[:cut], data.draw(st.binary(max_size=64))):
        out = torch.zeros_like(numbers[0])
        try:
            codec.decode(0, memoryview(frame), out)
        except CacheError:
            continue
        assert out.shape == numbers[0].shape
