"""One layer's keys and values of a whole prompt, put together from pages of several owners.

Used by the blending pass, which reuses one buffer for all layers: exact KV comes from the
sequence's own pages, that of chunks from theirs, with keys rotated once to where they stand now.
What decoding will use goes back to the sequence's pages.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compute.blend.plan import BlendPlan, PlanRows
from compute.model import Decoder
from compute.rope import rotate, rotation


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
        self._turn = rotation(decoder.frequencies, positions, pages.kv.dtype)
        shape = (2, len(rows.sources), layout.kv_heads, layout.head_dim)
        self._kv = torch.empty(shape, dtype=pages.kv.dtype, device=device)
        self.keys, self.values = self._kv[0], self._kv[1]

    def load(self, layer: int) -> None:
        """Bring exact KV and that of chunks, at its place; fresh tokens' rows are arbitrary."""
        self._gather(layer, len(self.keys))
        placed = self.keys[self._exact :]
        placed.copy_(rotate(placed, *self._turn))

    def load_exact(self, layer: int) -> None:
        """Bring exact KV only; the other rows are arbitrary."""
        self._gather(layer, self._exact)

    def _gather(self, layer: int, count: int) -> None:
        source = self._pages.token_rows(layer)
        for half, target in enumerate((self.keys, self.values)):
            torch.index_select(source, 0, self._sources[half, :count], out=target[:count])

    def put(self, positions: Tensor, keys: Tensor, values: Tensor) -> None:
        """Replace the KV of some tokens by what was computed for them."""
        self.keys.index_copy_(0, positions, keys)
        self.values.index_copy_(0, positions, values)

    def store(self, layer: int) -> None:
        """Write all that is not exact already into the sequence's pages."""
        target = self._pages.token_rows(layer)
        for half, source in enumerate((self.keys, self.values)):
            target.index_copy_(0, self._targets[half], source[self._exact :])
