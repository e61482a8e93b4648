"""The blending pass: a prompt's KV and its last token's logits, with most of its chunks reused.

The engine runs a pass layer by layer behind a load, and may compute other work between two layers.
A pass reads and writes the pages of its own sequence and reads the pages of chunks. Other modules
find the chunks and decide whether blending is worthwhile. Attention is causal by position: a token
never sees a later token, whatever other tokens are computed together. (Released blending code masks
by rank among the computed tokens, which lets early tokens see the future.)
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import embedding, scaled_dot_product_attention

from tierkv.compute.blend.plan import (
    CHECK_LAYER,
    BlendPlan,
    PlanRows,
    Selector,
    deviation,
    highest,
    lay_out,
    make_selector,
)
from tierkv.compute.model.batch import Int64Array
from tierkv.compute.model.decoder import Decoder, Outputs, rotate, rotation


class PlacedKv:
    """Keys (after rope) and values of all N tokens in one layer.

    Attributes:
        keys: ``[N, kv_heads, head_dim]``; loaded by ``load``, replaced by ``put``.
        values: as ``keys``.
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
        # Angle 0 leaves fresh tokens unchanged; the pass replaces their keys in any case.
        positions = torch.zeros(len(rows.sources), dtype=torch.int64)
        positions[torch.from_numpy(rows.reused)] = torch.from_numpy(rows.reused)
        positions = positions[plan.exact :].to(device)
        self._cos, self._sin = rotation(decoder.frequencies, positions, pages.kv.dtype)
        shape = (2, len(rows.sources), layout.kv_heads, layout.head_dim)
        self._kv = torch.empty(shape, dtype=pages.kv.dtype, device=device)
        self.keys, self.values = self._kv[0], self._kv[1]
        self._unturned = torch.empty_like(self.keys[plan.exact :])

    def load(self, layer: int) -> None:
        """Load exact KV, and chunk KV at its new position; rows of fresh tokens are arbitrary."""
        self.load_exact(layer)
        source = self._pages.token_rows(layer)
        keys, values = self._sources[:, self._exact :]
        torch.index_select(source, 0, values, out=self.values[self._exact :])
        torch.index_select(source, 0, keys, out=self._unturned)
        # Like compute/model/decoder.py's rotate, but without temporaries: this runs for every
        # reused token.
        first, second = self._unturned.chunk(2, dim=-1)
        turned_first, turned_second = self.keys[self._exact :].chunk(2, dim=-1)
        torch.mul(first, self._cos, out=turned_first).addcmul_(second, self._sin, value=-1)
        torch.mul(second, self._cos, out=turned_second).addcmul_(first, self._sin)

    def load_exact(self, layer: int) -> None:
        """Load exact KV only; the other rows are arbitrary."""
        source = self._pages.token_rows(layer)
        keys, values = self._sources[:, : self._exact]
        torch.index_select(source, 0, keys, out=self.keys[: self._exact])
        torch.index_select(source, 0, values, out=self.values[: self._exact])

    def put(self, positions: Tensor, keys: Tensor, values: Tensor) -> None:
        """Replace the KV of the given tokens with computed KV."""
        self.keys.index_copy_(0, positions, keys)
        self.values.index_copy_(0, positions, values)

    def store(self, layer: int) -> None:
        """Write all KV behind the exact prefix into the sequence's pages."""
        target = self._pages.token_rows(layer)
        for half, source in enumerate((self.keys, self.values)):
            target.index_copy_(0, self._targets[half], source[self._exact :])


SPAN_TOKENS = 128
"""Queries per call: each call sees only keys up to its last query, and 64 to 256 measured equal."""


