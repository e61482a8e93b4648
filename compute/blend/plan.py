"""What a blending pass is to do: which tokens have exact KV, which come from chunks, which are new.

Made by the engine once chunks were found; pure numpy. Positions are those of the prompt, half-open
ranges everywhere; nothing here is computed per layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tierkv.compute.model.batch import Int64Array, token_rows_of
from tierkv.kvcore.request import Blend


@dataclass(frozen=True, slots=True, eq=False)
class ChunkUse:
    """One chunk of a prompt whose KV is in pages of its own.

    Attributes:
        start: prompt position of the chunk's first token.
        tokens: how many it has.
        pages: L1 pages with its keys before rope and its values, from the chunk's first token on.
    """

    start: int
    tokens: int
    pages: Int64Array


@dataclass(frozen=True, slots=True, eq=False)
class BlendPlan:
    """A prompt to blend.

    What lies in ``[exact, N)`` and in none of ``reused`` is fresh: it is always computed, and so is
    the last token, whose logits are wanted.

    Attributes:
        token_ids: the whole prompt, ``[N]``.
        exact: leading tokens whose exact KV is in ``page_table`` already; never computed.
        page_table: pages of the sequence, for all N tokens; none is among the chunks' pages.
        reused: chunks in order, disjoint; their tokens before ``exact`` don't count.
        blend: how much is computed again, and what chooses it.
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
        reused: positions of the tokens that come from chunks, ascending, ``[n]``.
        offsets: of those, their distance from their chunk's first reused token, ``[n]``.
        lengths: of those, how many tokens of their chunk are reused, ``[n]``.
        fresh: positions that are always computed, ascending; the last one is N - 1.
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
        """Number of fresh tokens at the prompt's end, behind the last reused one."""
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
