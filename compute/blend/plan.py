"""The plan of a blending pass: which tokens have exact KV, come from chunks, or are new.

The engine makes a plan once the chunks were found; no index here is computed per layer. Positions
are prompt positions and all ranges are half-open. The plan is pure numpy. Three selectors choose
the reused tokens to compute again: ``ceil(recompute_ratio * n)`` of n reused tokens (the boundary
selector: of each chunk's tokens). A selector holds numbers of one plan and no tensors of a layer.
With ratio 1 every token is computed again and the answer is exact.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from tierkv.compute.model.batch import Int64Array, token_rows_of
from tierkv.kvcore.request import Blend, BlendSelector


@dataclass(frozen=True, slots=True, eq=False)
class ChunkUse:
    """A chunk of a prompt, with KV in separate pages.

    Attributes:
        start: prompt position of the chunk's first token.
        tokens: number of tokens in the chunk.
        pages: L1 pages with the chunk's values and keys before rope, from the first token on.
    """

    start: int
    tokens: int
    pages: Int64Array


@dataclass(frozen=True, slots=True, eq=False)
class BlendPlan:
    """A prompt to blend.

    Tokens in ``[exact, N)`` outside ``reused`` are fresh and always computed. The last token is
    always computed too, because its logits are needed.

    Attributes:
        token_ids: the whole prompt, ``[N]``.
        exact: number of leading tokens with exact KV in ``page_table``; never computed.
        page_table: pages of the sequence, for all N tokens; disjoint from the chunks' pages.
        reused: chunks in order, disjoint; their tokens before ``exact`` don't count.
        blend: the recompute ratio and the selector.
    """

    token_ids: Int64Array
    exact: int
    page_table: Int64Array
    reused: tuple[ChunkUse, ...]
    blend: Blend


@dataclass(frozen=True, slots=True, eq=False)
class PlanRows:
    """A plan as index arrays.

    Attributes:
        reused: positions of the tokens from chunks, ascending, ``[n]``.
        offsets: distance of each reused token from its chunk's first reused token, ``[n]``.
        lengths: number of reused tokens in the chunk of each reused token, ``[n]``.
        fresh: positions that are always computed, ascending; the last position is N - 1.
        sources: row of the key of each token, in its own page or in its chunk's, ``[N]``; see
            ``tierkv.compute.model.batch.token_rows_of``.
        targets: row of the key of each token in the sequence's own pages, ``[N]``.
    """

    reused: Int64Array
    offsets: Int64Array
    lengths: Int64Array
    fresh: Int64Array
    sources: Int64Array
    targets: Int64Array

    @property
    def question(self) -> int:
        """Number of fresh tokens at the prompt's end, behind the last reused token."""
        last = int(self.reused[-1]) if len(self.reused) else -1
        return int((self.fresh > last).sum())


def lay_out(plan: BlendPlan, block_tokens: int) -> PlanRows:
    """Turn a plan into index arrays, O(N)."""
    count = len(plan.token_ids)
    targets = token_rows_of(plan.page_table, np.arange(count), block_tokens)
    sources = targets.copy()
    reused, offsets, lengths = [], [], []
    for chunk in plan.reused:
        start = max(chunk.start, plan.exact)
        at = np.arange(start, min(chunk.start + chunk.tokens, count - 1))
        sources[at] = token_rows_of(chunk.pages, at - chunk.start, block_tokens)
        reused.append(at)
        offsets.append(at - start)
        lengths.append(np.full(len(at), len(at)))
    is_fresh = np.arange(count) >= plan.exact
    placed = _joined(reused)
    is_fresh[placed] = False
    return PlanRows(
        reused=placed,
        offsets=_joined(offsets),
        lengths=_joined(lengths),
        fresh=np.flatnonzero(is_fresh),
        sources=sources,
        targets=targets,
    )


def _joined(parts: list[Int64Array]) -> Int64Array:
    return np.concatenate([np.zeros(0, dtype=np.int64), *parts])


CHECK_LAYER = 2
"""The layer where HKVD compares, if the model is deep enough. The paper uses 1, the first layer
whose KV can deviate; but the influence of one chunk on another shows in deeper layers
(docs/quality.md), and one more layer computed in full costs 1/layers of a prefill."""


class Selector(Protocol):
    """Chooses among the n reused tokens of a plan, numbered 0 to n - 1 in order.

    1. ``begin`` returns the tokens that are active (computed) from layer 0 on, ascending.
    2. If ``scouts``, a pass of the fresh tokens alone runs first, and ``begin`` receives the
       question's attention to each reused token; otherwise ``begin`` receives None.
    3. ``keep_at`` returns the number of active reused tokens that stay active from the layer's
       attention on, namely the tokens with the highest KV deviation; None: all. The number never
       rises from layer to layer.
    4. KV of chunks in layers before ``first_read`` is not needed: all tokens are computed there.
    """

    scouts: bool
    first_read: int

    def begin(self, attention: Tensor | None) -> Tensor:
        """See 1; ``attention`` is ``[n]`` float32, the result distinct int64 indices."""
        ...

    def keep_at(self, layer: int) -> int | None:
        """See 3."""
        ...


