"""One blending pass in the engine: the chunks to reuse, the load behind them, and the progress.

Used by compute/blend/stage.py only. If a load turns out to be short, the pass begins again with the
chunks that did arrive: a half-read chunk must leave no trace.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field

import numpy as np

from tierkv.compute.batching.batch_plan import Chunk, LoadOrder
from tierkv.compute.batching.sequence import BlendedTokens
from tierkv.compute.blend.passes import BlendOutcome, blend_steps
from tierkv.compute.blend.plan import BlendPlan, ChunkUse, first_read
from tierkv.compute.model.decoder import Decoder
from tierkv.compute.tiers.chunk_lookup import PromptChunk
from tierkv.compute.tiers.loader import LoadJob
from tierkv.kvcore.block import Tier
from tierkv.kvcore.ids import BlockKey
from tierkv.kvcore.request import Blend, HitTokens


@dataclass(slots=True, eq=False)
class ChunkLoad:
    """Chunks on their way from the pool.

    Attributes:
        order: the pages of the chunks, one chunk after the other; holds a separate reference on
            them.
        job: progress of the loader.
        first_block: index of each chunk's first block in the order, by chunk name.
    """

    order: LoadOrder
    job: LoadJob
    first_block: dict[BlockKey, int]

    def has(self, chunk: PromptChunk) -> bool:
        """Whether all blocks of a chunk of this load have arrived intact."""
        return self.first_block[chunk.name] + len(chunk.keys) <= self.job.good


@dataclass(slots=True, eq=False)
class BlendRun:
    """A sequence's blending pass.

    Attributes:
        chunk: all tokens behind the sequence's exact prefix; this pass computes them together.
        blend: the recompute ratio and the selector.
        uses: the chunks that are still usable, in prompt order.
        pages: pages of every chunk by name; the run holds one reference on each page.
        load: chunks from the pool; None if all were in L1, or if the load was given up.
        deadline_s: time when the load counts as failed.
        expected_s: predicted duration of the pass, from the cost of steps; 0.0: unknown.
        scale: ``StepCostFit.scale`` at the time of the prediction.
        computed_s: duration so far.
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
        """Whether the chunks of the next layer are loaded, not needed, or will never arrive."""
        if self.load is None:
            return True
        ready = self.load.job.layer_ready
        return self._next_layer < first_read(self.blend, len(ready)) or (
            ready[self._next_layer].is_set()
        )

    def give_up_load(self) -> None:
        """Continue without the chunks of the load."""
        if self.load is not None:
            self.load.job.given_up = True
            missing, self.load = self.load.first_block, None
            self._keep([use for use in self.uses if use.name not in missing])

    def go_on(self, decoder: Decoder) -> BlendOutcome | None:
        """Compute one layer; return the outcome after the last layer.

        ``can_go_on`` must hold. Bad chunks void the pass: ``uses`` loses these chunks and the pass
        starts again.
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
        """Count reused tokens that were not computed again, by source tier."""
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
        """Drop chunks of failed loads; return True if any were dropped and the pass restarts."""
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
        self.expected_s = 0.0  # The prediction was for another pass.

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
