"""What to compute next: continuous batching with chunked prefill under a token budget.

A pure core: the engine tells it what happened (a request came, a load ended, a chunk was
computed) and carries out the plan it gets. It owns the page pool; it knows no tensors, threads or
clocks.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from compute.page_pool import PagePool
from compute.sequence import Phase, Sequence
from kvcore.ids import BlockKey
from kvcore.location import Tier
from kvcore.request import FinishReason

_SCAN_LIMIT = 512
"""Waiting sequences looked at in one plan; more would cost more than the step saves."""


@dataclass(frozen=True, slots=True, eq=False)
class LoadOrder:
    """Blocks to load for a sequence; the order holds its own reference on the pages.

    Attributes:
        seq: whose blocks.
        first_block: index of the first of them in the prompt.
        pages: where they go.
    """

    seq: Sequence
    first_block: int
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens ``[start, start + count)`` of a sequence to compute in this step.

    Attributes:
        samples: whether the chunk reaches the last known token, so that a new one is sampled.
        loading: whether earlier KV is still being loaded; the result counts only if that succeeds.
    """

    seq: Sequence
    start: int
    count: int
    samples: bool
    loading: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """What the engine should do now.

    Attributes:
        chunks: computed together in one forward pass.
        fresh_pages: pages to zero first; they may hold garbage of a failed load.
        locates: sequences whose next blocks should be looked up in the pool.
    """

    chunks: tuple[Chunk, ...]
    fresh_pages: tuple[int, ...]
    locates: tuple[Sequence, ...]


@dataclass(frozen=True, slots=True)
class FullBlock:
    """A block that just became full and findable."""

    key: BlockKey
    parent: BlockKey
    page: int


@dataclass(frozen=True, slots=True)
class ChunkOutcome:
    """What a computed chunk led to; ``finish`` ends the sequence."""

    new_tokens: tuple[int, ...]
    finish: FinishReason | None
    full_blocks: tuple[FullBlock, ...]


