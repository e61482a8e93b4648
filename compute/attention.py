"""Paged attention in plain torch: gather a sequence's pages, then scaled dot product attention.

Called by the decoder once per layer, after this step's keys and values were written into the
pages. Correct on every device; the reference for faster kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from compute.batch import DecodeGroup, ForwardBatch, PrefillSegment, RawWrite
from compute.pages import L1Pages


class PagedAttention:
    """Attention over L1 pages with a scratch buffer that is reused in every layer and step.

    Attributes:
        pages: the KV this reads.
    """

    def __init__(self, pages: L1Pages) -> None:
        self.pages = pages
        self._scratch = torch.empty(0, dtype=pages.kv.dtype, device=pages.kv.device)

    def write(self, layer: int, batch: ForwardBatch, k: Tensor, v: Tensor) -> None:
        """Store keys (after rope) and values, each ``[tokens, kv_heads, head_dim]``."""
        self.pages.token_rows(layer).index_copy_(0, batch.write_rows, torch.cat((k, v)))

    def write_raw(self, layer: int, raw: RawWrite, k: Tensor, v: Tensor) -> None:
        """Store keys before rope and values of the tokens that are also kept position-free."""
        rows = torch.cat((k[raw.source_rows], v[raw.source_rows]))
        self.pages.token_rows(layer).index_copy_(0, raw.target_rows, rows)

    def attend(self, layer: int, batch: ForwardBatch, q: Tensor) -> Tensor:
        """Return ``[tokens, heads, head_dim]`` for queries of the same shape."""
        out = torch.empty_like(q)
        for group in batch.groups:
            out[group.rows] = self._decode(layer, group, q[group.rows])
        for segment in batch.segments:
            out[segment.rows] = self._prefill(layer, segment, q[segment.rows])
        return out

    def _decode(self, layer: int, group: DecodeGroup, q: Tensor) -> Tensor:
        keys, values = self._gather(layer, group.gather, len(q))
        attended = scaled_dot_product_attention(
            q[:, :, None, :],
            keys.transpose(1, 2),
            values.transpose(1, 2),
            attn_mask=group.mask,
            enable_gqa=True,
        )
        return attended[:, :, 0, :]

    def _prefill(self, layer: int, segment: PrefillSegment, q: Tensor) -> Tensor:
        keys, values = self._gather(layer, segment.gather, 1)
        attended = scaled_dot_product_attention(
            q.transpose(0, 1)[None],
            keys[:, : segment.context].transpose(1, 2),
            values[:, : segment.context].transpose(1, 2),
            attn_mask=segment.mask,
            is_causal=segment.mask is None,
            enable_gqa=True,
        )
        return attended[0].transpose(0, 1)

    def _gather(self, layer: int, halves: Tensor, sequences: int) -> Tensor:
        """Copy pages into ``[2, sequences, tokens, kv_heads, head_dim]``."""
        source = self.pages.half_pages(layer)
        needed = halves.numel() * source.shape[1]
        if self._scratch.numel() < needed:
            self._scratch = torch.empty(needed, dtype=source.dtype, device=source.device)
        target = self._scratch[:needed].view(halves.numel(), source.shape[1])
        torch.index_select(source, 0, halves, out=target)
        layout = self.pages.layout
        return target.view(2, sequences, -1, layout.kv_heads, layout.head_dim)
