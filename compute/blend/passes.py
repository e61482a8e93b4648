"""The blending pass: a prompt's KV and its last token's logits, with most of its chunks reused.

Run by the engine layer by layer, behind a load; it may compute other things in between. A pass
reads and writes only its own sequence's pages and reads chunks' pages; it decides nothing about
where they come from or whether blending is worth it.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import embedding

from tierkv.compute.blend.attention import CausalSpans
from tierkv.compute.blend.placing import PlacedKv
from tierkv.compute.blend.plan import BlendPlan, PlanRows, lay_out
from tierkv.compute.blend.selectors import CHECK_LAYER, Selector, deviation, highest, make_selector
from tierkv.compute.model.batch import Int64Array
from tierkv.compute.model.decoder import Decoder, Outputs
from tierkv.compute.model.rope import rotate, rotation

ASKING_TOKENS = 128
"""Most tokens of the prompt's end whose attention counts as the question's."""


@dataclass(frozen=True, slots=True, eq=False)
class BlendOutcome:
    """What a pass gives besides the KV in the sequence's pages.

    Attributes:
        outputs: of the last token, one row.
        recomputed_tokens: reused tokens that were computed again.
        reused_tokens: tokens that came from chunks, recomputed ones included.
        selected: ``[recomputed_tokens]`` int64, positions of those computed again, ascending; with
            gradual filtering, those kept at the check layer.
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

    Yields each layer's number before it first reads that layer's chunk pages. With the query
    selector all layers are yielded twice. At the end every page row of ``[0, N)`` holds what
    decoding uses.

    Args:
        decoder: bound to the pages that the plan names.
        plan: what to do.
        check_layer: where the hkvd selector compares.

    Ref: CacheBlend (arXiv 2405.16444), with an exact causal mask and all KV that was computed kept.
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
        """Run the fresh tokens over reused KV; nothing is stored.

        Returns:
            attention: the question's to each reused token, ``[reused_tokens]`` float32.
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
        """Compute what the selector chooses, and all fresh tokens.

        ``attention`` is what ``scout`` returned, ``[reused_tokens]``; None without scouting.
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
            self._placed.put(active.positions, k, v)  # Whatever was computed is better than reused.
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
        """Return the ``[keep]`` int64 positions of the chosen tokens that deviate most, ascending.

        ``k`` and ``v``, ``[active, kv_heads, head_dim]``, are rotated like what was reused.
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
    """The tokens that are computed in a layer, ascending, and what only depends on them."""

    positions: Tensor
    spans: CausalSpans
    cos: Tensor
    sin: Tensor

    def rotate(self, x: Tensor) -> Tensor:
        """Rotate their queries or keys, ``[active, heads, head_dim]``, to their positions."""
        return rotate(x, self.cos, self.sin)
