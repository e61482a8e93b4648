"""Attention of some tokens of a prompt over all KV before each of them.

Used by the blending pass. The mask is causal by position: a token never sees a later one, whatever
other tokens are computed beside it. (Released blending code masks by rank among the computed
tokens, which lets early ones see the future.)
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

SPAN_TOKENS = 128
"""Queries per call: each call sees only keys up to its last query, and 64 to 256 measured equal."""


class CausalSpans:
    """Attention for a fixed set of tokens, made once and used in every layer.

    Attributes:
        positions: of the tokens, ascending, ``[A]``.
    """

    def __init__(self, positions: Tensor, context: int) -> None:
        self.positions = positions
        self._keys_at = torch.arange(context, device=positions.device)
        # All tokens from the first one on: a plain prefill.
        self._is_prefill = len(positions) == context
        starts = range(0, len(positions), SPAN_TOKENS)
        stops = [min(start + SPAN_TOKENS, len(positions)) for start in starts]
        lasts = positions[[stop - 1 for stop in stops]].tolist()
        self._spans = [(a, b, last + 1) for a, b, last in zip(starts, stops, lasts, strict=True)]

    def attend(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Return ``[A, heads, head_dim]`` for queries of that shape, over all N keys and values.

        Args:
            q: rotated queries of the tokens.
            keys: ``[N, kv_heads, head_dim]``, rotated.
            values: the same shape.
        """
        if self._is_prefill:
            return _attend(q, keys, values, None)
        out = torch.empty_like(q)
        for start, stop, end in self._spans:
            seen = self._keys_at[:end] <= self.positions[start:stop, None]
            out[start:stop] = _attend(q[start:stop], keys[:end], values[:end], seen)
        return out

    def attention_paid(self, q: Tensor, keys: Tensor, asking: int) -> Tensor:
        """Return how much attention the last ``asking`` tokens pay to each key, ``[N]`` float32.

        Summed over heads and asking tokens; costs one ``[heads, asking, N]`` tensor.
        """
        q, positions = q[-asking:], self.positions[-asking:]
        kv_heads, head_dim = keys.shape[1:]
        grouped = q.view(asking, kv_heads, -1, head_dim).permute(1, 2, 0, 3).flatten(1, 2)
        scores = (grouped @ keys.permute(1, 2, 0)).float() * head_dim**-0.5
        by_token = scores.view(-1, asking, len(keys))
        by_token.masked_fill_(self._keys_at > positions[:, None], float("-inf"))
        paid: Tensor = by_token.softmax(-1).sum((0, 1))
        return paid


def _attend(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """Attend with each key head as a batch of its own, so that no kernel has to repeat any.

    Fused kernels on CUDA that take a mask don't take grouped queries.
    """
    kv_heads = keys.shape[1]
    grouped = q.view(len(q), kv_heads, -1, q.shape[-1]).permute(1, 2, 0, 3)
    shape = (*grouped.shape[:2], *keys.shape[::2])
    attended = scaled_dot_product_attention(
        grouped,
        keys.transpose(0, 1)[:, None].expand(shape),
        values.transpose(0, 1)[:, None].expand(shape),
        attn_mask=mask,
        is_causal=mask is None,
    )
    return attended.permute(2, 0, 1, 3).flatten(1, 2)
