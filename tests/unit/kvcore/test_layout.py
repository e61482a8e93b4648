"""A block's bytes: offsets, sizes, bounds, and a fingerprint for each meaning."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tierkv.kvcore.layout import BlockLayout, KvCodec, KvDtype

LAYOUT = BlockLayout(layers=3, kv_heads=2, head_dim=4, dtype=KvDtype.FLOAT32, block_tokens=8)

ENTROPY = [codec for codec in KvCodec if not codec.has_fixed_size]


def test_sizes_follow_from_the_shape() -> None:
    assert LAYOUT.token_layer_bytes == 2 * 2 * 4 * 4
    assert LAYOUT.layer_bytes == 64 * 8
    assert LAYOUT.payload_bytes == 512 * 3
    half = replace(LAYOUT, dtype=KvDtype.BFLOAT16)
    assert half.payload_bytes * 2 == LAYOUT.payload_bytes


def test_a_codec_changes_what_is_stored_and_not_what_l1_holds() -> None:
    assert LAYOUT.stored_layer_bytes == LAYOUT.layer_bytes
    assert LAYOUT.stored_bytes == LAYOUT.payload_bytes
    stored = {
        KvCodec.FP8: 8 * 2 + 128,
        KvCodec.INT8: 4 * 2 * (4 + 8) + 128,
        KvCodec.INT4: 4 * 2 * (4 + 8) + 64,
        **dict.fromkeys(ENTROPY, 16 + 512 + 48),  # At most: as they are, a head, and padding.
    }
    for codec, size in stored.items():
        layout = replace(LAYOUT, codec=codec)
        assert layout.stored_layer_bytes == size and layout.stored_bytes == 3 * size
        assert layout.layer_bytes == LAYOUT.layer_bytes
        assert layout.layer_offset(1) == LAYOUT.layer_offset(1)


def test_layers_are_contiguous_half_open_ranges() -> None:
    assert [LAYOUT.layer_offset(layer) for layer in range(4)] == [0, 512, 1024, 1536]
    for layer in (-1, 4):
        with pytest.raises(ValueError, match="outside"):
            LAYOUT.layer_offset(layer)


def test_every_field_changes_the_fingerprint() -> None:
    others = [
        replace(LAYOUT, layers=4),
        replace(LAYOUT, kv_heads=4),
        replace(LAYOUT, head_dim=8),
        replace(LAYOUT, dtype=KvDtype.BFLOAT16),
        replace(LAYOUT, dtype=KvDtype.FLOAT16),
        replace(LAYOUT, block_tokens=16),
        replace(LAYOUT, order="vllm-hnd-1"),
        *[replace(LAYOUT, codec=codec) for codec in KvCodec if codec.is_lossy],
    ]
    prints = {layout.fingerprint() for layout in [LAYOUT, *others]}
    assert len(prints) == 8 + 7
    assert {len(fingerprint) for fingerprint in prints} == {16}
    assert replace(LAYOUT).fingerprint() == LAYOUT.fingerprint()


@pytest.mark.parametrize(
    ("field", "reason"),
    [
        ({"layers": 0}, "layers must be positive"),
        ({"kv_heads": -1}, "kv_heads must be positive"),
        ({"head_dim": 0}, "head_dim must be positive"),
        ({"block_tokens": 0}, "block_tokens must be positive"),
        ({"layers": 257}, "limit of 256"),
        ({"block_tokens": 1 << 24}, "choose fewer block_tokens"),
    ],
)
def test_impossible_shapes_are_refused(field: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        replace(LAYOUT, **field)
