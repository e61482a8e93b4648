"""Chunks nobody waits for: which is next, when it must wait, and what it leaves."""

from __future__ import annotations

import pytest

from tests.fix_model import make_request
from tierkv.compute.batching.batch_plan import Plan
from tierkv.compute.batching.batcher import Batcher
from tierkv.compute.batching.sequence import Phase, Sequence, make_sequence
from tierkv.compute.blend.isolation import Isolation
from tierkv.compute.l1.page_pool import PagePool
from tierkv.compute.tiers.chunk_lookup import PromptChunk, prompt_chunks
from tierkv.kvcore.request import Blend, GenerateRequest


class Rig:
    """A batcher of 8-token pages and the queue before it; plays the engine."""

    def __init__(self, pages: int = 33) -> None:
        self.cleared: list[int] = []
        self.batcher = Batcher(PagePool(pages), max_batch_tokens=64, max_running=4)
        self.queue = Isolation(self.batcher, block_tokens=8, clear=self.cleared.extend)

    def want(self, *docs: int, credit: float = 1.0) -> tuple[PromptChunk, ...]:
        """Have 20-token documents wanted; equal numbers are equal documents."""
        ids, spans = [1, 2, 3], []
        for doc in docs:
            spans.append((len(ids), len(ids) + 20))
            ids += [doc] * 20
        request = make_request([*ids, 9], blend=Blend(tuple(spans)))
        chunks = prompt_chunks(request, block_tokens=8)
        for chunk in chunks:
            self.queue.want(request, chunk, credit)
        return chunks

    def caller(self, tokens: int, **changes: object) -> Sequence:
        asked: GenerateRequest = make_request([7] * tokens, use_cache=False, **changes)
        seq = make_sequence(1, asked, arrival_s=0.0, block_tokens=8)
        self.batcher.add(seq)
        return seq

    def plan(self) -> Plan:
        """Admit and plan; nothing is looked up, and nothing has to go here."""
        self.batcher.admit()
        plan = self.batcher.plan(0.0)
        assert plan.victim is None
        return plan

    def compute(self) -> Sequence:
        """Run what is under way to its end."""
        seq = self.queue.current
        assert seq is not None
        while seq.computed < seq.length:
            plan = self.plan()
            chunk = next(chunk for chunk in plan.chunks if chunk.seq is seq)
            assert not chunk.samples
            self.batcher.computed(chunk, (), ())
        return seq

    def end(self, seq: Sequence) -> None:
        self.batcher.end(seq)
        self.queue.ended(seq)
        self.batcher.check_invariants()


def test_a_chunk_is_computed_after_the_head_and_found_by_its_name() -> None:
    rig = Rig()
    (chunk,) = rig.want(5)
    assert not rig.queue.idle.is_set()
    seq = rig.queue.begin_next()
    assert seq is not None and seq.request.token_ids == (1, 2, 3, *[5] * 20)
    assert seq.raw_start == 3 and rig.cleared == seq.raw_pages.tolist() and seq.seq_id < 0
    rig.compute()
    blocks = rig.queue.computed()
    assert [block.spec.key for block in blocks] == list(chunk.keys)
    rig.end(seq)
    assert rig.batcher.pool.lookup(chunk.keys) == [block.page for block in blocks]
    assert rig.batcher.pool.keyed == 3 and rig.batcher.pool.used == 0
    assert rig.queue.idle.is_set() and rig.queue.begin_next() is None


def test_what_is_known_queued_or_under_way_is_not_computed_twice() -> None:
    rig = Rig()
    rig.want(5, 6)
    rig.want(6)
    first = rig.queue.begin_next()
    assert first is not None and first.request.token_ids[3] == 6, "two lacked it"
    rig.want(6)
    rig.compute()
    rig.queue.computed()
    rig.end(first)
    rig.want(6)
    seq = rig.queue.begin_next()
    assert seq is not None and seq.request.token_ids[3] == 5, "the other is there now"
    rig.end(seq)
    assert rig.queue.begin_next() is None and rig.queue.idle.is_set()


def test_what_one_lacked_waits_for_all_others_and_gives_way() -> None:
    rig = Rig(pages=12)
    rig.want(5)
    running = rig.caller(48)
    rig.plan()
    assert rig.queue.begin_next() is None, "five pages are left, and it takes three twice"
    rig.end(running)
    seq = rig.queue.begin_next()
    assert seq is not None
    rig.plan()
    rig.caller(80)
    assert not rig.plan().chunks and seq.phase is Phase.ENDED
    rig.queue.put_back()
    rig.queue.ended(seq)
    assert rig.plan().chunks and not rig.queue.idle.is_set()
    assert rig.queue.begin_next() is None


def test_what_several_lacked_goes_before_those_who_wait() -> None:
    rig = Rig(pages=12)
    rig.want(5)
    rig.want(5)
    running = rig.caller(24)
    rig.plan()
    waiting = rig.caller(80)
    seq = rig.queue.begin_next()
    assert seq is not None and seq.rank < waiting.rank
    rig.plan()
    assert seq.phase is Phase.RUNNING and waiting.phase is Phase.WAITING
    assert running.phase is Phase.RUNNING
    rig.end(seq)


def test_a_chunk_is_queued_when_it_would_have_paid_for_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig()
    for _ in range(3):
        rig.want(5, credit=0.25)
        rig.want(6, credit=0.0)
        assert rig.queue.idle.is_set() and rig.queue.begin_next() is None
    rig.want(5, credit=0.25)
    assert not rig.queue.idle.is_set()
    seq = rig.queue.begin_next()
    assert seq is not None and seq.request.token_ids == (1, 2, 3, *[5] * 20)
    assert seq.rank > rig.caller(8).rank, "not yet worth a caller's time"
    rig.end(seq)

    monkeypatch.setattr("tierkv.compute.blend.isolation._LACKED_CHUNKS", 2)
    for doc in (1, 2, 3):
        rig.want(doc, credit=0.5)
    rig.want(1, credit=0.5)
    assert rig.queue.idle.is_set(), "the oldest credit was forgotten"
    rig.want(3, credit=0.5)
    assert not rig.queue.idle.is_set()


def test_what_never_fits_is_dropped_and_the_queue_is_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig(pages=6)
    rig.want(5)
    assert rig.queue.begin_next() is None
    assert rig.queue.dropped_chunks == 1 and rig.queue.idle.is_set()
    monkeypatch.setattr("tierkv.compute.blend.isolation._QUEUED_CHUNKS", 2)
    rig.want(1, 2, 3)
    assert rig.queue.dropped_chunks == 2
    rig.queue.stop()
    assert rig.queue.idle.is_set()


def test_what_never_fits_blocks_nobody_on_a_busy_node_and_is_tried_again() -> None:
    rig = Rig(pages=6)
    rig.caller(8)
    rig.plan()
    (chunk,) = rig.want(5)
    assert rig.queue.begin_next() is None and rig.queue.idle.is_set()
    assert rig.queue.dropped_chunks == 1
    rig.want(5)
    assert not rig.queue.idle.is_set(), "somebody may have given it more room"
    assert rig.queue.begin_next() is None and rig.queue.dropped_chunks == 2
    assert rig.batcher.pool.lookup(chunk.keys) == []
