"""What a plan holds: decodes beside prefill chunks under the token budget, and who loses pages."""

from __future__ import annotations

from tierkv.compute.batching.batch_plan import Chunk, PageCopy, Plan, PrefixMiss
from tierkv.compute.batching.batcher import Batcher
from tierkv.compute.batching.sequence import PRIORITY_ARRIVALS, Phase, Sequence, make_sequence
from tierkv.compute.l1.page_pool import PagePool
from tierkv.kvcore.block import Tier
from tierkv.kvcore.ids import NamespaceKey, RequestId
from tierkv.kvcore.request import FinishReason, GenerateRequest, SamplingParams

BLOCK = 4


def sequence(number: int, prompt_tokens: int, *, priority: int = 0, new: int = 20) -> Sequence:
    asked = GenerateRequest(
        request_id=RequestId(str(number)),
        model="m",
        token_ids=tuple((number * 31 + i) % 97 for i in range(prompt_tokens)),
        namespace_key=NamespaceKey(b"n" * 32),
        sampling=SamplingParams(max_tokens=new),
        priority=priority,
    )
    return make_sequence(number, asked, arrival_s=0.0, block_tokens=BLOCK)


def batcher(*, pages: int = 64, budget: int = 16) -> Batcher:
    return Batcher(PagePool(pages), max_batch_tokens=budget, max_running=8)


def planned(batch: Batcher) -> tuple[Chunk, ...]:
    """Plan a step as an engine without a pool does: look nothing up, save nothing."""
    batch.admit()
    while (plan := batch.plan(0.0)).victim is not None:
        batch.preempt(plan.victim)
    return plan.chunks


def step(batch: Batcher) -> list[tuple[int, int]]:
    """Plan and compute; answers (sequence, tokens) of each chunk."""
    chunks = planned(batch)
    for chunk in chunks:
        batch.computed(chunk, (1,) if chunk.samples else (), ())
    return [(chunk.seq.seq_id, chunk.count) for chunk in chunks]


def test_a_long_prompt_takes_what_decodes_leave_of_the_budget() -> None:
    batch = batcher()
    for number in (1, 2):
        batch.add(sequence(number, 3))
    assert step(batch) == [(1, 3), (2, 3)]
    batch.add(sequence(3, 40))
    steps = [step(batch) for _ in range(4)]
    assert steps[:2] == [[(1, 1), (2, 1), (3, 14)]] * 2
    assert steps[2:] == [[(1, 1), (2, 1), (3, 12)], [(1, 1), (2, 1), (3, 1)]]


def test_tokens_that_are_being_loaded_do_not_queue_for_computing() -> None:
    batch = batcher()
    seq = sequence(1, 41)
    batch.add(seq)
    assert batch.uncomputed_tokens() == 41
    assert batch.admit() == (PrefixMiss(seq, 40),)
    assert batch.plan(0.0, lookups=[seq]).chunks == () and seq.phase is Phase.LOCATING
    order = batch.located(seq, 9)
    assert order is not None and seq.phase is Phase.LOADING
    assert batch.uncomputed_tokens() == 5
    batch.loaded(order, (Tier.L2,) * 6)  # The last three blocks did not arrive.
    batch.load_ended(order)
    assert batch.uncomputed_tokens() == 17


def test_prompts_share_a_budget_in_the_order_of_their_rank() -> None:
    batch = batcher()
    batch.add(sequence(1, 20, priority=1))
    batch.add(sequence(2, 10))
    assert step(batch) == [(2, 10), (1, 4)]
    assert step(batch) == [(2, 1), (1, 15)]


def test_what_someone_waits_for_goes_before_bulk_which_fills_the_rest_and_is_not_starved() -> None:
    batch = batcher()
    for number in (1, 2):
        batch.add(sequence(number, 20, priority=1))
    batch.add(sequence(500, 6))
    assert step(batch) == [(500, 6), (1, 4)], "a quarter of the step, to keep it short"
    late = sequence(1 + PRIORITY_ARRIVALS, 6)
    batch.add(late)
    assert step(batch) == [(500, 1), (1, 15)], "it came long before"
    assert step(batch) == [(500, 1), (1, 1), (late.seq_id, 6), (2, 4)]


def test_bulk_fills_steps_in_which_no_prompt_of_higher_priority_waits() -> None:
    batch = batcher()
    batch.add(sequence(500, 6))
    assert step(batch) == [(500, 6)]
    for number in (1, 2):
        batch.add(sequence(number, 20, priority=1))
    assert step(batch) == [(500, 1), (1, 15)]
    batch.add(sequence(501, 10))
    assert step(batch) == [(500, 1), (501, 10), (1, 4)], "both share the quarter"
    assert step(batch) == [(500, 1), (501, 1), (1, 1), (2, 13)]


def test_bulk_leaves_a_place_to_an_urgent_prompt() -> None:
    batch = batcher()
    for number in range(1, 12):
        batch.add(sequence(number, 2, priority=1))
    step(batch)
    assert (batch.active, batch.waiting) == (7, 4)
    batch.add(sequence(500, 3))
    assert step(batch)[-1] == (500, 3)
    assert (batch.active, batch.waiting) == (8, 4)


