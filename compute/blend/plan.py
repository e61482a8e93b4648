"""The plan of a blending pass: which tokens have exact KV, come from chunks, or are new.

The engine makes a plan once the chunks were found; pure numpy. Positions are prompt positions and
all ranges are half-open; no index here is computed per layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tierkv.compute.model.batch import Int64Array, token_rows_of
from tierkv.kvcore.request import Blend


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
