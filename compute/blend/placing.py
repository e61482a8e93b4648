"""One layer's keys and values of a whole prompt, put together from pages of several owners.

Used by the blending pass, which reuses one buffer for all layers: exact KV comes from the
sequence's own pages, that of chunks from theirs, with keys rotated once to where they stand now.
What decoding will use goes back to the sequence's pages.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tierkv.compute.blend.plan import BlendPlan, PlanRows
from tierkv.compute.model.decoder import Decoder
from tierkv.compute.model.rope import rotation


class PlacedKv:
    """Keys (after rope) and values of all N tokens in one layer.

    Attributes:
        keys: ``[N, kv_heads, head_dim]``; what ``load`` brought and ``put`` replaced.
        values: the same.
    """

    def __init__(self, decoder: Decoder, plan: BlendPlan, rows: PlanRows) -> None:
        pages = decoder.pages
        device, layout = pages.kv.device, pages.layout
        self._pages = pages
        self._exact = plan.exact
        sources = torch.from_numpy(rows.sources).to(device)
        self._sources = torch.stack((sources, sources + layout.block_tokens))
        targets = torch.from_numpy(rows.targets[plan.exact :]).to(device)
        self._targets = torch.stack((targets, targets + layout.block_tokens))
        # Angle 0 leaves fresh tokens as they are; they are put there by the pass anyway.
        positions = torch.zeros(len(rows.sources), dtype=torch.int64)
        positions[torch.from_numpy(rows.reused)] = torch.from_numpy(rows.reused)
        positions = positions[plan.exact :].to(device)
        self._cos, self._sin = rotation(decoder.frequencies, positions, pages.kv.dtype)
        shape = (2, len(rows.sources), layout.kv_heads, layout.head_dim)
        self._kv = torch.empty(shape, dtype=pages.kv.dtype, device=device)
        self.keys, self.values = self._kv[0], self._kv[1]
        self._unturned = torch.empty_like(self.keys[plan.exact :])

    def load(self, layer: int) -> None:
        """Bring exact KV and that of chunks, at its place; fresh tokens' rows are arbitrary."""
        self.load_exact(layer)
        source = self._pages.token_rows(layer)
        keys, values = self._sources[:, self._exact :]
        torch.index_select(source, 0, values, out=self.values[self._exact :])
        torch.index_select(source, 0, keys, out=self._unturned)
        # tierkv.compute.model.rope.rotate without its temporaries: this is done for every reused
        # token.
        first, second = self._unturned.chunk(2, dim=-1)
        turned_first, turned_second = self.keys[self._exact :].chunk(2, dim=-1)
        torch.mul(first, self._cos, out=turned_first).addcmul_(second, self._sin, value=-1)
        torch.mul(second, self._cos, out=turned_second).addcmul_(first, self._sin)

    def load_exact(self, layer: int) -> None:
        """Bring exact KV only; the other rows are arbitrary."""
        source = self._pages.token_rows(layer)
        keys, values = self._sources[:, : self._exact]
        torch.index_select(source, 0, keys, out=self.keys[: self._exact])
        torch.index_select(source, 0, values, out=self.values[: self._exact])

    def put(self, positions: Tensor, keys: Tensor, values: Tensor) -> None:
        """Replace the KV of some tokens by what was computed for them."""
        self.keys.index_copy_(0, positions, keys)
        self.values.index_copy_(0, positions, values)

    def store(self, layer: int) -> None:
        """Write all that is not exact already into the sequence's pages."""
        target = self._pages.token_rows(layer)
        for half, source in enumerate((self.keys, self.values)):
            target.index_copy_(0, self._targets[half], source[self._exact :])
