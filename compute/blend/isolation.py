"""Chunks that were missing, computed once more without what stood before them in their prompt.

Used by the engine only, in its thread. One at a time joins the batch as a sequence nobody waits
for: its rank is below all others, it gives its pages up first, and what does not fit is dropped.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from compute.batcher import Batcher, FullBlock
from compute.blend.lookup import PromptChunk, isolation_prefix
from compute.sequence import Phase, make_sequence
from compute.sequence import Sequence as EngineSequence
from kvcore.ids import BlockKey
from kvcore.request import GenerateRequest, SamplingParams

_QUEUED_CHUNKS = 256
"""More are dropped: whoever asks for them again has them queued again."""
_LOWEST_PRIORITY = 1 << 62
"""Behind every caller's, which is an int32."""


@dataclass(frozen=True, slots=True, eq=False)
class _Wanted:
    """A chunk, and a request that had it: whose tokens, namespace and tenant they are."""

    request: GenerateRequest
    chunk: PromptChunk


class Isolation:
    """The queue of chunks to compute, and the one under way.

    Attributes:
        idle: set while there is nothing to compute; other threads may wait for it.
        current: the sequence under way, or None.
        dropped_chunks: given up for want of room.
    """

    def __init__(
        self, batcher: Batcher, *, block_tokens: int, clear: Callable[[Sequence[int]], None]
    ) -> None:
        """Make an empty queue; ``clear`` zeroes pages."""
        self.idle = threading.Event()
        self.idle.set()
        self.current: EngineSequence | None = None
        self.dropped_chunks = 0
        self._batcher = batcher
        self._block_tokens = block_tokens
        self._clear = clear
        self._queue: dict[BlockKey, _Wanted] = {}
        self._computing: _Wanted | None = None
        self._numbers = itertools.count(-1, -1)  # No caller's sequence has a negative number.

    def want(self, request: GenerateRequest, chunk: PromptChunk) -> None:
        """Queue a chunk of a request unless it is queued or under way."""
        computing = self._computing is not None and self._computing.chunk.name == chunk.name
        if computing or chunk.name in self._queue:
            return
        if len(self._queue) >= _QUEUED_CHUNKS:
            self.dropped_chunks += 1
            return
        self._queue[chunk.name] = _Wanted(request, chunk)
        self.idle.clear()

    def begin_next(self) -> EngineSequence | None:
        """Put the next chunk into the batch if none is under way and there is room for it."""
        pool = self._batcher.pool
        while self.current is None and self._queue:
            wanted = next(iter(self._queue.values()))
            keys = wanted.chunk.keys
            if len(pool.lookup(keys)) < len(keys):
                tokens = wanted.chunk.stop - wanted.chunk.start
                tokens += len(isolation_prefix(wanted.request))
                if self._batcher.spare_pages < len(keys) - (-tokens // self._block_tokens):
                    if self._batcher.active or self._batcher.waiting:
                        return None  # They will end.
                    self.dropped_chunks += 1
                else:
                    self.current, self._computing = self._begin(wanted), wanted
            del self._queue[wanted.chunk.name]
        self._tell_idle()
        return self.current

    def _begin(self, wanted: _Wanted) -> EngineSequence | None:
        pages = self._batcher.pool.allocate(len(wanted.chunk.keys))
        if pages is None:
            return None
        self._clear(pages)
        prefix, chunk = isolation_prefix(wanted.request), wanted.chunk
        request = replace(
            wanted.request,
            token_ids=prefix + wanted.request.token_ids[chunk.start : chunk.stop],
            sampling=SamplingParams(max_tokens=1),
            priority=_LOWEST_PRIORITY,
            blend=None,
        )
        seq = make_sequence(
            next(self._numbers), request, arrival_s=0.0, block_tokens=self._block_tokens
        )
        seq.raw_start, seq.raw_pages = len(prefix), np.array(pages, dtype=np.int64)
        seq.findable_tokens = len(prefix)  # The chunk itself is findable as a chunk, not twice.
        self._batcher.add(seq)
        return seq

    def computed(self) -> tuple[FullBlock, ...]:
        """Make the chunk under way findable; answers its blocks. Its sequence must end next."""
        assert self.current is not None and self._computing is not None
        chunk, seq = self._computing.chunk, self.current
        assert seq.phase is Phase.RUNNING and seq.computed == seq.length
        blocks = []
        for block, key in enumerate(chunk.keys):
            parent = chunk.parent(block)
            page = self._batcher.pool.commit(
                int(seq.raw_pages[block]), key, parent, tenant=seq.request.tenant
            )
            seq.raw_pages[block] = page
            blocks.append(FullBlock(key, parent, page))
        return tuple(blocks)

    def ended(self, seq: EngineSequence) -> None:
        """Take note that the sequence under way is out of the batch, whatever the reason."""
        if seq is self.current:
            self._batcher.pool.release(seq.raw_pages.tolist())
            self.current = self._computing = None
            self._tell_idle()

    def stop(self) -> None:
        """Drop what is queued."""
        self._queue.clear()
        self._tell_idle()

    def _tell_idle(self) -> None:
        if self.current is None and not self._queue:
            self.idle.set()
