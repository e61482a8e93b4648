"""What to compute next: continuous batching with chunked prefill under a token budget.

A pure core: the engine reports events (a request came, a load ended, a chunk was computed) and
carries out the returned values. The batcher calls nothing outside this package and the page pool;
it knows no tensors, threads or clocks.

States of a sequence (``Phase``), and the calls between them:

    WAITING --admit--> LOCATING --located--> LOADING --loaded--> RUNNING --end--> ENDED
       ^                   |                                       ^  |
       |                   +--plan, or located with no block-------+  |
       +---------------------------preempt----------------------------+

If a request allows blending, its sequence goes through CHUNKS before RUNNING: ``plan`` asks for the
chunks, then ``begin_blend`` (BLENDING, until ``blended``) or ``compute_exactly``. ``end`` is legal
in every state.

One step of the engine:

    misses = admit()           from the queue into the batch; misses lack blocks in L1
    plan = plan(now, ...)      page copies, then chunks to compute or a victim to preempt
      preempt(plan.victim)     ... and plan again, until no victim is left
    computed(chunk, tokens)    once per chunk, after the forward pass

Page ownership. The pool (compute/l1/page_pool.py) counts references. A sequence holds a reference
on each page in ``page_table[0, num_pages)``. A load order holds a second reference on the same
pages until the loader's thread has ended (``load_ended``), because an abandoned load still writes.
Saves hold references until the pool of the cluster has the blocks. A page with a key but no
reference is cached.

Races behind this design:

- A load may end after its sequence was preempted or ended, or during a later load of the sequence.
  ``loaded`` therefore compares orders, not sequences, and the order's reference keeps a page from a
  new owner while a late loader still writes.
- The engine may save blocks of a victim, and the saved pages stay in use for a while. How many
  victims are needed is known only one at a time: ``plan`` stops at each victim.
- A copy reads a page, and a later choice of the same plan may give this page away. A save reads the
  target of a copy. The engine therefore makes the copies in order, before any other part of a plan.
- Two prompts with a common beginning arrive together. The first prompt announces its blocks
  (``BlockClaims``); the second prompt waits in the queue, then finds the blocks in L1.
"""

from __future__ import annotations

import sys
from bisect import insort
from collections.abc import Collection
from typing import Final

from tierkv.compute.batching.batch_plan import Chunk, ChunkOutcome, LoadOrder, Plan, PrefixMiss
from tierkv.compute.batching.part_reuse import BlockClaims, PartReuse
from tierkv.compute.batching.reuse_facts import block_of, facts_of_hits, prompt_blocks
from tierkv.compute.batching.sequence import Phase, Sequence
from tierkv.compute.batching.step_choice import StepChoice, chunk_of
from tierkv.compute.l1.page_pool import FullBlock, PagePool
from tierkv.compute.l1.part_index import KnownBlocks
from tierkv.kvcore.block import Tier
from tierkv.kvcore.request import places_for

_SCAN_LIMIT = 512
"""Waiting sequences examined per admission; examining more would cost more than the step saves."""