class Batcher:
    """The queue, the batch and the pages. Mutated only by the methods below, in one thread.

    Attributes:
        pool: the pages.
        preemptions: how often a sequence lost its pages.
    """

    def __init__(
        self,
        pool: PagePool,
        *,
        max_batch_tokens: int,
        max_running: int,
        wants_locate: Callable[[int], bool] = lambda missing_tokens: False,
    ) -> None:
        self.pool = pool
        self.preemptions = 0
        self._max_batch_tokens = max_batch_tokens
        self._max_running = max_running
        self._wants_locate = wants_locate
        self._waiting: list[Sequence] = []
        self._active: dict[int, Sequence] = {}
        self._loads: dict[int, LoadOrder] = {}
        self._claims: dict[BlockKey, int] = {}

    @property
    def waiting(self) -> int:
        """Sequences in the queue."""
        return len(self._waiting)

    @property
    def active(self) -> int:
        """Sequences admitted and not ended."""
        return len(self._active)

    def uncomputed_tokens(self) -> int:
        """Tokens known but not computed, queued and running; O(sequences)."""
        everyone = (*self._waiting, *self._active.values())
        return sum(seq.length - seq.computed for seq in everyone)

    def sequences(self) -> list[Sequence]:
        """All sequences not ended."""
        return [*self._active.values(), *self._waiting]

    def add(self, seq: Sequence) -> None:
        """Queue a sequence; the caller has checked that it can ever fit."""
        insort(self._waiting, seq, key=_rank)

    def end(self, seq: Sequence) -> None:
        """Take a sequence out, whatever it was doing, and give its pages back."""
        if seq.phase is Phase.WAITING:
            self._waiting.remove(seq)
        elif seq.phase is not Phase.ENDED:
            self._leave(seq)
        seq.phase = Phase.ENDED

    def located(self, seq: Sequence, blocks: int) -> LoadOrder | None:
        """Take note that ``blocks`` more blocks can be loaded; answers the order to do so."""
        if seq.phase is not Phase.LOCATING:
            return None
        pages = self.pool.allocate(blocks) if blocks else None
        if not pages:
            seq.phase = Phase.RUNNING
            return None
        order = LoadOrder(seq, seq.num_pages, tuple(pages))
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
        if not seq.hits_final:
            seq.hit_tiers.extend(tiers)
        seq.computed = good * seq.block_tokens
        seq.phase = Phase.RUNNING
        self._commit(seq)

    def load_ended(self, order: LoadOrder) -> None:
        """Take back the order's own reference: nobody writes into its pages any more."""
        self.pool.release(order.pages)

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
        return Plan(tuple(chosen), tuple(fresh), tuple(locates))

    def computed(self, chunk: Chunk, token: int | None, stop_ids: Collection[int]) -> ChunkOutcome:
        """Take note that a chunk's KV is in its pages, and of the token sampled after it."""
        seq = chunk.seq
        assert seq.phase is Phase.RUNNING and seq.computed == chunk.start
        seq.computed += chunk.count
        blocks = self._commit(seq)
        if token is None:
            return ChunkOutcome((), None, blocks)
        if token in stop_ids:
            return ChunkOutcome((), FinishReason.STOP, blocks)
        seq.tokens[seq.length] = token
        seq.length += 1
        finish = None
        if seq.length >= seq.max_length:
            finish = FinishReason.LENGTH
        elif seq.request.handoff:
            finish = FinishReason.HANDOFF
        return ChunkOutcome((token,), finish, blocks)

    def _commit(self, seq: Sequence) -> tuple[FullBlock, ...]:
        """Make newly full blocks findable; another sequence's equal page replaces ours."""
        if not seq.request.use_cache:
            return ()
        blocks = []
        for block in range(seq.committed, seq.computed // seq.block_tokens):
            key, parent = seq.key_and_parent(block)
            page = self.pool.commit(
                int(seq.page_table[block]), key, parent, tenant=seq.request.tenant
            )
            seq.page_table[block] = page
            if self._claims.get(key) == seq.seq_id:
                del self._claims[key]
            blocks.append(FullBlock(key, parent, page))
        seq.committed += len(blocks)
        return tuple(blocks)

    def _admit(self) -> list[Sequence]:
        """Move sequences from the queue into the batch while there is room, in rank order."""
        locates: list[Sequence] = []
        if not self._waiting or len(self._active) >= self._max_running:
            return locates
        spare = self.pool.available - sum(
            max(0, seq.pages_for(seq.length) - seq.num_pages) for seq in self._active.values()
        )
        for seq in self._waiting[:_SCAN_LIMIT]:
            if len(self._active) >= self._max_running:
                break
            if seq.blocked_on in self._claims:
                continue
            hits = self.pool.lookup(seq.keys[: seq.usable_blocks])
            if self._must_wait(seq, len(hits)):
                continue
            needed = seq.pages_for(seq.length) - len(hits) + self.pool.unreferenced(hits)
            if needed > spare:
                break  # Nobody overtakes a request that waits for pages: it could starve.
            spare -= needed
            if self._enter(seq, hits):
                locates.append(seq)
        self._waiting = [seq for seq in self._waiting if seq.phase is Phase.WAITING]
        return locates

    def _must_wait(self, seq: Sequence, hit_blocks: int) -> bool:
        """Whether somebody is computing the very block this one would compute next."""
        seq.blocked_on = None
        if hit_blocks < seq.usable_blocks and seq.keys[hit_blocks] in self._claims:
            seq.blocked_on = seq.keys[hit_blocks]
        return seq.blocked_on is not None

    def _enter(self, seq: Sequence, hits: list[int]) -> bool:
        """Put a sequence into the batch; True when the pool should be asked for more blocks."""
        self.pool.acquire(hits)
        seq.add_pages(hits)
        seq.computed = len(hits) * seq.block_tokens
        seq.committed = len(hits)
        if not seq.hits_final:
            seq.hit_tiers = [Tier.L1] * len(hits)
        self._active[seq.seq_id] = seq
        missing = seq.keys[len(hits) : seq.usable_blocks]
        seq.claims = [key for key in missing if key not in self._claims]
        self._claims.update(dict.fromkeys(seq.claims, seq.seq_id))
        locate = bool(missing) and self._wants_locate(len(missing) * seq.block_tokens)
        seq.phase = Phase.LOCATING if locate else Phase.RUNNING
        return locate

    def _leave(self, seq: Sequence) -> None:
        """Take a sequence out of the batch and release its pages and claims."""
        del self._active[seq.seq_id]
        self._loads.pop(seq.seq_id, None)
        for key in seq.claims:
            if self._claims.get(key) == seq.seq_id:
                del self._claims[key]
        self.pool.release(seq.pages)
        seq.claims = []
        seq.num_pages = seq.computed = seq.committed = 0

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
            count = min(seq.length - seq.computed, budget)
            if not self._provide_pages(seq, seq.computed + count, fresh, chosen):
                continue
            chosen[seq.seq_id] = _chunk(seq, seq.computed, count)
            budget -= count
        return list(chosen.values())

    def _choose_loading(self, ready: Collection[int], fresh: list[int]) -> list[Chunk]:
        for seq_id, order in self._loads.items():
            start = (order.first_block + len(order.pages)) * order.seq.block_tokens
            count = min(order.seq.length - start, self._max_batch_tokens)
            if seq_id not in ready:
                continue
            pages = self.pool.allocate(order.seq.pages_for(start + count) - order.seq.num_pages)
            if pages is not None:
                order.seq.add_pages(pages)
                fresh.extend(pages)
                return [_chunk(order.seq, start, count, loading=True)]
        return []

    def _provide_pages(
        self, seq: Sequence, tokens: int, fresh: list[int], chosen: dict[int, Chunk]
    ) -> bool:
        """Give a sequence pages for ``tokens``; takes them from the lowest rank if need be."""
        missing = seq.pages_for(tokens) - seq.num_pages
        if missing <= 0:
            return True
        while (pages := self.pool.allocate(missing)) is None:
            victim = max(self._preemptible(), key=_rank)
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
        """Send a running sequence back to the queue; what it computed stays while it can."""
        self.preemptions += 1
        self._leave(seq)
        seq.phase = Phase.WAITING
        seq.hits_final = True
        self.add(seq)

    def check_invariants(self) -> None:
        """Assert that phases, claims and pages agree; O(everything)."""
        self.pool.check_invariants()
        assert all(seq.phase is Phase.WAITING and not seq.num_pages for seq in self._waiting)
        for seq in self._active.values():
            assert seq.phase in (Phase.LOCATING, Phase.LOADING, Phase.RUNNING)
            assert seq.computed <= seq.num_pages * seq.block_tokens
        assert set(self._claims.values()) <= set(self._active)
        assert set(self._loads) <= set(self._active)


def _rank(seq: Sequence) -> tuple[int, int]:
    return seq.rank


def _chunk(seq: Sequence, start: int, count: int, *, loading: bool = False) -> Chunk:
    return Chunk(seq, start, count, samples=start + count == seq.length, loading=loading)