class CausalSpans:
    """Attention for a fixed set of tokens, built once and used in every layer.

    Attributes:
        positions: positions of the tokens, ascending, ``[A]``.
    """

    def __init__(self, positions: Tensor, context: int) -> None:
        self.positions = positions
        self._keys_at = torch.arange(context, device=positions.device)
        # All tokens of the prompt: a plain prefill.
        self._is_prefill = len(positions) == context
        starts = range(0, len(positions), SPAN_TOKENS)
        stops = [min(start + SPAN_TOKENS, len(positions)) for start in starts]
        lasts = positions[[stop - 1 for stop in stops]].tolist()
        self._spans = [(a, b, last + 1) for a, b, last in zip(starts, stops, lasts, strict=True)]

    def attend(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Return ``[A, heads, head_dim]`` for equally shaped queries, over all N keys and values.

        Args:
            q: rotated queries of the tokens.
            keys: ``[N, kv_heads, head_dim]``, rotated.
            values: the same shape as ``keys``.
        """
        if self._is_prefill:
            return _attend(q, keys, values, None)
        out = torch.empty_like(q)
        for start, stop, end in self._spans:
            seen = self._keys_at[:end] <= self.positions[start:stop, None]
            out[start:stop] = _attend(q[start:stop], keys[:end], values[:end], seen)
        return out

    def attention_paid(self, q: Tensor, keys: Tensor, asking: int) -> Tensor:
        """Return the attention that the last ``asking`` tokens pay to each key, ``[N]`` float32.

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
    """Attend with the query heads of a key head as separate batch entries: no kernel repeats keys.

    Fused CUDA kernels that accept a mask don't accept grouped queries. Keys repeat over the batch
    and not over the heads: where keys repeat over the heads, the fused kernel gives the last of 65
    queries the mask of the first (seen with torch 2.11; pytorch/pytorch, pull request 191984).
    """
    kv_heads = keys.shape[1]
    grouped = q.view(len(q), kv_heads, -1, q.shape[-1]).permute(2, 1, 0, 3)
    groups = len(grouped)
    attended = scaled_dot_product_attention(
        grouped,
        keys.transpose(0, 1).expand(groups, -1, -1, -1),
        values.transpose(0, 1).expand(groups, -1, -1, -1),
        attn_mask=mask,
        is_causal=mask is None,
    )
    return attended.permute(2, 1, 0, 3).flatten(1, 2)


ASKING_TOKENS = 128
"""Most tokens at the prompt's end whose attention counts as the question's attention."""


@dataclass(frozen=True, slots=True, eq=False)
class BlendOutcome:
    """Result of a pass, besides the KV in the sequence's pages.

    Attributes:
        outputs: outputs of the last token, one row.
        recomputed_tokens: reused tokens that were computed again.
        reused_tokens: tokens from chunks, recomputed tokens included.
        selected: ``[recomputed_tokens]`` int64, positions of the recomputed tokens, ascending; with
            gradual filtering, the tokens kept at the check layer.
    """

    outputs: Outputs
    recomputed_tokens: int
    reused_tokens: int
    selected: Int64Array

    @property
    def logits(self) -> Tensor:
        """Logits of the last token, ``[1, vocab]`` float32."""
        return self.outputs.logits


def blend_steps(
    decoder: Decoder, plan: BlendPlan, *, check_layer: int = CHECK_LAYER
) -> Generator[int, None, BlendOutcome]:
    """Compute a plan layer by layer.

    Yields each layer's index before the first read of the layer's chunk pages. With the query
    selector all layers are yielded twice. At the end every page row of ``[0, N)`` holds the KV for
    decoding.

    Args:
        decoder: a decoder bound to the plan's pages.
        plan: the prompt and its chunks.
        check_layer: the layer where the hkvd selector compares.

    Ref: CacheBlend (arXiv 2405.16444), with an exact causal mask and all computed KV kept.
    """
    layout = decoder.pages.layout
    rows = lay_out(plan, layout.block_tokens)
    selector = make_selector(plan, rows, layers=layout.layers, check_layer=check_layer)
    work = _Pass(decoder, plan, rows)
    attention = (yield from work.scout()) if selector.scouts else None
    return (yield from work.run(selector, attention))


class _Pass:
    """One plan on its way through the layers."""

    def __init__(self, decoder: Decoder, plan: BlendPlan, rows: PlanRows) -> None:
        device = decoder.pages.kv.device
        self._decoder = decoder
        self._rows = rows
        self._placed = PlacedKv(decoder, plan, rows)
        self._token_ids = torch.from_numpy(plan.token_ids).to(device)
        self._reused = torch.from_numpy(rows.reused).to(device)
        self._fresh = torch.from_numpy(rows.fresh).to(device)

    def scout(self) -> Generator[int, None, Tensor]:
        """Run the fresh tokens over reused KV without storing any KV.

        Returns:
            attention: the question's attention to each reused token, ``[reused_tokens]`` float32.
        """
        active = self._activate(self._reused[:0])
        asking = min(self._rows.question, ASKING_TOKENS)
        paid = torch.zeros(len(self._token_ids), device=self._reused.device)
        hidden = self._embed(active)
        for index, layer in enumerate(self._decoder.weights.layers):
            yield index
            self._placed.load(index)
            q, k, v = self._decoder.project(layer, hidden)
            q = active.rotate(q)
            self._placed.put(active.positions, active.rotate(k), v)
            paid += active.spans.attention_paid(q, self._placed.keys, asking)
            hidden = self._finish_layer(index, hidden, q, active)
        return paid[self._reused]

    def run(
        self, selector: Selector, attention: Tensor | None
    ) -> Generator[int, None, BlendOutcome]:
        """Compute the selected tokens and all fresh tokens.

        ``attention`` is the result of ``scout``, ``[reused_tokens]``; None without scouting.
        """
        chosen = self._reused[selector.begin(attention).to(self._reused.device)]
        active, selected = self._activate(chosen), chosen
        hidden = self._embed(active)
        for index, layer in enumerate(self._decoder.weights.layers):
            yield index
            if index < selector.first_read:
                self._placed.load_exact(index)
            else:
                self._placed.load(index)
            q, k, v = self._decoder.project(layer, hidden)
            k = active.rotate(k)
            keep = selector.keep_at(index)
            survivors = None if keep is None else self._survivors(active, chosen, k, v, keep)
            self._placed.put(active.positions, k, v)  # Computed KV is always better than reused KV.
            if survivors is not None and len(survivors) < len(chosen):
                fewer = self._activate(survivors)
                rows = torch.searchsorted(active.positions, fewer.positions)
                hidden, q, active, chosen = hidden[rows], q[rows], fewer, survivors
            if index == selector.first_read:
                selected = chosen
            self._placed.store(index)
            hidden = self._finish_layer(index, hidden, active.rotate(q), active)
        outputs = self._decoder.outputs(hidden[-1:])
        return BlendOutcome(outputs, len(selected), len(self._reused), selected.cpu().numpy())

    def _survivors(
        self, active: _Active, chosen: Tensor, k: Tensor, v: Tensor, keep: int
    ) -> Tensor:
        """Return the positions of the ``keep`` chosen tokens with the highest deviation.

        ``[keep]`` int64, ascending. ``k`` and ``v``, ``[active, kv_heads, head_dim]``, are rotated
        like the reused KV.
        """
        rows = torch.searchsorted(active.positions, chosen)
        old = self._placed.keys[chosen], self._placed.values[chosen]
        return chosen[highest(deviation((k[rows], v[rows]), old), keep)]

    def _activate(self, chosen: Tensor) -> _Active:
        positions = torch.cat((chosen, self._fresh)).sort().values
        dtype = self._decoder.pages.kv.dtype
        cos, sin = rotation(self._decoder.frequencies, positions, dtype)
        return _Active(positions, CausalSpans(positions, len(self._token_ids)), cos, sin)

    def _embed(self, active: _Active) -> Tensor:
        return embedding(self._token_ids[active.positions], self._decoder.weights.embedding)

    def _finish_layer(self, index: int, hidden: Tensor, q: Tensor, active: _Active) -> Tensor:
        layer = self._decoder.weights.layers[index]
        attended = active.spans.attend(q, self._placed.keys, self._placed.values)
        hidden = hidden + layer.out(attended.flatten(-2))
        return hidden + self._decoder.feed_forward(layer, hidden)


@dataclass(frozen=True, slots=True, eq=False)
class _Active:
    """The tokens to compute in a layer, ascending, with their attention and rotation angles."""

    positions: Tensor
    spans: CausalSpans
    cos: Tensor
    sin: Tensor

    def rotate(self, x: Tensor) -> Tensor:
        """Rotate queries or keys, ``[active, heads, head_dim]``, to their positions."""
        return rotate(x, self.cos, self.sin)