class BoundarySelector:
    """Selects the first tokens of each chunk.

    These tokens were computed at the beginning of a text; in the prompt other text comes before
    them.

    Ref: EPIC (arXiv 2410.15332), LegoLink.
    """

    scouts = False
    first_read = 0

    def __init__(self, rows: PlanRows, ratio: float) -> None:
        self._chosen = np.flatnonzero(rows.offsets < np.ceil(ratio * rows.lengths - 1e-9))

    def begin(self, attention: Tensor | None) -> Tensor:
        """Return the same tokens for all layers, ``[k]`` int64."""
        return torch.from_numpy(self._chosen)

    def keep_at(self, layer: int) -> int | None:
        """Keep all."""
        return None


class HkvdSelector:
    """Selects the tokens whose keys and values at a check layer deviate most from fresh KV.

    All tokens are computed up to the check layer. Gradual filtering keeps 1.5 times the ratio there
    and fewer tokens on each later layer; the mean over these layers is the ratio.

    Ref: CacheBlend (arXiv 2405.16444).
    """

    scouts = False

    def __init__(
        self, reused: int, ratio: float, *, layers: int, check_layer: int, gradual: bool
    ) -> None:
        self.first_read = min(check_layer, layers - 1)
        self._reused = reused
        most = min(1.0, 1.5 * ratio) if gradual else ratio
        ratios = np.linspace(most, 2 * ratio - most, layers - self.first_read)
        if len(ratios) == 1:
            ratios[0] = ratio
        self._keep = [_ceil(share * reused) for share in ratios]
        self._gradual = gradual

    def begin(self, attention: Tensor | None) -> Tensor:
        """Return all, ``[n]`` int64."""
        return torch.arange(self._reused)

    def keep_at(self, layer: int) -> int | None:
        """Choose at the check layer; if gradual, also at every later layer."""
        at = layer - self.first_read
        return self._keep[at] if at == 0 or (at > 0 and self._gradual) else None


class QuerySelector:
    """Selects the tokens with the most attention from the question, over all heads and layers.

    Costs a second pass of the fresh tokens, and every layer's KV is read before the choice. In
    return no layer is computed in full, and tokens that do not matter to the question are left
    alone.

    Ref: InfoFlow KV (arXiv 2603.05353), ProphetKV (arXiv 2602.02579).
    """

    scouts = True
    first_read = 0

    def __init__(self, reused: int, ratio: float) -> None:
        self._keep = _ceil(ratio * reused)

    def begin(self, attention: Tensor | None) -> Tensor:
        """Return the tokens with the most attention, ``[ceil(ratio * n)]`` int64."""
        assert attention is not None
        return highest(attention, self._keep)

    def keep_at(self, layer: int) -> int | None:
        """Keep all."""
        return None


def first_read(blend: Blend, layers: int) -> int:
    """Return the first layer whose chunk KV a pass reads; before it, all tokens are computed."""
    return min(CHECK_LAYER, layers - 1) if blend.selector is BlendSelector.HKVD else 0


def make_selector(
    plan: BlendPlan, rows: PlanRows, *, layers: int, check_layer: int = CHECK_LAYER
) -> Selector:
    """Return the selector of the plan's blend."""
    blend, reused = plan.blend, len(rows.reused)
    match blend.selector:
        case BlendSelector.BOUNDARY:
            return BoundarySelector(rows, blend.recompute_ratio)
        case BlendSelector.QUERY:
            return QuerySelector(reused, blend.recompute_ratio)
        case BlendSelector.HKVD:
            return HkvdSelector(
                reused,
                blend.recompute_ratio,
                layers=layers,
                check_layer=check_layer,
                gradual=blend.gradual,
            )


def deviation(fresh: tuple[Tensor, Tensor], reused: tuple[Tensor, Tensor]) -> Tensor:
    """Return the deviation of each token's reused KV from fresh KV, ``[tokens]`` float32.

    Squared differences of keys are summed over heads and channels and divided by their mean over
    the tokens; the same sum for values is added. Keys may all be before rope or all be after rope,
    because rotating both sides changes no difference.

    Args:
        fresh: keys and values, each ``[tokens, kv_heads, head_dim]``.
        reused: the same tensors from the cache.
    """
    total = torch.zeros(len(fresh[0]), device=fresh[0].device)
    for new, old in zip(fresh, reused, strict=True):
        squares = (new.float() - old.float()).square().sum((-1, -2))
        total += squares / squares.mean().clamp(min=1e-30)
    return total


def highest(score: Tensor, count: int) -> Tensor:
    """Return ``[count]`` int64 indices of the highest of ``[n]`` scores, ascending.

    Ties go to the earlier index.
    """
    order = torch.sort(score, descending=True, stable=True).indices
    return order[:count].sort().values


def _ceil(share: float) -> int:
    """Round up, but ignore floating-point error: 0.15 of 100 is 15."""
    return math.ceil(share - 1e-9)
