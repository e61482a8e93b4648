"""Values from the batcher to the engine: chunks to compute, blocks to load, newly full blocks.

Plain values. Made by compute/batching/batcher.py, carried out by the engine with its loads and
saves; nothing here decides.
"""

from __future__ import annotations

from dataclasses import dataclass

from tierkv.compute.batching.sequence import Sequence
from tierkv.compute.l1.page_pool import FullBlock
from tierkv.kvcore.request import FinishReason


@dataclass(frozen=True, slots=True, eq=False)
class LoadOrder:
    """Blocks to load for a sequence; the order holds a reference on each page.

    Attributes:
        seq: the sequence.
        first_block: index of the first block to load in the prompt.
        pages: destinations of the blocks.
        part_tokens: leading tokens of the last block that count; 0: the block is whole, or a tail.
    """

    seq: Sequence
    first_block: int
    pages: tuple[int, ...]
    part_tokens: int = 0

    @property
    def stop(self) -> int:
        """Leading tokens of the sequence with KV once all blocks have arrived."""
        blocks = self.first_block + len(self.pages)
        if self.part_tokens:
            return (blocks - 1) * self.seq.block_tokens + self.part_tokens
        return self.seq.loaded_tokens(blocks)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens ``[start, start + count)`` of a sequence to compute in this step.

    Attributes:
        samples: the chunk reaches the last known token, and a new token is sampled.
        loading: earlier KV is still being loaded; the result counts only if that load succeeds.
        draft: guessed tokens behind a single known token, computed in the same step as a check.
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
class PrefixMiss:
    """An admitted sequence, and the number of tokens missing from L1 that the pool may have."""

    seq: Sequence
    tokens: int


@dataclass(frozen=True, slots=True)
class PageCopy:
    """The first ``tokens`` tokens of page ``source`` go to page ``target``, padded with zeros."""

    source: int
    target: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What the engine should do now.

    Attributes:
        copies: page copies to make first, in this order: a target may be the source of a later
            copy.
        victim: a sequence of low rank to preempt before the step can be chosen. The engine saves
            valuable blocks of the victim, calls ``Batcher.preempt`` and plans again. Until then
            everything but ``copies`` is empty.
        fresh_pages: pages to zero after the copies; they may hold garbage of a failed load.
        chunks: computed together in one forward pass.
        chunk_lookups: sequences with a complete exact prefix and chunks to look up.
    """

    copies: tuple[PageCopy, ...] = ()
    victim: Sequence | None = None
    fresh_pages: tuple[int, ...] = ()
    chunks: tuple[Chunk, ...] = ()
    chunk_lookups: tuple[Sequence, ...] = ()


@dataclass(frozen=True, slots=True)
class ChunkOutcome:
    """The results of a computed chunk; ``finish`` ends the sequence."""

    new_tokens: tuple[int, ...]
    finish: FinishReason | None
    full_blocks: tuple[FullBlock, ...]
