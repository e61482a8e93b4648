"""Chunks of a prompt by name, and which of them the pool has as a whole.

Used by the engine's blending stage; looking up runs in the tiers' worker threads. A chunk of which
one block is missing counts as missing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tierkv.compute.tiers.finder import Source
from tierkv.kvcore import limits
from tierkv.kvcore.block import BlockSpec, Owner
from tierkv.kvcore.block_key import ROOT_PARENT, ChunkNamer
from tierkv.kvcore.ids import BlockKey
from tierkv.kvcore.request import GenerateRequest

MOST_MISSES = 32
"""Questions to the pool that may end at a missing chunk, per request."""

Find = Callable[[Sequence[BlockKey]], list[tuple[Source, ...]]]
"""Sources of the longest prefix of some keys that the pool holds (compute/tiers/finder.py)."""

FoundChunks = dict[BlockKey, list[tuple[Source, ...]]]
"""Sources of every block of a chunk, by the chunk's name."""


@dataclass(frozen=True, slots=True, eq=False)
class PromptChunk:
    """A reusable span of a prompt, ``[start, stop)``.

    Attributes:
        keys: of its blocks, which are counted from its first token; the last one may be partial.
    """

    start: int
    stop: int
    keys: tuple[BlockKey, ...]

    @property
    def name(self) -> BlockKey:
        """Equal for equal tokens after an equal isolation prefix, and for nothing else."""
        return self.keys[0]

    def parent(self, block: int) -> BlockKey:
        """Return the key of the block before."""
        return self.keys[block - 1] if block else ROOT_PARENT

    def block(self, block: int, tokens: int, owner: Owner) -> BlockSpec:
        """Describe a block of ``tokens`` tokens."""
        return BlockSpec(self.keys[block], self.parent(block), tokens, owner=owner)


def isolation_prefix(request: GenerateRequest) -> tuple[int, ...]:
    """Return the tokens that every chunk of a request is computed after: what precedes them all."""
    assert request.blend is not None
    return request.token_ids[: request.blend.chunks[0][0]]


def prompt_chunks(request: GenerateRequest, *, block_tokens: int) -> tuple[PromptChunk, ...]:
    """Name a request's chunks; O(prompt)."""
    assert request.blend is not None
    namer = ChunkNamer(request.namespace_key, isolation_prefix(request))
    return tuple(
        PromptChunk(
            start,
            stop,
            tuple(namer.block_keys(request.token_ids[start:stop], block_tokens=block_tokens)),
        )
        for start, stop in request.blend.chunks
    )


def find_chunks(chunks: Sequence[PromptChunk], find: Find) -> FoundChunks:
    """Find the chunks that the pool holds as a whole.

    Asks about as many as possible in one call, and once more behind each one that is missing. After
    ``MOST_MISSES`` of those the others count as missing too: the request waits for the answers.
    """
    found: FoundChunks = {}
    rest, misses = list(chunks), 0
    while rest and misses < MOST_MISSES:
        asked = _fitting(rest)
        sources = find([key for chunk in asked for key in chunk.keys])
        for chunk in asked:
            count = len(chunk.keys)
            if len(sources) < count:
                break
            found[chunk.name], sources = sources[:count], sources[count:]
        done = sum(1 for chunk in asked if chunk.name in found)
        misses += done < len(asked)
        rest = rest[done if done == len(asked) else done + 1 :]
    return found


def _fitting(chunks: Sequence[PromptChunk]) -> list[PromptChunk]:
    """Return the leading chunks whose keys fit one question; never none."""
    fitting, blocks = [chunks[0]], len(chunks[0].keys)
    for chunk in chunks[1:]:
        blocks += len(chunk.keys)
        if blocks > limits.MAX_CHAIN_BLOCKS:
            break
        fitting.append(chunk)
    return fitting
