"""The queue of missing chunks, to be computed without the text before them in their prompt.

Used by the engine only, in its thread. Each request that lacks a chunk gives the chunk credit: the
part of its cost that the request would have saved with the chunk. A chunk is queued at credit 1,
when the requests so far would have paid for it (ski rental: the cost is at most twice that of a
choice made with knowledge of all requests to come).

One chunk at a time joins the batch as a sequence without a client and gets a small part of each
step. A chunk has the lowest rank at first: the chunk starts when no client's sequence is waiting
and gives up pages first. At credit 2 the chunk is popular and goes before the sequences of equal
priority, so even a full node computes popular chunks.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tierkv.compute.batching.batcher import Batcher
from tierkv.compute.batching.reuse_facts import owner_of
from tierkv.compute.batching.sequence import Phase, make_sequence
from tierkv.compute.batching.sequence import Sequence as EngineSequence
from tierkv.compute.l1.page_pool import FullBlock
from tierkv.compute.tiers.chunk_lookup import PromptChunk, isolation_prefix
from tierkv.kvcore.ids import BlockKey
from tierkv.kvcore.request import GenerateRequest, SamplingParams

_QUEUED_CHUNKS = 256
"""Further chunks are dropped; the next request that lacks a dropped chunk queues the chunk again.
"""
_LOWEST_PRIORITY = 1 << 62
"""After every caller's priority, which is an int32."""
_LACKED_CHUNKS = 4096
"""Chunks whose credit is remembered before they are queued; the oldest are forgotten."""
_DUE, _POPULAR = 1.0, 2.0
"""Credit at which a chunk is queued, and at which other sequences may wait for its pages."""


@dataclass(slots=True, eq=False)
class _Wanted:
    """A missing chunk.

    Attributes:
        request: a request that lacked the chunk; gives its tokens, namespace and tenant.
        chunk: the chunk.
        credit: savings that the requests missed so far, in units of the chunk's cost.
    """

    request: GenerateRequest
    chunk: PromptChunk
    credit: float

    @property
    def is_popular(self) -> bool:
        """Whether other sequences should wait for this chunk."""
        return self.credit >= _POPULAR


