"""One blending pass in the engine: the chunks it uses, the load it follows, and how far it is.

Used by compute/blend/stage.py only. A pass whose load turns out short begins again with the chunks
that did arrive: a half-read chunk must leave no trace.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field

import numpy as np

from tierkv.compute.batching.batch_plan import Chunk, LoadOrder
from tierkv.compute.batching.sequence import BlendedTokens
from tierkv.compute.blend.passes import BlendOutcome, blend_steps
from tierkv.compute.blend.plan import BlendPlan, ChunkUse
from tierkv.compute.blend.selectors import first_read
from tierkv.compute.model.decoder import Decoder
from tierkv.compute.tiers.chunk_lookup import PromptChunk
from tierkv.compute.tiers.loader import LoadJob
from tierkv.kvcore.ids import BlockKey
from tierkv.kvcore.location import Tier
from tierkv.kvcore.request import Blend, HitTokens


@dataclass(slots=True, eq=False)
class ChunkLoad:
    """Chunks on their way from the pool.

    Attributes:
        order: their pages, one chunk after the other; it holds a reference of its own.
        job: how far the loader is.
        first_block: where each chunk, by its name, begins in the order.
    """

    order: LoadOrder
    job: LoadJob
    first_block: dict[BlockKey, int]

    def has(self, chunk: PromptChunk) -> bool:
        """Whether all blocks of a chunk of this load are good so far."""
        return self.first_block[chunk.name] + len(chunk.keys) <= self.job.good


@dataclass(slots=True, eq=False)
class BlendRun:
    """A sequence's blending pass.

    Attributes:
        chunk: all tokens behind its exact prefix; they are computed by this pass together.
        blend: how much is computed again.
        uses: the chunks it can still use, in prompt order.
        pages: of every chunk by name; the run holds one reference on each page.
        load: chunks that come from the pool; None when all were in L1, or the load was given up.
        deadline_s: when the load counts as failed.
        expected_s: what computing it was to take, by what steps cost; 0.0: unknown.
        scale: ``StepCostFit.scale`` when ``expected_s`` was predicted.
        computed_s: what it took so far.
    """

    chunk: Chunk
    blend: Blend
    uses: list[PromptChunk]
    pages: dict[BlockKey, list[int]]
    load: ChunkLoad | None = None
    deadline_s: float = 0.0
    expected_s: float = 0.0
    scale: float = 1.0
    computed_s: float = 0.0
    _steps: Generator[int, None, BlendOutcome] | None = field(default=None, repr=False)
    _next_layer: int = 0

    @property
    def can_go_on(self) -> bool:
        """Whether the next layer's chunks are there, or not needed, or never will be."""
        if self.load is None:
            return True
        ready = self.load.job.layer_ready
        return self._next_layer < first_read(self.blend, len(ready)) or (
            ready[self._next_layer].is_set()
        )

    def give_up_load(self) -> None:
        """Go on without what was to be loaded."""
        if self.load is not None:
            self.load.job.given_up = True
            missing, self.load = self.load.first_block, None
            self._keep([use for use in self.uses if use.name not in missing])

    def go_on(self, decoder: Decoder) -> BlendOutcome | None:
        """Compute one layer; the outcome after the last one.

        ``can_go_on`` must hold. When chunks turned out bad nothing is computed: look at ``uses``.
        """
        if self._drop_bad():
            return None
        if self._steps is None:
            self._steps = blend_steps(decoder, self._plan())
            next(self._steps)
        try:
            self._next_layer = next(self._steps)
        except StopIteration as end:
            outcome: BlendOutcome = end.value
            return None if self._drop_bad() else outcome
        return None

    def spared(self, outcome: BlendOutcome) -> BlendedTokens:
        """Count reused tokens that were not computed again, by the tier they came from."""
        counts = dict.fromkeys(Tier, 0)
        block_tokens, last = self.chunk.seq.block_tokens, self.chunk.seq.length - 1
        for use in self.uses:
            at = np.arange(max(use.start, self.chunk.start), min(use.stop, last))
            kept = at[~np.isin(at, outcome.selected)]
            blocks, tokens = np.unique((kept - use.start) // block_tokens, return_counts=True)
            for block, count in zip(blocks.tolist(), tokens.tolist(), strict=True):
                counts[self._tier(use, block)] += count
        hits = HitTokens(*(counts[tier] for tier in (Tier.L1, Tier.L2, Tier.L3, Tier.L4)))
        return BlendedTokens(hits, outcome.recomputed_tokens)

    def _tier(self, use: PromptChunk, block: int) -> Tier:
        if self.load is None or use.name not in self.load.first_block:
            return Tier.L1
        return self.load.job.tiers[self.load.first_block[use.name] + block]

    def _drop_bad(self) -> bool:
        """Forget chunks whose load failed; True if there were any: what was computed is void."""
        load = self.load
        if load is None or load.job.good == len(load.job.pages):
            return False
        kept = [use for use in self.uses if use.name not in load.first_block or load.has(use)]
        if len(kept) == len(self.uses):
            return False
        self._keep(kept)
        return True

    def _keep(self, uses: list[PromptChunk]) -> None:
        self.uses = uses
        self._steps, self._next_layer = None, 0
        self.expected_s = 0.0  # What it takes now is another pass.

    def _plan(self) -> BlendPlan:
        seq = self.chunk.seq
        uses = tuple(
            ChunkUse(use.start, use.stop - use.start, np.array(self.pages[use.name]))
            for use in self.uses
        )
        return BlendPlan(
            token_ids=seq.tokens[: seq.length],
            exact=self.chunk.start,
            page_table=seq.page_table[: seq.num_pages],
            reused=uses,
            blend=self.blend,
        )
