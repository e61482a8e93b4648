"""The chunks of one step while the batcher chooses them; the choice can stop and go on.

Part of the batcher (compute/batching/batcher.py) and used by nothing else; a module of its own
because a choice has a state of its own. When pages are short a sequence must lose its pages, and
the engine may first save what they hold, which keeps some of the pages in use. So how many
sequences must go is known only one by one: the choice stops at each, and goes on once the sequence
has left the batch.

    go_on() -> victim      the caller takes it out of the batch, then
    go_on() -> victim      ... perhaps another one, then
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
"""A chunk in isolation gets at most this part of a step that callers' sequences share with it."""


class StepChoice:
    """Decodes, then prefill chunks, in rank order until the token budget is used.

    Attributes:
        fresh: pages that were given out and may hold garbage.
        copies: parts of blocks to copy, in order; ``take_copies`` empties it.
    """

    def __init__(
        self, active: Mapping[int, Sequence], pool: PagePool, parts: PartReuse, *, budget: int
    ) -> None:
        """Begin the choice of a step.

        Args:
            active: the batch, as it changes while the choice is under way.
            pool: the pages.
            parts: what is known of blocks in which sequences go on.
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
        running.sort(key=lambda seq: (seq.length - seq.computed > 1, seq.rank))
        self._ahead = deque(running)

    @property
    def chunks(self) -> list[Chunk]:
        """The chunks chosen so far, in the order in which they were chosen."""
        return list(self._chosen.values())

    def take_copies(self) -> tuple[PageCopy, ...]:
        """Return the copies to make before anything else happens, and forget them."""
        copies, self.copies = tuple(self.copies), []
        return copies

    def go_on(self) -> Sequence | None:
        """Choose until a sequence must leave the batch first (that one) or all is chosen (None)."""
        while self._ahead and self._left:
            seq = self._ahead[0]
            if seq.phase is Phase.RUNNING:  # Else it lost its pages to one of higher rank.
                victim = self._choose(seq)
                if victim is not None:
                    self._chosen.pop(victim.seq_id, None)
                    return victim
            self._ahead.popleft()
        return None

    def _choose(self, seq: Sequence) -> Sequence | None:
        """Choose a sequence's chunk; returns a sequence whose pages are needed for it.

        May be called again for the same sequence: what was done for it before is not done twice.
        """
        if seq.wants_part:
            victim = self._provide_pages(seq, seq.computed + 1)
            if victim is not None:
                return victim
            self._begin_block(seq)
        count = min(seq.length - seq.computed, self._left)
        if seq.is_background and len(self._active) > 1:
            count = min(count, max(1, self._budget // _BACKGROUND_SHARE))
        victim = self._provide_pages(seq, seq.computed + count)
        if victim is None:
            self._chosen[seq.seq_id] = chunk_of(seq, seq.computed, count)
            self._left -= count
        return victim

    def _begin_block(self, seq: Sequence) -> None:
        """Fill a sequence's new page with what is known of that block."""
        copy = self._parts.take(seq)
        if copy is not None:
            self.copies.append(copy)
            # A sequence that lost its pages in this step may have had the same page.
            self.fresh = [page for page in self.fresh if page != copy.target]

    def _provide_pages(self, seq: Sequence, tokens: int) -> Sequence | None:
        """Give a sequence pages for ``tokens``; returns who must give up pages if there are none.

        That is the running sequence of lowest rank, which may be this one. A chunk in isolation
        takes no pages of others.
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


def chunk_of(seq: Sequence, start: int, count: int, *, loading: bool = False) -> Chunk:
    """Describe tokens of a sequence to compute; a chunk in isolation samples nothing."""
    samples = start + count == seq.length and not seq.is_background
    return Chunk(seq, start, count, samples=samples, loading=loading)