class Batcher:
    """The queue, the batch and the pages. Mutated only by the methods below, in one thread.

    Attributes:
        pool: the pages.
        parts: parts of blocks shared between sequences.
        preemptions: how often a sequence lost its pages.
    """

    def __init__(
        self,
        pool: PagePool,
        *,
        max_batch_tokens: int,
        max_running: int,
        known: KnownBlocks | None = None,
    ) -> None:
        """Begin with an empty queue.

        Args:
            pool: the pages.
            max_batch_tokens: tokens of a step.
            max_running: sequences in the batch.
            known: blocks by tokens, shared with the tiers; L1 may have evicted a known block. None
                without tiers.
        """
        self.pool = pool
        self.parts = PartReuse(pool, known)
        self.preemptions = 0
        self._max_batch_tokens = max_batch_tokens
        self._max_running = max_running
        self._waiting: list[Sequence] = []
        self._active: dict[int, Sequence] = {}
        self._entered: list[Sequence] = []
        self._choice: StepChoice | None = None
        self._loads: dict[int, LoadOrder] = {}
        self._claims = BlockClaims(self.parts)
        self._chunk_lookups: list[Sequence] = []
        self._background: Sequence | None = None

    @property
    def waiting(self) -> int:
        """Sequences in the queue, without background work."""
        queued = self._background is not None and self._background.phase is Phase.WAITING
        return len(self._waiting) - queued

    @property
    def active(self) -> int:
        """Sequences admitted and not ended, without background work."""
        background = self._background is not None and self._background.seq_id in self._active
        return len(self._active) - background

    def uncomputed_tokens(self) -> int:
        """Tokens to compute for callers, queued and running; O(sequences).

        Tokens being loaded are excluded, because a node loading long prefixes would look busy to
        the scheduler. Tokens of an abandoned load count again.
        """
        everyone = (*self._waiting, *self._active.values())
        return sum(seq.length - self._known(seq) for seq in everyone if not seq.is_background)

    def _known(self, seq: Sequence) -> int:
        """Return the tokens with KV, including tokens of a load under way."""
        order = self._loads.get(seq.seq_id)
        return seq.computed if order is None else order.stop

    def ahead_of(self, seq: Sequence) -> tuple[int, int, int]:
        """Count the work computed next to a sequence, including loading sequences; O(active).

        Returns:
            tokens and number of sequences of better rank, and number of sequences of worse rank.
        """
        tokens = before = after = 0
        for other in self._active.values():
            if other is seq or other.phase not in _COMPUTED_SOON:
                continue
            if other.rank > seq.rank:
                after += 1
            elif other.phase is not Phase.LOCATING:
                before += 1
                tokens += other.length - self._known(other)
        return tokens, before, after

    def add(self, seq: Sequence) -> None:
        """Queue a sequence; the caller has checked that the sequence can ever fit.

        At most one sequence at a time is background work, and ends when callers need its pages.
        """
        if seq.is_background:
            assert self._background is None
            self._background = seq
        insort(self._waiting, seq, key=lambda one: one.rank)

    def end(self, seq: Sequence) -> None:
        """Take a sequence out in any state, and release its pages."""
        if seq.phase is Phase.WAITING:
            self._waiting.remove(seq)
        elif seq.phase is not Phase.ENDED:
            self._leave(seq)
        seq.phase = Phase.ENDED
        if seq is self._background:
            self._background = None

    def located(self, seq: Sequence, blocks: int, part_tokens: int = 0) -> LoadOrder | None:
        """Record that ``blocks`` more blocks can be loaded; return the order to load them.

        With ``part_tokens`` the last block belongs to another prompt and shares only this many
        leading tokens.
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
        """Keep the leading blocks that arrived, with their tiers; the rest will be computed."""
        seq = order.seq
        if seq.phase is not Phase.LOADING or self._loads.get(seq.seq_id) is not order:
            return
        del self._loads[seq.seq_id]
        good = order.first_block + len(tiers)
        if len(tiers) < len(order.pages):  # Else later pages hold a chunk computed meanwhile.
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
        """Release the order's own reference: the loader no longer writes into the pages."""
        self.pool.release(order.pages)

    def _prefix_ends(self, seq: Sequence) -> None:
        """End the search for the exact prefix: compute the rest, or ask for chunks.

        Chunks are not asked for if L1 has exact KV to the end of the last chunk.
        """
        seq.phase = Phase.RUNNING
        exact = seq.computed
        if exact < seq.chunks_stop and seq.wants_part:
            exact += self.parts.known_tokens(seq, seq.num_pages)
        if exact < seq.chunks_stop:
            seq.phase = Phase.CHUNKS
            self._chunk_lookups.append(seq)

    def begin_blend(self, seq: Sequence, load_blocks: int) -> list[int] | None:
        """Give a sequence pages for the whole prompt, to be computed by a blending pass.

        KV behind the exact prefix will be approximate: it is never made findable, and no sequence
        waits for it. Blending may not take pages needed by the batch.

        Returns:
            pages: ``load_blocks`` pages to load chunks into, with a reference each to be released
                by the caller; None when pages are short, and then nothing has changed.
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
        self._claims.withdraw_all(seq)
        seq.findable_tokens = seq.computed
        seq.phase = Phase.BLENDING
        return pages

    def blended(self, seq: Sequence) -> None:
        """Record the end of a blending pass; its tokens are ``computed`` next."""
        assert seq.phase is Phase.BLENDING
        seq.blend = None
        seq.phase = Phase.RUNNING

    def compute_exactly(self, seq: Sequence) -> None:
        """Abandon blending; pages that may hold blended KV are released."""
        assert seq.phase in (Phase.CHUNKS, Phase.BLENDING)
        kept = seq.computed // seq.block_tokens
        surplus = seq.pages[kept:]
        seq.num_pages = kept
        self.pool.release(surplus)
        seq.blend = None
        seq.findable_tokens = sys.maxsize
        seq.phase = Phase.RUNNING

    def plan(
        self,
        now: float,
        ready_loads: Collection[int] = (),
        *,
        lookups: Collection[Sequence] = (),
    ) -> Plan:
        """Choose the next step's chunks, or name a victim to preempt first.

        Args:
            now: the engine's clock.
            ready_loads: ids of loading sequences with the first layer in place and no pass begun; a
                pass begins behind its own load when nothing else could run.
            lookups: sequences from ``admit``'s misses to be looked up by the engine; all other
                misses are computed.
        """
        self._begin_entered(lookups)
        if self._choice is None:
            self._choice = StepChoice(
                self._active, self.pool, self.parts, budget=self._max_batch_tokens
            )
        choice = self._choice
        while victim := choice.go_on():
            if not victim.is_background:
                return Plan(choice.take_copies(), victim)
            self.end(victim)  # A chunk in isolation begins again later; nothing is saved.
        self._choice = None
        chunks = choice.chunks or self._choose_loading(ready_loads, choice.fresh)
        for chunk in chunks:
            if chunk.seq.started_s < 0:
                chunk.seq.started_s = now
        asking = [seq for seq in self._chunk_lookups if seq.phase is Phase.CHUNKS]
        self._chunk_lookups.clear()
        return Plan(
            choice.take_copies(),
            fresh_pages=tuple(choice.fresh),
            chunks=tuple(chunks),
            chunk_lookups=tuple(asking),
        )

    def computed(
        self, chunk: Chunk, tokens: tuple[int, ...], stop_ids: Collection[int]
    ) -> ChunkOutcome:
        """Record a computed chunk, and the tokens behind it.

        All tokens but the last were guessed, and have KV as well. KV of wrong guesses counts as
        never computed: the next chunk overwrites it.
        """
        seq = chunk.seq
        assert seq.phase is Phase.RUNNING and seq.computed == chunk.start
        taken, finish = seq.extend(tokens, stop_ids)
        seq.computed += chunk.count + min(taken, max(0, len(tokens) - 1))
        full = self._commit(seq)
        if chunk.start < seq.prompt_length <= seq.computed:
            self.parts.open_end(seq)
        if chunk.samples:
            self._claims.withdraw_all(seq)
        return ChunkOutcome(tokens[:taken], finish, full)

    def filling(self, chunk: Chunk) -> tuple[FullBlock, ...]:
        """Return the blocks that become full when a chunk is computed, to save during the pass."""
        seq = chunk.seq
        if not seq.request.use_cache:
            return ()
        blocks = []
        findable = min(chunk.start + chunk.count, seq.findable_tokens)
        for block in range(chunk.start // seq.block_tokens, findable // seq.block_tokens):
            blocks.append(FullBlock(block_of(seq, block), int(seq.page_table[block])))
        return tuple(blocks)

    def _commit(self, seq: Sequence) -> tuple[FullBlock, ...]:
        """Make newly full blocks findable; a page with the same block replaces ours."""
        if not seq.request.use_cache:
            return ()
        blocks = []
        findable = min(seq.computed, seq.findable_tokens) // seq.block_tokens
        for block in range(seq.committed, findable):
            spec, page = block_of(seq, block), int(seq.page_table[block])
            page = self.pool.commit(page, spec, prompt_blocks=prompt_blocks(seq))
            seq.page_table[block] = page
            self.parts.committed(seq, block, page)
            self._claims.withdraw(seq, spec.key)
            blocks.append(FullBlock(spec, page))
        seq.committed += len(blocks)
        return tuple(blocks)

    def admit(self) -> tuple[PrefixMiss, ...]:
        """Move sequences from the queue into the batch while room is left, in rank order.

        Returns:
            sequences with blocks missing from L1; the next ``plan`` is told which are looked up.
        """
        misses: list[PrefixMiss] = []
        if not self._waiting or self.active >= self._max_running:
            return ()
        spare = self.spare_pages
        for seq in self._waiting[:_SCAN_LIMIT]:
            if self.active >= places_for(self._max_running, urgent=seq.request.priority <= 0):
                break
            if seq.blocked_on in self._claims:
                continue
            hits = self.pool.lookup(seq.keys[: seq.usable_blocks])
            seq.blocked_on = self._claims.worth_waiting_for(seq, len(hits))
            if seq.blocked_on is not None:
                continue
            needed = seq.pages_for(seq.length) - len(hits) + self.pool.unreferenced(hits)
            if needed > spare and needed > spare + self._pages_to_take(seq):
                if self._background is not None and self._background.rank > seq.rank:
                    self.end(self._background)
                break  # A request that waits for pages is not overtaken: it could starve.
            spare -= needed
            self._enter(seq, hits)
            if (tokens := self.parts.below_l1(seq)) > 0:
                misses.append(PrefixMiss(seq, tokens))
        self._waiting = [seq for seq in self._waiting if seq.phase is Phase.WAITING]
        return tuple(misses)

    def _pages_to_take(self, seq: Sequence) -> int:
        """Count the pages of running sequences of lower priority, which the next step may take.

        Rank decides about victims: bulk overtaken often enough keeps its pages.
        """
        priority = seq.request.priority
        return sum(
            each.num_pages
            for each in self._active.values()
            if each.request.priority > priority
            and each.rank > seq.rank
            and each.phase is Phase.RUNNING
        )

    @property
    def spare_pages(self) -> int:
        """Pages not needed by the batch for the tokens known now."""
        return self.pool.available - sum(
            max(0, seq.pages_for(seq.length) - seq.num_pages) for seq in self._active.values()
        )

    def _enter(self, seq: Sequence, hits: list[int]) -> None:
        """Put a sequence into the batch, with the pages of the blocks found in L1."""
        self.pool.acquire(hits)
        self.pool.use(hits, facts_of_hits(seq, self.pool.facts(hits)))
        seq.add_pages(hits)
        seq.computed = len(hits) * seq.block_tokens
        seq.committed = len(hits)
        if not seq.hits_final:
            seq.hit_tiers = [Tier.L1] * len(hits)
        self._active[seq.seq_id] = seq
        self._entered.append(seq)
        self._claims.announce(seq, len(hits))
        seq.phase = Phase.LOCATING

    def _begin_entered(self, lookups: Collection[Sequence]) -> None:
        """Start the sequences admitted last, except those being looked up."""
        for seq in self._entered:
            if seq not in lookups and seq.phase is Phase.LOCATING:
                self._prefix_ends(seq)
        self._entered.clear()

    def _leave(self, seq: Sequence) -> None:
        """Take a sequence out of the batch; release all its pages and claims."""
        del self._active[seq.seq_id]
        self._loads.pop(seq.seq_id, None)
        self._claims.withdraw_all(seq)
        self.parts.keep_end(seq)
        self.pool.release(seq.pages)
        seq.num_pages = seq.computed = seq.committed = 0
        seq.part_sought = False

    def _choose_loading(self, ready: Collection[int], fresh: list[int]) -> list[Chunk]:
        """Begin one sequence behind its own load; new pages are added to ``fresh``."""
        for seq_id, order in self._loads.items():
            start = order.stop
            count = min(order.seq.length - start, self._max_batch_tokens)
            if seq_id not in ready or order.seq.blend is not None:
                continue  # Chunks may be blended from where the load ends.
            pages = self.pool.allocate(order.seq.pages_for(start + count) - order.seq.num_pages)
            if pages is not None:
                order.seq.add_pages(pages)
                fresh.extend(pages)
                return [chunk_of(order.seq, start, count, loading=True)]
        return []

    def preempt(self, seq: Sequence) -> None:
        """Send a running sequence back to the queue; computed blocks stay cached while pages last.

        Blended tokens are computed exactly next time.
        """
        self.preemptions += 1
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
        self._claims.check_invariants(self._active)
        assert set(self._loads) <= set(self._active)


_COMPUTED_SOON: Final = (Phase.LOCATING, Phase.LOADING, Phase.RUNNING)
