"""How a blending pass calls the fused attention."""

from __future__ import annotations

import torch

from tierkv.compute.blend import passes
from tierkv.compute.blend.passes import CausalSpans


def test_keys_repeat_over_the_batch_and_never_over_the_heads(monkeypatch) -> None:
    """Else a fused CUDA kernel takes a wrong row of the mask for the last of 65 queries."""
    inner, seen = torch.nn.functional.scaled_dot_product_attention, []

    def attention(q, keys, values, **more):
        seen.append((keys.stride(1), values.stride(1), q.shape))
        return inner(q, keys, values, **more)

    monkeypatch.setattr(passes, "scaled_dot_product_attention", attention)
    for kv_heads in (1, 2, 4):
        q, keys = torch.randn(65, 4, 16), torch.randn(2, 97, kv_heads, 16)
        CausalSpans(torch.arange(32, 97), 97).attend(q, keys[0], keys[1])
    assert all(keys and values for keys, values, _ in seen)
    assert [shape[:2] for _, _, shape in seen] == [(4, 1), (2, 2), (1, 4)]
