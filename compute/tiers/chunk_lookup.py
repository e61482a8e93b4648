"""Chunks of a prompt by name, and which chunks the pool has as a whole.

Used by the engine's blending stage; lookups run in the tiers' worker threads. A chunk with a
missing block counts as missing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tierkv.compute.tiers.finder import Source
from tierkv.kvcore import limits
from tierkv.kvcore.block import ROOT_PARENT, BlockSpec, ChunkNamer, Owner
from tierkv.kvcore.ids import BlockKey
from tierkv.kvcore.request import GenerateRequest

MOST_MISSES = 32
"""Questions to the pool that may end at a missing chunk, per request."""

Find = Callable[[Sequence[BlockKey]], list[tuple[Source, ...]]]
"""Sources of the longest prefix of these keys in the pool (compute/tiers/finder.py)."""

FoundChunks = dict[BlockKey, list[tuple[Source, ...]]]
"""Sources of every block of a chunk, by the chunk's name."""


@dataclass(frozen=True, slots=True, eq=False)
class PromptChunk:
    """A reusable span of a prompt, ``[start, stop)``.

    Attributes:
        keys: keys of the chunk's blocks, counted from its first token; the last block may be
            partial.
    """

    start: int
    stop: int
    keys: tuple[BlockKey, ...]

    @property
    def name(self) -> BlockKey:
        """Equal for equal tokens after an equal isolation prefix, and different otherwise."""
        return self.keys[0]

    def parent(self, block: int) -> BlockKey:
        """Return the key of the preceding block."""
        return self.keys[block - 1] if block else ROOT_PARENT

    def block(self, block: int, tokens: int, owner: Owner) -> BlockSpec:
        """Describe a block of ``tokens`` tokens."""
        return BlockSpec(self.keys[block], self.parent(block), tokens, owner=owner)


def isolation_prefix(request: GenerateRequest) -> tuple[int, ...]:
    """Return the tokens before all chunks of a request; each chunk is computed after them."""
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
    """Find the chunks stored completely in the pool.

    A question covers as many chunks as fit, and a further question is asked behind each missing
    chunk. After ``MOST_MISSES`` missing chunks the rest counts as missing too, because the request
    waits for the answers.
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
    """Return the leading chunks whose keys fit one question; at least one chunk."""
    fitting, blocks = [chunks[0]], len(chunks[0].keys)
    for chunk in chunks[1:]:
        blocks += len(chunk.keys)
        if blocks > limits.MAX_CHAIN_BLOCKS:
            break
        fitting.append(chunk)
    return fitting
