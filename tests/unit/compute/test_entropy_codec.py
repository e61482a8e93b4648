"""Entropy-coded frames on small cases: bytes, levels, escapes, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")
zstandard = pytest.importorskip("zstandard")

from tierkv.compute.codec.entropy import (  # noqa: E402
    CodecLevel,
    EntropyCodec,
    FrameHead,
    coarsest_of,
    make_calibration,
    read_head,
)
from tierkv.compute.codec.layer_codec import TORCH_DTYPES  # noqa: E402
from tierkv.compute.model.pages import Codecs  # noqa: E402
from tierkv.kvcore.errors import ChecksumError, LayoutError  # noqa: E402
from tierkv.kvcore.layout import BlockLayout, KvCodec, KvDtype, framed_bytes  # noqa: E402

LAYOUT = BlockLayout(2, 2, 8, KvDtype.FLOAT32, 16)
STEPS = torch.tensor([0.125, 0.5, 1.0])


def codec(layout: BlockLayout = LAYOUT, mean: float = 0.5) -> EntropyCodec:
    means = torch.full((layout.layers, 2, layout.kv_heads, layout.head_dim), mean)
    steps = STEPS[:, None, None].expand(3, layout.layers, 2)
    return EntropyCodec(layout, make_calibration(means, steps), device="cpu")


def block(layout: BlockLayout = LAYOUT, seed: int = 0):
    shape = (layout.layers, 2, layout.block_tokens, layout.kv_heads, layout.head_dim)
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(TORCH_DTYPES[layout.dtype])


def decoded(one: EntropyCodec, ranges, layers, coarsest: CodecLevel = CodecLevel.COARSE):
    out = torch.full_like(layers, 7.0)
    for layer, frame in enumerate(ranges):
        one.decode(layer, memoryview(frame), out[layer], coarsest)
    return out


@pytest.mark.parametrize("dtype", list(KvDtype))
@pytest.mark.parametrize("level", [CodecLevel.FINE, CodecLevel.MEDIUM, CodecLevel.COARSE])
def test_numbers_come_back_within_half_a_step(level, dtype) -> None:
    layout = replace(LAYOUT, dtype=dtype)
    layers = block(layout)
    ranges = codec(layout).encode(layers, level)
    error = (decoded(codec(layout), ranges, layers).float() - layers.float()).abs().max()
    rounding = torch.finfo(layers.dtype).eps * 2 * layers.float().abs().max()
    assert 0 < error <= STEPS[level] / 2 * (1 + 1e-5) + rounding


def test_steps_on_the_grid_are_exact() -> None:
    grid = torch.arange(-127, 128)[torch.randperm(255, generator=torch.Generator().manual_seed(1))]
    layers = block()
    layers.view(-1)[:255] = grid * 0.125 + 0.5
    layers.view(-1)[255:] = 0.5
    assert torch.equal(decoded(codec(), codec().encode(layers, CodecLevel.FINE), layers), layers)


def test_ranges_are_equally_long_aligned_and_shorter_when_coarser() -> None:
    layers = block()
    sizes = []
    for level in (CodecLevel.FINE, CodecLevel.MEDIUM, CodecLevel.COARSE):
        ranges = codec().encode(layers, level)
        heads = [read_head(memoryview(r), calibration=codec()._number, numbers=512) for r in ranges]
        assert {head.level for head in heads} == {level}
        assert ranges.shape[1] == framed_bytes(max(head.payload_bytes for head in heads))
        assert all(not r[16 + h.payload_bytes :].any() for r, h in zip(ranges, heads, strict=True))
        sizes.append(ranges.shape[1])
    assert sizes == sorted(sizes, reverse=True) and sizes[2] < sizes[0]
    assert sizes[0] < LAYOUT.layer_bytes / 3


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf"), 1e30, -20.0])
def test_what_has_no_code_is_stored_as_it_is(bad) -> None:
    layers = block()
    layers[1, 0, 3, 1, 2] = layers[1, 1, 15, 0, 7] = bad
    back = decoded(codec(), codec().encode(layers, CodecLevel.FINE), layers)
    for at in ((1, 0, 3, 1, 2), (1, 1, 15, 0, 7)):
        assert torch.equal(back[at].nan_to_num(99.0), layers[at].nan_to_num(99.0))
    rest = back.isfinite() & (layers.abs() < 15)
    assert int(rest.sum()) == layers.numel() - 2
    assert (back - layers)[rest].abs().max() <= 0.0625001


def test_numbers_that_do_not_shrink_are_stored_raw_and_within_the_bound() -> None:
    layout = BlockLayout(2, 1, 1, KvDtype.FLOAT32, 1, KvCodec.ENTROPY_COARSE)
    layers = block(layout)
    ranges = codec(layout).encode(layers, CodecLevel.COARSE)
    assert ranges.shape == (2, layout.stored_layer_bytes) and ranges[0, 3] == CodecLevel.RAW
    assert torch.equal(decoded(codec(layout), ranges, layers, CodecLevel.FINE), layers)


def test_equal_numbers_give_equal_bytes() -> None:
    assert (
        codec().encode(block(), CodecLevel.MEDIUM) == codec().encode(block(), CodecLevel.MEDIUM)
    ).all()


def test_frames_of_other_tables_are_refused() -> None:
    ranges = codec(mean=0.25).encode(block(), CodecLevel.FINE)
    with pytest.raises(LayoutError, match="calibration"):
        decoded(codec(), ranges, block())


def test_a_reader_never_gets_more_loss_than_its_codec_allows() -> None:
    ranges = codec().encode(block(), CodecLevel.MEDIUM)
    with pytest.raises(LayoutError, match="coarser"):
        decoded(codec(), ranges, block(), coarsest_of(KvCodec.ENTROPY_FINE))
    for allowed in (KvCodec.ENTROPY_MEDIUM, KvCodec.ENTROPY_COARSE, KvCodec.ADAPTIVE):
        decoded(codec(), ranges, block(), coarsest_of(allowed))


def frame(payload: bytes, *, escapes: int = 0, said: int | None = None) -> bytes:
    size = len(payload) if said is None else said
    return FrameHead(CodecLevel.FINE, codec()._number, size, escapes).pack() + payload


def packed(size: int) -> bytes:
    return zstandard.ZstdCompressor().compress(bytes(size))


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        (b"", LayoutError),
        (bytes(64), LayoutError),
        (frame(packed(512), said=1 << 20), LayoutError),
        (frame(packed(511)), LayoutError),
        (frame(packed(1 << 28)), LayoutError),  # Is not unpacked to see.
        (frame(packed(512), escapes=513), LayoutError),
        (frame(packed(512 + 4), escapes=1), LayoutError),  # No number is marked as escaped.
        (frame(b"no zstandard at all"), ChecksumError),
        (frame(packed(512) + b"tail"), ChecksumError),
        (frame(packed(512)[:-3]), ChecksumError),
        (FrameHead(CodecLevel.RAW, codec()._number, 8).pack() + bytes(8), LayoutError),
    ],
)
def test_lying_frames_are_misses(bad, error) -> None:
    with pytest.raises(error):
        codec().decode(0, memoryview(bad), torch.empty(2, 16, 2, 8))


def test_codecs_that_need_tables_are_not_there_without_them() -> None:
    without = Codecs(LAYOUT, None, device=torch.device("cpu"))
    assert [c for c in KvCodec if without.has(c)] == [c for c in KvCodec if c.has_fixed_size]


@pytest.mark.parametrize(
    ("mean", "steps"),
    [
        (torch.zeros(2, 2, 1, 4), torch.ones(3, 1, 2)),
        (torch.zeros(2, 2, 1, 4), torch.zeros(3, 2, 2)),
        (torch.full((2, 2, 1, 4), torch.nan), torch.ones(3, 2, 2)),
    ],
)
def test_tables_that_can_not_be_are_refused(mean, steps) -> None:
    with pytest.raises(ValueError, match=r"tables|finite"):
        make_calibration(mean, steps)
