"""What the batcher tells the engine: chunks to compute, blocks to load, blocks that became full.

Plain values. Made by compute/batching/batcher.py, carried out by the engine and those who load and
save for it; nothing here decides.
"""

from __future__ import annotations

from dataclasses import dataclass

from tierkv.compute.batching.sequence import Sequence
from tierkv.compute.l1.full_block import FullBlock
from tierkv.kvcore.request import FinishReason


@dataclass(frozen=True, slots=True, eq=False)
class LoadOrder:
    """Blocks to load for a sequence; the order holds its own reference on the pages.

    Attributes:
        seq: whose blocks.
        first_block: index of the first of them in the prompt.
        pages: where they go.
        part_tokens: of the last block only so many tokens count; 0: it is whole, or a tail.
    """

    seq: Sequence
    first_block: int
    pages: tuple[int, ...]
    part_tokens: int = 0

    @property
    def stop(self) -> int:
        """Leading tokens of the sequence that have KV when all blocks are there."""
        blocks = self.first_block + len(self.pages)
        if self.part_tokens:
            return (blocks - 1) * self.seq.block_tokens + self.part_tokens
        return self.seq.loaded_tokens(blocks)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens ``[start, start + count)`` of a sequence to compute in this step.

    Attributes:
        samples: whether the chunk reaches the last known token, so that a new one is sampled.
        loading: whether earlier KV is still being loaded; the result counts only if that succeeds.
        draft: guessed tokens behind a single known one, computed along to be checked.
    """

    seq: Sequence
    start: int
    count: int
    samples: bool
    loading: bool = False
    draft: tuple[int, ...] = ()

    @property
    def rows(self) -> int:
        """Tokens to compute, guesses included."""
        return self.count + len(self.draft)


@dataclass(frozen=True, slots=True)
class Plan:
    """What the engine should do now.

    Attributes:
        chunks: computed together in one forward pass.
        fresh_pages: pages to zero first; they may hold garbage of a failed load.
        locates: sequences whose next blocks should be looked up in the pool.
        chunk_lookups: sequences whose chunks behind their exact prefix should be looked up.
    """

    chunks: tuple[Chunk, ...]
    fresh_pages: tuple[int, ...]
    locates: tuple[Sequence, ...]
    chunk_lookups: tuple[Sequence, ...] = ()


@dataclass(frozen=True, slots=True)
class ChunkOutcome:
    """What a computed chunk led to; ``finish`` ends the sequence."""

    new_tokens: tuple[int, ...]
    finish: FinishReason | None
    full_blocks: tuple[FullBlock, ...]