class Isolation:
    """The queue of chunks to compute, and the sequence of the chunk in progress.

    Attributes:
        idle: set while there is nothing to compute; other threads may wait for this event.
        current: the sequence in progress, or None.
        dropped_chunks: chunks dropped because the queue or the pages were full.
    """

    def __init__(
        self,
        batcher: Batcher,
        *,
        block_tokens: int,
        clear: Callable[[Sequence[int]], None],
        must_wait: Callable[[], bool] = lambda: False,
    ) -> None:
        """Make an empty queue.

        Args:
            batcher: computes the chunks, one at a time.
            block_tokens: tokens per block and page.
            clear: zeroes pages.
            must_wait: returns True if computed chunks could not be published soon.
        """
        self.idle = threading.Event()
        self.idle.set()
        self.current: EngineSequence | None = None
        self.dropped_chunks = 0
        self._batcher = batcher
        self._block_tokens = block_tokens
        self._clear = clear
        self._held_up = must_wait
        self._lacked: dict[BlockKey, float] = {}
        self._queue: dict[BlockKey, _Wanted] = {}
        self._computing: _Wanted | None = None
        self._numbers = itertools.count(-1, -1)  # No caller's sequence has a negative number.

    def want(self, request: GenerateRequest, chunk: PromptChunk, credit: float = _DUE) -> None:
        """Give a missing chunk credit, and queue the chunk once it has enough.

        Args:
            request: the request that lacks the chunk.
            chunk: the missing chunk.
            credit: part of the chunk's cost that the request would have saved with the chunk.
        """
        if self._computing is not None and self._computing.chunk.name == chunk.name:
            return
        if chunk.name in self._queue:
            self._queue[chunk.name].credit += credit
            return
        credit += self._lacked.pop(chunk.name, 0.0)
        if credit < _DUE:
            self._remember(chunk.name, credit)
            return
        if len(self._queue) >= _QUEUED_CHUNKS:
            self.dropped_chunks += 1
            return
        self._queue[chunk.name] = _Wanted(request, chunk, credit)
        self.idle.clear()

    def _remember(self, name: BlockKey, credit: float) -> None:
        if credit <= 0.0:
            return
        self._lacked[name] = credit
        if len(self._lacked) > _LACKED_CHUNKS:
            del self._lacked[next(iter(self._lacked))]

    def begin_next(self) -> EngineSequence | None:
        """Put the next chunk into the batch if no chunk is in progress and there is room."""
        while self.current is None and self._queue:
            wanted = max(self._queue.values(), key=lambda one: one.credit)
            if not self._is_known(wanted.chunk):
                if self._must_wait(wanted):
                    return None
                self.current = self._begin(wanted)
                self._computing = wanted if self.current is not None else None
                self.dropped_chunks += self.current is None
            del self._queue[wanted.chunk.name]
        self._tell_idle()
        return self.current

    def _is_known(self, chunk: PromptChunk) -> bool:
        return len(self._batcher.pool.lookup(chunk.keys)) == len(chunk.keys)

    def _must_wait(self, wanted: _Wanted) -> bool:
        """Return True if the chunk should wait until pages or the publish queue have room."""
        if self._held_up():
            return True
        if not (self._batcher.active or self._batcher.waiting):
            return False
        if self._pages_for(wanted) >= self._batcher.pool.num_pages:
            return False  # Never fits; don't hold up the queue while busy.
        return bool(self._batcher.waiting and not wanted.is_popular) or not self._fits(wanted)

    def _fits(self, wanted: _Wanted) -> bool:
        return self._pages_for(wanted) <= self._batcher.spare_pages

    def _pages_for(self, wanted: _Wanted) -> int:
        tokens = wanted.chunk.stop - wanted.chunk.start + len(isolation_prefix(wanted.request))
        return len(wanted.chunk.keys) - (-tokens // self._block_tokens)

    def _begin(self, wanted: _Wanted) -> EngineSequence | None:
        fits, pool = self._fits(wanted), self._batcher.pool
        pages = pool.allocate(len(wanted.chunk.keys), over_leases=False) if fits else None
        if pages is None:
            return None
        self._clear(pages)
        request, chunk = wanted.request, wanted.chunk
        prefix = isolation_prefix(request)
        request = replace(
            request,
            token_ids=prefix + request.token_ids[chunk.start : chunk.stop],
            sampling=SamplingParams(max_tokens=1),
            priority=request.priority if wanted.is_popular else _LOWEST_PRIORITY,
            blend=None,
            guide="",
            score_token_ids=(),
            embed=False,
        )
        seq = make_sequence(
            next(self._numbers), request, arrival_s=0.0, block_tokens=self._block_tokens
        )
        seq.raw_start, seq.raw_pages = len(prefix), np.array(pages, dtype=np.int64)
        seq.findable_tokens = len(prefix)  # The chunk is already findable as a chunk.
        self._batcher.add(seq)
        return seq

    def computed(self) -> tuple[FullBlock, ...]:
        """Make the chunk in progress findable and return the chunk's blocks.

        The sequence of the chunk must end next.
        """
        assert self.current is not None and self._computing is not None
        chunk, seq = self._computing.chunk, self.current
        assert seq.phase is Phase.RUNNING and seq.computed == seq.length
        blocks = []
        for block in range(len(chunk.keys)):
            spec = chunk.block(block, seq.block_tokens, owner_of(seq))
            page = self._batcher.pool.commit(int(seq.raw_pages[block]), spec)
            seq.raw_pages[block] = page
            blocks.append(FullBlock(spec, page))
        return tuple(blocks)

    def put_back(self) -> None:
        """Queue the chunk in progress again, before its sequence ends for lack of pages."""
        assert self._computing is not None
        self._queue[self._computing.chunk.name] = self._computing

    def ended(self, seq: EngineSequence) -> None:
        """Handle the end of the sequence in progress, whatever the reason of the end."""
        if seq is self.current:
            self._batcher.pool.release(seq.raw_pages.tolist())
            self.current = self._computing = None
            self._tell_idle()

    def stop(self) -> None:
        """Drop all queued chunks."""
        self._lacked.clear()
        self._queue.clear()
        self._tell_idle()

    def _tell_idle(self) -> None:
        if self.current is None and not self._queue:
            self.idle.set()
