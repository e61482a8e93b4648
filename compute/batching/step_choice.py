"""The chunks of a step while the batcher chooses; the choice can stop and continue.

Part of the batcher (compute/batching/batcher.py) and used by nothing else; a separate module
because a choice has state. When pages are short a sequence must lose its pages. The engine may
first save blocks of the victim, and the saved pages stay in use for a while. How many victims are
needed is known only one at a time: the choice stops at each victim, and continues once the victim
has left the batch.

    go_on() -> victim      the caller takes the victim out of the batch, then
    go_on() -> victim      ... perhaps another victim, then
    go_on() -> None        chunks, fresh and copies are complete
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from tierkv.compute.batching.batch_plan import Chunk, PageCopy
from tierkv.compute.batching.part_reuse import PartReuse
from tierkv.compute.batching.sequence import Phase, Sequence
from tierkv.compute.l1.page_pool import PagePool

_BACKGROUND_SHARE = 8
"""A chunk in isolation gets at most this part of a step shared with callers' sequences."""
_BULK_SHARE = 4
"""Prompts ranked behind a prompt of higher priority get at most this part of the step, together.

The first token of the urgent prompt waits for the whole step, so the step is kept short.
"""


class StepChoice:
    """Decodes, then prefill chunks, in rank order until the token budget is used.

    Attributes:
        fresh: newly allocated pages, which may hold garbage.
        copies: parts of blocks to copy, in order; ``take_copies`` empties the list.
    """

    def __init__(
        self, active: Mapping[int, Sequence], pool: PagePool, parts: PartReuse, *, budget: int
    ) -> None:
        """Begin the choice of a step.

        Args:
            active: live view of the batch, which changes during the choice.
            pool: the pages.
            parts: known parts of blocks.
            budget: tokens of the step.
        """
        self.fresh: list[int] = []
        self.copies: list[PageCopy] = []
        self._active = active
        self._pool = pool
        self._parts = parts
        self._budget = self._left = budget
        self._chosen: dict[int, Chunk] = {}
        running = [seq for seq in active.values() if seq.phase is Phase.RUNNING]
        running.sort(key=lambda seq: (_is_prefill(seq), seq.rank))
        self._ahead = deque(running)
        self._urgent: int | None = None
        self._bulk_left = max(1, budget // _BULK_SHARE)

    @property
    def chunks(self) -> list[Chunk]:
        """The chosen chunks, in order of choice."""
        return list(self._chosen.values())

    def take_copies(self) -> tuple[PageCopy, ...]:
        """Return the copies to make before anything else happens, and forget the copies here."""
        copies, self.copies = tuple(self.copies), []
        return copies

    def go_on(self) -> Sequence | None:
        """Choose until all is chosen (None) or a victim must leave the batch first (the victim)."""
        while self._ahead and self._left:
            seq = self._ahead[0]
            if seq.phase is Phase.RUNNING:  # Else the sequence was a victim itself.
                victim = self._choose(seq)
                if victim is not None:
                    self._chosen.pop(victim.seq_id, None)
                    return victim
            self._ahead.popleft()
        return None

    def _choose(self, seq: Sequence) -> Sequence | None:
        """Choose a sequence's chunk; return a victim if pages are short.

        May be called again for the same sequence after the victim has left; finished parts of the
        work are not repeated.
        """
        if seq.wants_part:
            victim = self._provide_pages(seq, seq.computed + 1)
            if victim is not None:
                return victim
            self._begin_block(seq)
        count = min(seq.length - seq.computed, self._left)
        if seq.is_background and len(self._active) > 1:
            count = min(count, max(1, self._budget // _BACKGROUND_SHARE))
        is_bulk = self._is_bulk(seq)
        if is_bulk:
            count = min(count, self._bulk_left)
        if not count:
            return None
        victim = self._provide_pages(seq, seq.computed + count)
        if victim is None:
            self._chosen[seq.seq_id] = chunk_of(seq, seq.computed, count)
            self._left -= count
            self._bulk_left -= count if is_bulk else 0
            if self._urgent is None and _is_prefill(seq):
                self._urgent = seq.request.priority
        return victim

    def _is_bulk(self, seq: Sequence) -> bool:
        """Return True if a prompt of higher priority is in the step before this prompt."""
        if self._urgent is None or not _is_prefill(seq) or seq.is_background:
            return False
        return seq.request.priority > self._urgent

    def _begin_block(self, seq: Sequence) -> None:
        """Fill a sequence's new page with the known part of the block."""
        copy = self._parts.take(seq)
        if copy is not None:
            self.copies.append(copy)
            # A victim of this step may have had the same page.
            self.fresh = [page for page in self.fresh if page != copy.target]

    def _provide_pages(self, seq: Sequence, tokens: int) -> Sequence | None:
        """Give a sequence pages for ``tokens``; return a victim if pages are short.

        The victim is the running sequence of lowest rank, perhaps the sequence itself. A chunk in
        isolation takes no pages from callers' sequences: the chunk itself is the victim.
        """
        missing = seq.pages_for(tokens) - seq.num_pages
        if missing <= 0:
            return None
        pages = self._pool.allocate(missing)
        if pages is None:
            running = (x for x in self._active.values() if x.phase is Phase.RUNNING)
            return seq if seq.is_background else max(running, key=lambda x: x.rank)
        seq.add_pages(pages)
        self.fresh.extend(pages)
        return None


def _is_prefill(seq: Sequence) -> bool:
    """Return True if more than the last token is left to compute."""
    return seq.length - seq.computed > 1


def chunk_of(seq: Sequence, start: int, count: int, *, loading: bool = False) -> Chunk:
    """Describe tokens of a sequence to compute; a chunk in isolation samples nothing."""
    samples = start + count == seq.length and not seq.is_background
    return Chunk(seq, start, count, samples=samples, loading=loading)
