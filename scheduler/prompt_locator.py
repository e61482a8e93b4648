"""Locating a prompt: which part of the prompt's KV is in pages, in the pool's memory, on disks.

Used by the front's generation. The directory is asked with LOOK_ONLY, hence locating reserves
nothing, computes nothing, and is no use of the blocks for any eviction policy.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Protocol

from tierkv.kvcore.block import ChunkNamer, block_keys
from tierkv.kvcore.ids import BlockKey
from tierkv.kvcore.layout import BlockLayout
from tierkv.kvcore.request import GenerateRequest
from tierkv.metaserver.client import LOOK_ONLY, LocateReply
from tierkv.scheduler.directory_client import NOTHING_FOUND


class LocateDesk(Protocol):
    """The part of DirectoryClient used here; a failure is NOTHING_FOUND."""

    async def find(self, keys: Sequence[BlockKey], *, reserve_s: float = 0.0) -> LocateReply: ...


@dataclass(frozen=True, slots=True)
class PromptPlaces:
    """Where the KV of a prompt is.

    Attributes:
        wanted_tokens: the most tokens that could be stored: those of full blocks, or of chunks.
        found_tokens: stored tokens in any tier, from the beginning on.
        l1_tokens: in the pages of one compute node, the one with the most.
        memory_tokens: in the memory of the pool (L2, L3).
        disk_tokens: behind those in memory: these begin with a block that only disks have (L4).
        l1_bytes: in the pages of all compute nodes.
        memory_bytes: of each block once, as stored; an upper bound for codecs of no fixed size.
        disk_bytes: the same.
    """

    wanted_tokens: int = 0
    found_tokens: int = 0
    l1_tokens: int = 0
    memory_tokens: int = 0
    disk_tokens: int = 0
    l1_bytes: int = 0
    memory_bytes: int = 0
    disk_bytes: int = 0

    def __add__(self, other: PromptPlaces) -> PromptPlaces:
        names = [field.name for field in fields(self)]
        return PromptPlaces(*[getattr(self, name) + getattr(other, name) for name in names])

    @property
    def bytes_alone(self) -> PromptPlaces:
        """The same without tokens."""
        return PromptPlaces(
            l1_bytes=self.l1_bytes, memory_bytes=self.memory_bytes, disk_bytes=self.disk_bytes
        )


@dataclass(frozen=True, slots=True)
class _Span:
    """Consecutive blocks, with the number of tokens."""

    keys: Sequence[BlockKey]
    tokens: int


async def locate_prompt(
    desk: LocateDesk, request: GenerateRequest, layout: BlockLayout
) -> PromptPlaces | None:
    """Return where a prompt's KV is; None if the directory does not answer.

    The tokens of a prompt with chunks are those of the chunks, which prompts reuse at any
    position; the bytes are those of the prompt's beginning, too.
    """
    if request.kv_codec is not None:
        layout = replace(layout, codec=request.kv_codec)
    size, ids = layout.block_tokens, request.token_ids
    keys = block_keys(request.namespace_key, ids, block_tokens=size)
    spans = [_Span(keys, len(keys) * size), *_chunk_spans(request, size)]
    asked = [span for span in spans if span.keys]
    replies = await asyncio.gather(*(desk.find(s.keys, reserve_s=LOOK_ONLY) for s in asked))
    if any(reply is NOTHING_FOUND for reply in replies):
        return None
    places = [_places(*pair, layout) for pair in zip(asked, replies, strict=True)]
    if request.blend is not None and places and spans[0].keys:
        places[0] = places[0].bytes_alone
    return sum(places, PromptPlaces())


def _chunk_spans(request: GenerateRequest, block_tokens: int) -> Iterable[_Span]:
    if request.blend is None:
        return
    chunks, ids = request.blend.chunks, request.token_ids
    namer = ChunkNamer(request.namespace_key, ids[: chunks[0][0]])
    for start, stop in chunks:
        keys = namer.block_keys(ids[start:stop], block_tokens=block_tokens)
        yield _Span(keys, stop - start)


def _places(span: _Span, reply: LocateReply, layout: BlockLayout) -> PromptPlaces:
    """Read a reply; the last block of a chunk may have fewer tokens than a block."""

    def tokens(blocks: int) -> int:
        return min(blocks * layout.block_tokens, span.tokens)

    pages = [near.l1_blocks for near in reply.coverage]
    found = max([reply.prefix_blocks, *(near.l2_blocks for near in reply.coverage)])
    on_disk = reply.prefix_blocks - reply.memory_blocks
    return PromptPlaces(
        wanted_tokens=span.tokens,
        found_tokens=tokens(found),
        l1_tokens=tokens(max(pages, default=0)),
        memory_tokens=tokens(reply.memory_blocks),
        disk_tokens=tokens(reply.prefix_blocks) - tokens(reply.memory_blocks),
        l1_bytes=sum(pages) * layout.payload_bytes,
        memory_bytes=reply.memory_blocks * layout.stored_bytes,
        disk_bytes=on_disk * layout.stored_bytes,
    )
