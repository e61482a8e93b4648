"""What to compute next: continuous batching with chunked prefill under a token budget.

A pure core: the engine tells it what happened (a request came, a load ended, a chunk was
computed) and carries out the plan it gets. It owns the page pool; it knows no tensors, threads or
clocks.
"""

from __future__ import annotations

import sys
from bisect import insort
from collections.abc import Callable, Collection, Iterable
from typing import Final

from tierkv.compute.batching.batch_plan import Chunk, ChunkOutcome, LoadOrder, Plan
from tierkv.compute.batching.part_reuse import PartReuse
from tierkv.compute.batching.reuse_facts import block_of, facts_of_hits, prompt_blocks
from tierkv.compute.batching.sequence import Phase, Sequence
from tierkv.compute.l1.full_block import FullBlock
from tierkv.compute.l1.page_pool import PagePool
from tierkv.kvcore.ids import BlockKey
from tierkv.kvcore.location import Tier

_SCAN_LIMIT = 512
"""Waiting sequences looked at in one plan; more would cost more than the step saves."""

_BACKGROUND_SHARE = 8
"""Beside others, chunks in isolation get at most this part of a step: nobody waits for them."""


class Batcher:
    """The queue, the batch and the pages. Mutated only by the methods below, in one thread.

    Attributes:
        pool: the pages.
        parts: of blocks, which sequences take over from each other.
        preemptions: how often a sequence lost its pages.
    """

    def __init__(
        self,
        pool: PagePool,
        *,
        max_batch_tokens: int,
        max_running: int,
        wants_locate: Callable[[int], bool] = lambda missing_tokens: False,
        demote: Callable[[Sequence], None] = lambda seq: None,
        parts: PartReuse | None = None,
    ) -> None:
        self.pool = pool
        self.parts = parts or PartReuse(pool, lambda source, target, tokens: None)
        self.preemptions = 0
        self._max_batch_tokens = max_batch_tokens
        self._max_running = max_running
        self._wants_locate = wants_locate
        self._demote = demote
        self._waiting: list[Sequence] = []
        self._active: dict[int, Sequence] = {}
        self._loads: dict[int, LoadOrder] = {}
        self._claims: dict[BlockKey, int] = {}
        self._chunk_lookups: list[Sequence] = []
        self._background: Sequence | None = None

    @property
    def waiting(self) -> int:
        """Sequences in the queue that somebody waits for."""
        queued = self._background is not None and self._background.phase is Phase.WAITING
        return len(self._waiting) - queued

    @property
    def active(self) -> int:
        """Sequences admitted and not ended that somebody waits for."""
        background = self._background is not None and self._background.seq_id in self._active
        return len(self._active) - background

    def uncomputed_tokens(self) -> int:
        """Tokens to compute that callers wait for, queued and running; O(sequences).

        What is being loaded is none of them, or a node that loads long prefixes would look busy to
        whoever chooses among nodes. What gives a load up counts again.
        """
        everyone = (*self._waiting, *self._active.values())
        return sum(seq.length - self._known(seq) for seq in everyone if not seq.is_background)

    def _known(self, seq: Sequence) -> int:
        """Tokens that have KV, or will have when their load is over."""
        order = self._loads.get(seq.seq_id)
        return seq.computed if order is None else order.stop

    def ahead_of(self, seq: Sequence) -> tuple[int, int, int]:
        """What is computed beside a sequence, behind loads too; O(active).

        Returns:
            tokens and sequences that come before its own, and how many sequences come after it.
        """
        others = [x for x in self._active.values() if x.phase in _COMPUTED_SOON and x is not seq]
        before = [x for x in others if x.rank < seq.rank and x.phase is not Phase.LOCATING]
        tokens = sum(x.length - self._known(x) for x in before)
        return tokens, len(before), sum(x.rank > seq.rank for x in others)

    def sequences(self) -> list[Sequence]:
        """All sequences not ended."""
        return [*self._active.values(), *self._waiting]

    def add(self, seq: Sequence) -> None:
        """Queue a sequence; the caller has checked that it can ever fit.

        There may be one at a time in the background; it ends when others need its pages.
        """
        if seq.is_background:
            assert self._background is None
            self._background = seq
        insort(self._waiting, seq, key=_rank)

    def end(self, seq: Sequence) -> None:
        """Take a sequence out, whatever it was doing, and give its pages back."""
        if seq.phase is Phase.WAITING:
            self._waiting.remove(seq)
        elif seq.phase is not Phase.ENDED:
            self._leave(seq)
        seq.phase = Phase.ENDED
        if seq is self._background:
            self._background = None

    def located(self, seq: Sequence, blocks: int, part_tokens: int = 0) -> LoadOrder | None:
        """Take note that ``blocks`` more blocks can be loaded; answers the order to do so.

        With ``part_tokens`` the last of them is another prompt's, which begins with so many tokens
        of this one.
        """
        if seq.phase is not Phase.LOCATING:
            return None
        pages = self.pool.allocate(blocks) if blocks else None
        if not pages:
            self._prefix_ends(seq)
            return None
        order = LoadOrder(seq, seq.num_pages, tuple(pages), part_tokens)
        self.pool.acquire(pages)
        seq.add_pages(pages)
        seq.phase = Phase.LOADING
        self._loads[seq.seq_id] = order
        return order

    def loaded(self, order: LoadOrder, tiers: tuple[Tier, ...]) -> None:
        """Keep the leading blocks that arrived (one tier each); the rest will be computed."""
        seq = order.seq
        if seq.phase is not Phase.LOADING or self._loads.get(seq.seq_id) is not order:
            return
        del self._loads[seq.seq_id]
        good = order.first_block + len(tiers)
        if len(tiers) < len(order.pages):  # Else pages after them hold a chunk computed meanwhile.
            surplus = seq.pages[good:]
            seq.num_pages = good
            self.pool.release(surplus)
        in_part = order.part_tokens if len(tiers) == len(order.pages) else 0
        seq.computed = order.stop if in_part else seq.loaded_tokens(good)
        if not seq.hits_final:
            seq.hit_tiers.extend(tiers[:-1] if in_part else tiers)
            if in_part:
                seq.part_tier, seq.part_tokens = tiers[-1], in_part
        self._prefix_ends(seq)
        self._commit(seq)

    def load_ended(self, order: LoadOrder) -> None:
        """Take back the order's own reference: nobody writes into its pages any more."""
        self.pool.release(order.pages)

    def _prefix_ends(self, seq: Sequence) -> None:
        """Take note that the exact prefix is complete: compute the rest, or ask for chunks."""
        seq.phase = Phase.RUNNING
        if seq.wants_chunks:
            seq.phase = Phase.CHUNKS
            self._chunk_lookups.append(seq)

    def begin_blend(self, seq: Sequence, load_blocks: int) -> list[int] | None:
        """Give a sequence pages for its whole prompt, to be computed by a blending pass.

        What follows its exact prefix will be approximate: it is never made findable, and nobody
        waits for it. Blending may not take pages that others in the batch need.

        Returns:
            pages: ``load_blocks`` pages to load chunks into, one reference each, which the caller
            releases; None when pages are short, and nothing has changed.
        """
        assert seq.phase is Phase.CHUNKS
        pages = self.pool.allocate(load_blocks) if load_blocks <= self.spare_pages else None
        own = None
        if pages is not None:
            own = self.pool.allocate(seq.pages_for(seq.length) - seq.num_pages)
        if pages is None or own is None:
            self.pool.release(pages or [])
            return None
        seq.add_pages(own)
        self._drop_claims(seq)
        seq.findable_tokens = seq.computed
        seq.phase = Phase.BLENDING
        return pages

    def blended(self, seq: Sequence) -> None:
        """Take note that a blending pass is done; its tokens are ``computed`` next."""
        assert seq.phase is Phase.BLENDING
        seq.blend = None
        seq.phase = Phase.RUNNING

    def compute_exactly(self, seq: Sequence) -> None:
        """Give blending up; pages that may hold parts of it are not kept."""
        assert seq.phase in (Phase.CHUNKS, Phase.BLENDING)
        kept = seq.computed // seq.block_tokens
        surplus = seq.pages[kept:]
        seq.num_pages = kept
        self.pool.release(surplus)
        seq.blend = None
        seq.findable_tokens = sys.maxsize
        seq.phase = Phase.RUNNING

    def plan(self, now: float, ready_loads: Collection[int] = ()) -> Plan:
        """Admit what fits and choose the next step's chunks.

        Args:
            now: the engine's clock.
            ready_loads: ids of loading sequences whose first layer has arrived and that have not
                begun; one of them begins behind its own load when nothing else could run.
        """
        locates = self._admit()
        fresh: list[int] = []
        chosen = self._choose(fresh)
        if not chosen:
            chosen = self._choose_loading(ready_loads, fresh)
        for chunk in chosen:
            if chunk.seq.started_s < 0:
                chunk.seq.started_s = now
        lookups = [seq for seq in self._chunk_lookups if seq.phase is Phase.CHUNKS]
        self._chunk_lookups.clear()
        return Plan(tuple(chosen), tuple(fresh), tuple(locates), tuple(lookups))

    def computed(
        self, chunk: Chunk, tokens: tuple[int, ...], stop_ids: Collection[int]
    ) -> ChunkOutcome:
        """Take note that a chunk's KV is in its pages, and of the tokens that follow it.

        All of them but the last were guessed, so that their KV is there as well. KV of wrong
        guesses counts as never computed: the next chunk writes over it.
        """
        seq = chunk.seq
        assert seq.phase is Phase.RUNNING and seq.computed == chunk.start
        taken, finish = seq.extend(tokens, stop_ids)
        seq.computed += chunk.count + min(taken, max(0, len(tokens) - 1))
        full = self._commit(seq)
        if chunk.start < seq.prompt_length <= seq.computed:
            self.parts.open_end(seq)
        if chunk.samples:
            self._drop_claims(seq)
        return ChunkOutcome(tokens[:taken], finish, full)

    def filling(self, chunk: Chunk) -> tuple[FullBlock, ...]:
        """Name the blocks that computing a chunk makes full, for those who save them meanwhile."""
        seq = chunk.seq
        if not seq.request.use_cache:
            return ()
        blocks = []
        findable = min(chunk.start + chunk.count, seq.findable_tokens)
        for block in range(chunk.start // seq.block_tokens, findable // seq.block_tokens):
            blocks.append(FullBlock(block_of(seq, block), int(seq.page_table[block])))
        return tuple(blocks)

    def _commit(self, seq: Sequence) -> tuple[FullBlock, ...]:
        """Make newly full blocks findable; another sequence's equal page replaces ours."""
        if not seq.request.use_cache:
            return ()
        blocks = []
        findable = min(seq.computed, seq.findable_tokens) // seq.block_tokens
        for block in range(seq.committed, findable):
            spec, page = block_of(seq, block), int(seq.page_table[block])
            page = self.pool.commit(page, spec, prompt_blocks=prompt_blocks(seq))
            seq.page_table[block] = page
            self.parts.committed(seq, block, page)
            self._unclaim(seq, spec.key)
            blocks.append(FullBlock(spec, page))
        seq.committed += len(blocks)
        return tuple(blocks)

    def _admit(self) -> list[Sequence]:
        """Move sequences from the queue into the batch while there is room, in rank order."""
        locates: list[Sequence] = []
        if not self._waiting or self.active >= self._max_running:
            return locates
        spare = self.spare_pages
        for seq in self._waiting[:_SCAN_LIMIT]:
            if self.active >= self._max_running:
                break
            if seq.blocked_on in self._claims:
                continue
            hits = self.pool.lookup(seq.keys[: seq.usable_blocks])
            if self._must_wait(seq, len(hits)):
                continue
            needed = seq.pages_for(seq.length) - len(hits) + self.pool.unreferenced(hits)
            if needed > spare:
                if self._background is not None and self._background.rank > seq.rank:
                    self.end(self._background)
                break  # Nobody overtakes a request that waits for pages: it could starve.
            spare -= needed
            if self._enter(seq, hits):
                locates.append(seq)
        self._waiting = [seq for seq in self._waiting if seq.phase is Phase.WAITING]
        return locates

    @property
    def spare_pages(self) -> int:
        """Pages that nobody in the batch needs for the tokens it has now."""
        return self.pool.available - sum(
            max(0, seq.pages_for(seq.length) - seq.num_pages) for seq in self._active.values()
        )

    def _must_wait(self, seq: Sequence, hit_blocks: int) -> bool:
        """Whether somebody is computing the block this one would compute next, or much of it."""
        seq.blocked_on = None
        if hit_blocks < seq.usable_blocks and seq.keys[hit_blocks] in self._claims:
            seq.blocked_on = seq.keys[hit_blocks]
        elif seq.request.use_cache:
            seq.blocked_on = self.parts.worth_waiting_for(seq, hit_blocks)
        return seq.blocked_on is not None

    def _enter(self, seq: Sequence, hits: list[int]) -> bool:
        """Put a sequence into the batch; True when the pool should be asked for more blocks."""
        self.pool.acquire(hits)
        self.pool.use(hits, facts_of_hits(seq, self.pool.facts(hits)))
        seq.add_pages(hits)
        seq.computed = len(hits) * seq.block_tokens
        seq.committed = len(hits)
        if not seq.hits_final:
            seq.hit_tiers = [Tier.L1] * len(hits)
        self._active[seq.seq_id] = seq
        self._claim(seq, len(hits))
        sparable = self.parts.below_l1(seq)
        locate = sparable > 0 and self._wants_locate(sparable)
        if locate:
            seq.phase = Phase.LOCATING
        else:
            self._prefix_ends(seq)
        return locate

    def _claim(self, seq: Sequence, first: int) -> None:
        """Announce the blocks of a prompt that are missing, the last one even if it is partial."""
        if seq.is_background or not seq.request.use_cache:
            return
        missing = seq.keys[first:]
        if seq.length % seq.block_tokens and len(seq.keys) == seq.length // seq.block_tokens:
            missing.append(seq.tail(seq.length)[0])
        for block, key in enumerate(missing, first):
            if key not in self._claims:
                self._claims[key] = seq.seq_id
                self.parts.claim(seq, block, key)
                seq.claims.append(key)

    def _leave(self, seq: Sequence) -> None:
        """Take a sequence out of the batch and release its pages and claims."""
        del self._active[seq.seq_id]
        self._loads.pop(seq.seq_id, None)
        self._drop_claims(seq)
        self.parts.keep_end(seq)
        self.pool.release(seq.pages)
        seq.num_pages = seq.computed = seq.committed = 0
        seq.part_sought = False

    def _drop_claims(self, seq: Sequence) -> None:
        for key in seq.claims:
            self._unclaim(seq, key)
        seq.claims = []

    def _unclaim(self, seq: Sequence, key: BlockKey) -> None:
        if self._claims.get(key) == seq.seq_id:
            del self._claims[key]
            self.parts.unclaim(key)

    def _choose(self, fresh: list[int]) -> list[Chunk]:
        """Pick decodes, then prefill chunks, in rank order until the token budget is used."""
        running = [seq for seq in self._active.values() if seq.phase is Phase.RUNNING]
        running.sort(key=lambda seq: (seq.length - seq.computed > 1, seq.rank))
        budget, chosen = self._max_batch_tokens, dict[int, Chunk]()
        for seq in running:
            if budget == 0:
                break
            if seq.phase is not Phase.RUNNING:
                continue  # Preempted a moment ago by one of higher rank.
            if seq.wants_part and not self._begin_block(seq, fresh, chosen):
                continue
            count = min(seq.length - seq.computed, budget)
            if seq.is_background and len(self._active) > 1:
                count = min(count, max(1, self._max_batch_tokens // _BACKGROUND_SHARE))
            if not self._provide_pages(seq, seq.computed + count, fresh, chosen):
                continue
            chosen[seq.seq_id] = _chunk(seq, seq.computed, count)
            budget -= count
        return list(chosen.values())

    def _choose_loading(self, ready: Collection[int], fresh: list[int]) -> list[Chunk]:
        for seq_id, order in self._loads.items():
            start = order.stop
            count = min(order.seq.length - start, self._max_batch_tokens)
            if seq_id not in ready or order.seq.blend is not None:
                continue  # Chunks may be blended from where the load ends.
            pages = self.pool.allocate(order.seq.pages_for(start + count) - order.seq.num_pages)
            if pages is not None:
                order.seq.add_pages(pages)
                fresh.extend(pages)
                return [_chunk(order.seq, start, count, loading=True)]
        return []

    def _begin_block(self, seq: Sequence, fresh: list[int], chosen: dict[int, Chunk]) -> bool:
        """Give a sequence its next page, with what is known of that block; False: no page."""
        if not self._provide_pages(seq, seq.computed + 1, fresh, chosen):
            return False
        if self.parts.take(seq):
            page = int(seq.page_table[seq.num_pages - 1])
            fresh[:] = [one for one in fresh if one != page]  # One preempted may have had it, too.
        return True

    def _provide_pages(
        self, seq: Sequence, tokens: int, fresh: list[int], chosen: dict[int, Chunk]
    ) -> bool:
        """Give a sequence pages for ``tokens``; takes them from the lowest rank if need be."""
        missing = seq.pages_for(tokens) - seq.num_pages
        if missing <= 0:
            return True
        while (pages := self.pool.allocate(missing)) is None:
            victim = seq if seq.is_background else max(self._preemptible(), key=_rank)
            self._preempt(victim)
            chosen.pop(victim.seq_id, None)
            if victim is seq:
                return False
        seq.add_pages(pages)
        fresh.extend(pages)
        return True

    def _preemptible(self) -> Iterable[Sequence]:
        return (seq for seq in self._active.values() if seq.phase is Phase.RUNNING)

    def _preempt(self, seq: Sequence) -> None:
        """Send a running sequence back to the queue; what it computed stays while it can.

        Before its pages go, ``demote`` may save what is in them. What was blended is computed
        exactly next time. A chunk in isolation just ends.
        """
        if seq.is_background:
            self.end(seq)
            return
        self.preemptions += 1
        self._demote(seq)
        self._leave(seq)
        seq.phase = Phase.WAITING
        seq.hits_final = True
        seq.blend = None
        seq.findable_tokens = sys.maxsize
        self.add(seq)

    def check_invariants(self) -> None:
        """Assert that phases, claims and pages agree; O(everything)."""
        self.pool.check_invariants()
        assert all(seq.phase is Phase.WAITING and not seq.num_pages for seq in self._waiting)
        for seq in self._active.values():
            assert seq.phase not in (Phase.WAITING, Phase.ENDED)
            assert seq.committed * seq.block_tokens <= seq.findable_tokens
            assert seq.computed <= seq.num_pages * seq.block_tokens
        assert set(self._claims.values()) <= set(self._active)
        assert set(self._loads) <= set(self._active)


_COMPUTED_SOON: Final = (Phase.LOCATING, Phase.LOADING, Phase.RUNNING)


def _rank(seq: Sequence) -> tuple[int, int]:
    return seq.rank


def _chunk(seq: Sequence, start: int, count: int, *, loading: bool = False) -> Chunk:
    samples = start + count == seq.length and not seq.is_background
    return Chunk(seq, start, count, samples=samples, loading=loading)