def test_an_urgent_prompt_takes_the_pages_of_the_bulk_that_ranks_last() -> None:
    batch = batcher(pages=7, budget=32)
    for number in (1, 2):
        batch.add(sequence(number, 11, priority=1))
    assert step(batch) == [(1, 11), (2, 11)]  # All six pages.
    batch.add(sequence(500, 9))
    assert (500, 9) in step(batch)
    assert (batch.preemptions, batch.active, batch.waiting) == (1, 2, 1)


def test_a_prompt_of_equal_priority_takes_no_pages() -> None:
    batch = batcher(pages=7, budget=32)
    for number in (1, 2):
        batch.add(sequence(number, 11))
    step(batch)
    batch.add(sequence(500, 9))
    assert step(batch) == [(1, 1), (2, 1)]
    assert (batch.preemptions, batch.waiting) == (0, 1)


def test_who_ranks_last_loses_pages_and_is_computed_again() -> None:
    batch = batcher(pages=7, budget=32)
    first, last = sequence(1, 9, new=12), sequence(2, 9, new=12)
    batch.add(first)
    batch.add(last)
    while not batch.preemptions:
        assert step(batch)
    assert last.phase is Phase.WAITING and last.num_pages == 0 and last.computed == 0
    assert first.phase is Phase.RUNNING
    batch.check_invariants()
    batch.end(first)
    step(batch)
    assert last.phase is Phase.RUNNING and last.hits_final
    assert last.computed == last.length - 1, "it goes on with all tokens it had"
    batch.check_invariants()


def test_an_ended_sequence_gives_all_back_in_any_phase() -> None:
    batch = batcher(budget=8)
    running, waiting = sequence(1, 20), sequence(2, 20)
    batch.add(running)
    step(batch)
    batch.add(waiting)
    for seq in (running, waiting):
        batch.end(seq)
    assert batch.pool.used == 0 and (batch.active, batch.waiting) == (0, 0)
    assert step(batch) == []
    batch.check_invariants()


def test_guessed_tokens_count_up_to_the_one_that_ends_the_answer() -> None:
    batch = batcher()
    seq = sequence(1, 5)
    batch.add(seq)
    step(batch)
    (chunk,) = planned(batch)
    outcome = batch.computed(chunk, (5, 6, 7), stop_ids=(7,))
    assert (outcome.new_tokens, outcome.finish) == ((5, 6), FinishReason.STOP)
    assert len(outcome.full_blocks) == 1, "the block that the prompt began"
    assert (seq.length, seq.computed, seq.committed) == (8, 8, 2)
    batch.check_invariants()


def test_the_last_of_the_tokens_that_follow_is_not_computed_yet() -> None:
    batch = batcher()
    seq = sequence(1, 5, new=4)
    batch.add(seq)
    step(batch)
    (chunk,) = planned(batch)
    outcome = batch.computed(chunk, (5, 6, 7), ())
    assert (outcome.new_tokens, outcome.finish) == ((5, 6, 7), FinishReason.LENGTH)
    assert (seq.length, seq.computed) == (9, 8)


def test_a_miss_that_is_not_looked_up_is_computed_at_once() -> None:
    batch = batcher()
    asked, computed = sequence(1, 9), sequence(2, 9)
    for seq in (asked, computed):
        batch.add(seq)
    assert batch.admit() == (PrefixMiss(asked, 8), PrefixMiss(computed, 8))
    plan = batch.plan(0.0, lookups=[asked])
    assert plan == Plan(fresh_pages=(1, 2, 3), chunks=(Chunk(computed, 0, 9, samples=True),))
    assert (asked.phase, computed.phase) == (Phase.LOCATING, Phase.RUNNING)


def test_a_plan_stops_at_each_sequence_that_must_go_and_goes_on_without_it() -> None:
    batch = batcher(pages=7, budget=32)
    first, last = sequence(1, 9, new=12), sequence(2, 9, new=12)
    for seq in (first, last):
        batch.add(seq)
    assert step(batch) == [(1, 9), (2, 9)]  # All six pages are in use.
    while first.computed < 12:
        assert step(batch) == [(1, 1), (2, 1)]
    assert batch.admit() == () and batch.plan(0.0) == Plan(victim=last)
    assert last.phase is Phase.RUNNING and last.num_pages == 3, "it still has what is to be saved"
    saved = last.pages[:1]
    batch.pool.acquire(saved)
    batch.preempt(last)
    assert [chunk.seq for chunk in batch.plan(0.0).chunks] == [first]
    assert last.phase is Phase.WAITING and batch.preemptions == 1
    batch.pool.release(saved)
    batch.check_invariants()


def test_what_is_known_of_a_block_is_copied_and_not_cleared() -> None:
    batch = batcher()
    known = sequence(1, 7)
    batch.add(known)
    step(batch)
    page = known.pages[1]
    alike = sequence(1, 7)
    alike.seq_id = 2
    batch.add(alike)
    batch.admit()
    plan = batch.plan(0.0)
    (target,) = alike.pages[1:]
    assert plan.copies == (PageCopy(page, target, 2),) and target not in plan.fresh_pages
    assert (alike.part_tokens, alike.computed) == (2, 6)
