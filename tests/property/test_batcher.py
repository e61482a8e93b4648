"""The batcher under random traffic: every request ends once, tokens are right, no page leaks.

The model is a function of all tokens before: a wrong or missing KV page would change the answer.
Decodes carry guesses at times, good and bad. What a blending pass writes is tainted, and so is what
is computed after it: no page that can be found by its key may hold any of it.
"""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tierkv.compute.batching.batch_plan import Chunk, LoadOrder, Plan
from tierkv.compute.batching.batcher import Batcher
from tierkv.compute.batching.sequence import Phase, Sequence, make_sequence
from tierkv.compute.engine.drafts import Drafts
from tierkv.compute.l1.page_pool import PagePool
from tierkv.compute.transfers.prefetch import part_wanted
from tierkv.kvcore.block import Tier
from tierkv.kvcore.ids import NamespaceKey, RequestId
from tierkv.kvcore.request import Blend, FinishReason, GenerateRequest, SamplingParams

BLOCK = 4


def next_token(tokens: list[int]) -> int:
    return sum((i + 1) * t for i, t in enumerate(tokens)) % 50


class Memory:
    """What each page holds: (position, token) per cell, as attention would read it."""

    def __init__(self, pages: int) -> None:
        self.cells: list[list[tuple[int, int] | None]] = [[None] * BLOCK for _ in range(pages)]
        self.tainted: list[list[bool]] = [[False] * BLOCK for _ in range(pages)]

    def write(
        self,
        seq: Sequence,
        start: int,
        count: int,
        *,
        blended: bool = False,
        draft: tuple[int, ...] = (),
    ) -> None:
        tokens = [*seq.tokens[: start + count].tolist(), *draft]
        before = [self.tainted[int(seq.page_table[at // BLOCK])][at % BLOCK] for at in range(start)]
        for at in range(start, len(tokens)):
            page = int(seq.page_table[at // BLOCK])
            assert page != 0 and at // BLOCK < seq.num_pages
            self.cells[page][at % BLOCK] = (at, tokens[at])
            self.tainted[page][at % BLOCK] = blended or any(before)

    def clear(self, page: int) -> None:
        self.cells[page] = [None] * BLOCK
        self.tainted[page] = [False] * BLOCK

    def copy_part(self, source: int, target: int, tokens: int) -> None:
        assert source != target and target != 0
        for cells in (self.cells, self.tainted):
            blank = None if cells is self.cells else False
            cells[target] = [*cells[source][:tokens], *[blank] * (BLOCK - tokens)]

    def read(self, seq: Sequence, count: int) -> list[int]:
        cells = [self.cells[int(seq.page_table[at // BLOCK])][at % BLOCK] for at in range(count)]
        assert [c and c[0] for c in cells] == list(range(count)), "KV of other positions"
        return [cell[1] for cell in cells if cell is not None]


class Driver:
    """Plays the engine; what the pool answers to a locate is drawn from a seed."""

    def __init__(self, pages: int, budget: int, rng: random.Random) -> None:
        self.rng = rng
        self.memory = Memory(pages)
        pool = PagePool(pages)
        self.batcher = Batcher(pool, max_batch_tokens=budget, max_running=4)
        self.saving: list[list[int]] = []
        self.loads: list[LoadOrder] = []
        self.zombies: list[LoadOrder] = []
        self.locating: list[Sequence] = []
        self.behind: dict[int, tuple[Chunk, list[int]]] = {}
        self.looking_up: list[Sequence] = []
        self.passes: dict[int, tuple[Sequence, list[int]]] = {}
        self.background: Sequence | None = None
        self.isolated = 0
        self.drafts = Drafts(6, max_batch_tokens=budget)
        self.ended: dict[int, FinishReason] = {}

    def end(self, seq: Sequence, reason: FinishReason) -> None:
        assert seq.seq_id not in self.ended
        self.ended[seq.seq_id] = reason
        self.behind.pop(seq.seq_id, None)
        self.leave_pass(seq)
        self.batcher.end(seq)

    def leave_pass(self, seq: Sequence) -> None:
        _, pages = self.passes.pop(seq.seq_id, (seq, []))
        self.batcher.pool.release(pages)

    def step(self) -> bool:
        waiting = [o.seq.seq_id for o in self.loads if o.seq.seq_id not in self.behind]
        ready = [seq_id for seq_id in waiting if self.rng.random() < 0.5]
        lookups = [miss.seq for miss in self.batcher.admit() if self.rng.random() < 0.5]
        plan = self.plan(ready, lookups)
        assert sum(c.count for c in plan.chunks) <= self.batcher._max_batch_tokens
        self.locating.extend(lookups)
        self.looking_up.extend(plan.chunk_lookups)
        for page in plan.fresh_pages:
            self.memory.clear(page)
        chunks = [self.guess(chunk) for chunk in plan.chunks]
        for chunk in chunks:
            if chunk.loading:  # It ends when its load does, many steps later perhaps.
                self.behind[chunk.seq.seq_id] = chunk, chunk.seq.pages
            else:
                self.memory.write(chunk.seq, chunk.start, chunk.count, draft=chunk.draft)
        for chunk in chunks:
            if not chunk.loading:
                self.apply(chunk)
        self.batcher.check_invariants()
        self.check_parts()
        return bool(plan.chunks)

    def plan(self, ready: list[int], lookups: list[Sequence]) -> Plan:
        """Plan until no sequence must go; at times the first half of its pages is saved before."""
        while True:
            plan = self.batcher.plan(0.0, ready, lookups=lookups)
            for copy in plan.copies:
                self.memory.copy_part(copy.source, copy.target, copy.tokens)
            seq = plan.victim
            if seq is None:
                return plan
            assert not (plan.chunks or plan.fresh_pages or plan.chunk_lookups)
            held = self.memory.read(seq, seq.computed)
            assert held == seq.tokens[: seq.computed].tolist(), "what is saved is there"
            if self.rng.random() < 0.5:
                self.saving.append(seq.pages[: len(seq.pages) // 2])
                self.batcher.pool.acquire(self.saving[-1])
            self.batcher.preempt(seq)

    def check_parts(self) -> None:
        """Whatever can be found holds the KV of its tokens, exactly."""
        pool = self.batcher.pool
        partial = {page for page in pool._page_of.values() if page in pool._partial}
        for page in {*pool._page_of.values()} - partial:
            assert not any(self.memory.tainted[page]), "approximate KV under an exact key"
        for page, (_, raw, _) in pool.parts._entry.items():
            tokens = np.frombuffer(raw, dtype="<u4").tolist()
            cells = self.memory.cells[page][: len(tokens)]
            assert [cell and cell[1] for cell in cells] == tokens, "a part of other tokens"
            assert not any(self.memory.tainted[page][: len(tokens)]), "an approximate part"

    def guess(self, chunk: Chunk) -> Chunk:
        """Put guesses behind a decode: tokens that are right up to some point, or the drafter's."""
        seq = chunk.seq
        room = min(seq.num_pages * BLOCK, seq.max_length - 1) - seq.length
        if not chunk.samples or chunk.count > 1 or chunk.loading or room < 1:
            return chunk
        if self.rng.random() < 0.3:
            return self.drafts.add_to([chunk])[0]
        tokens = seq.tokens[: seq.length].tolist()
        for _ in range(self.rng.randint(0, room)):
            tokens.append(next_token(tokens))
        wrong = [60] * self.rng.randint(0, seq.length + room - len(tokens))
        return replace(chunk, draft=(*tokens[seq.length :], *wrong))

    def look_up(self, seq: Sequence) -> None:
        """Answer where a sequence's chunks are: somewhere, or nowhere."""
        if seq.phase is not Phase.CHUNKS:
            return
        pages = None
        if self.rng.random() < 0.7:
            pages = self.batcher.begin_blend(seq, self.rng.randint(0, 3))
        if pages is None:
            self.batcher.compute_exactly(seq)
            return
        assert not seq.claims and seq.num_pages == seq.pages_for(seq.length)
        for page in seq.pages[seq.computed // BLOCK :]:
            self.memory.clear(page)
        self.passes[seq.seq_id] = seq, pages

    def end_pass(self, seq: Sequence) -> None:
        """A blending pass computes all tokens behind the exact prefix, or turns out useless."""
        self.leave_pass(seq)
        if self.rng.random() < 0.2:
            self.memory.write(seq, seq.computed, 1, blended=True)
            self.batcher.compute_exactly(seq)
            return
        self.memory.write(seq, seq.computed, seq.length - seq.computed, blended=True)
        self.batcher.blended(seq)
        self.apply(Chunk(seq, seq.computed, seq.length - seq.computed, samples=True))

    def isolate(self, number: int) -> None:
        """Add a sequence nobody waits for, if none is under way."""
        if self.background is None or self.background.phase is Phase.ENDED:
            seq = request(
                -number,
                [1] * 9 + [5] * self.rng.randint(1, 9),
                1,
                self.rng.choice([0, 1 << 62]),
                True,
            )
            seq.raw_start = seq.findable_tokens = 9
            self.background = seq
            self.batcher.add(seq)

    def end_behind(self, order: LoadOrder) -> None:
        """Finish what was begun behind a load that has just been settled, if all arrived."""
        chunk, pages = self.behind.pop(order.seq.seq_id, (None, []))
        if chunk is None or chunk.seq.computed != chunk.start:
            return
        assert (
            chunk.seq.pages[order.first_block + len(order.pages) :]
            == pages[order.first_block + len(order.pages) :]
        ), "the pages of what is computed behind a load are its own"
        self.memory.write(chunk.seq, chunk.start, chunk.count)
        self.apply(chunk)

    def apply(self, chunk: Chunk) -> None:
        seq = chunk.seq
        chosen: list[int | None] = []
        if chunk.samples:
            context = self.memory.read(seq, chunk.start + chunk.rows)
            assert context == [*seq.tokens[: seq.length].tolist(), *chunk.draft]
            stops = range(seq.length, len(context) + 1)
            chosen = [next_token(context[:stop]) for stop in stops]
        outcome = self.batcher.computed(chunk, self.drafts.checked(chunk, chosen), ())
        if seq.is_background and seq.computed == seq.length:
            assert seq.committed <= 2
            self.isolated += 1
            self.batcher.end(seq)
        if outcome.finish is not None:
            self.end(seq, outcome.finish)

    def settle(self, order: LoadOrder) -> None:
        """End a load: all, some or none of its blocks arrived."""
        self.loads.remove(order)
        good = self.rng.choice([len(order.pages), self.rng.randint(0, len(order.pages))])
        if order.seq.phase is Phase.LOADING:
            for i, page in enumerate(order.pages):
                start = (order.first_block + i) * BLOCK
                self.memory.tainted[page] = [False] * BLOCK
                for at in range(start, start + BLOCK):
                    cell = (-1, -1)  # Of a part the rest is another prompt's.
                    if i < good and at < order.stop:
                        cell = (at, int(order.seq.tokens[at]))
                    self.memory.cells[page][at % BLOCK] = cell
        self.batcher.loaded(order, (Tier.L2,) * good)
        self.zombies.append(order)
        self.end_behind(order)

    def poke(self) -> None:
        """Let something happen outside: an answer of the pool, a load's end, a thread's end."""
        for seq in self.locating:
            wanted = seq.usable_blocks - seq.num_pages
            blocks = self.rng.randint(0, max(0, wanted))
            room = seq.reusable_tokens - (seq.num_pages + blocks) * BLOCK
            part = self.rng.randint(0, max(0, min(BLOCK - 1, room)))
            part = 0 if part_wanted(seq, 0) is None else part
            order = self.batcher.located(seq, blocks + (part > 0), part)
            if order is not None:
                self.loads.append(order)
        self.locating.clear()
        for seq in self.looking_up:
            self.look_up(seq)
        self.looking_up.clear()
        for seq, _ in [x for x in self.passes.values() if self.rng.random() < 0.5]:
            self.end_pass(seq)
        for order in [o for o in self.loads if self.rng.random() < 0.5]:
            self.settle(order)
        for order in self.zombies:
            self.batcher.load_ended(order)
        self.zombies.clear()
        for pages in self.saving:
            self.batcher.pool.release(pages)
        self.saving.clear()


def request(
    number: int, tokens: list[int], new: int, priority: int, cache: bool, blend: bool = False
) -> Sequence:
    asked = GenerateRequest(
        request_id=RequestId(str(number)),
        model="m",
        token_ids=tuple(tokens),
        namespace_key=NamespaceKey(b"n" * 32),
        sampling=SamplingParams(max_tokens=new),
        priority=priority,
        use_cache=cache,
    )
    seq = make_sequence(number, asked, arrival_s=0.0, block_tokens=BLOCK)
    if blend and cache and len(tokens) > 3:
        seq.blend = Blend(((2, len(tokens) - 1),))
    return seq


ASKED = st.tuples(
    st.sampled_from([[1] * 9, [1] * 8, [2, 3] * 5, [4]]),
    st.lists(st.integers(0, 2), max_size=8),
    st.integers(1, 9),
    st.integers(0, 1),
    st.booleans(),
    st.booleans(),
)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(
    asked=st.lists(ASKED, min_size=1, max_size=8),
    pages=st.integers(8, 20),
    budget=st.integers(4, 16),
    seed=st.integers(0, 2**32),
)
def test_every_request_ends_once_with_the_right_tokens(asked, pages, budget, seed) -> None:
    rng = random.Random(seed)
    driver = Driver(pages, budget, rng)
    queue = [
        request(i, head + tail, new, priority, cache, blend)
        for i, (head, tail, new, priority, cache, blend) in enumerate(asked)
    ]
    everyone = list(queue)
    for step in range(3_000):
        if queue and rng.random() < 0.5:
            driver.batcher.add(queue.pop())
        alive = [s for s in everyone if s not in queue and s.phase is not Phase.ENDED]
        if alive and rng.random() < 0.03:
            driver.end(rng.choice(alive), FinishReason.CANCELLED)
        if rng.random() < 0.1:
            driver.isolate(step + 1)
        if not driver.step() or rng.random() < 0.5:
            driver.poke()
        if not queue and len(driver.ended) == len(everyone):
            break
    assert sorted(driver.ended) == list(range(len(everyone)))
    for seq in everyone:
        if driver.ended[seq.seq_id] is FinishReason.LENGTH:
            tokens = list(seq.request.token_ids)
            while len(tokens) < seq.max_length:
                tokens.append(next_token(tokens))
            assert seq.tokens.tolist() == tokens
    if driver.background is not None:
        driver.batcher.end(driver.background)
    for order in driver.loads:
        driver.batcher.load_ended(order)
    driver.loads.clear()
    driver.poke()
    driver.batcher.pool.drop_unused()
    driver.batcher.check_invariants()
    assert driver.batcher.pool.available == pages - 1
