"""Which blocks of a request are saved: each once, none before all its tokens are computed."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from tierkv.integrations.vllm.connector_book import KnownKeys, RequestBook, RequestStory
from tierkv.kvcore.block import block_keys
from tierkv.kvcore.ids import BlockKey, NamespaceKey

NAMESPACE = NamespaceKey(b"n" * 32)
WIDTH = 4


@dataclass
class Request:
    request_id: str
    all_token_ids: list[int]
    num_computed_tokens: int = 0
    places: list[int] = field(default_factory=lambda: list(range(100, 120)))


def make(tokens: int, *, computed: int = 0) -> tuple[RequestBook, Request, RequestStory]:
    book = RequestBook(block_tokens=WIDTH, known_limit=100)
    request = Request("r", list(range(tokens)), computed)
    return book, request, book.open(request, NAMESPACE)


def step(book: RequestBook, request: Request, story: RequestStory, scheduled: int) -> list[int]:
    """Plan a step as the scheduler's half does; which blocks are saved."""
    full = book.full_after(story, scheduled)
    computed = request.num_computed_tokens
    saves = book.saves(story, full, request.places, computed=computed)
    request.num_computed_tokens += scheduled
    return [save.block_id - 100 for save in saves]


def test_names_are_the_schedulers_and_grow_with_the_answer() -> None:
    book, request, story = make(9)
    assert book.keys(story, 2) == block_keys(NAMESPACE, request.all_token_ids, block_tokens=WIDTH)
    request.all_token_ids += [50, 51, 52]
    assert book.keys(story, 3) == block_keys(NAMESPACE, request.all_token_ids, block_tokens=WIDTH)
    assert book.keys(story, 1) == story.keys[:1]
    with pytest.raises(ValueError, match="block 3 of r is not full"):
        book.keys(story, 4)


def test_a_prompt_in_chunks_and_its_answer_are_saved_once() -> None:
    book, request, story = make(10)
    assert step(book, request, story, 6) == [0]
    assert step(book, request, story, 4) == [1]
    request.all_token_ids.append(70)
    assert step(book, request, story, 1) == []  # The eleventh token.
    request.all_token_ids.append(71)
    assert step(book, request, story, 1) == [2]
    assert story.in_workers


def test_only_what_this_step_computes_waits_for_its_layers() -> None:
    book, request, story = make(12, computed=8)
    full = book.full_after(story, 4)
    saves = book.saves(story, full, request.places, computed=8)
    assert [save.fresh for save in saves] == [False, False, True]


def test_guessed_tokens_do_not_count() -> None:
    book, request, story = make(7, computed=6)
    # One known token and three drafts, which may be refused.
    assert step(book, request, story, 4) == [0]
    request.num_computed_tokens = 7
    request.all_token_ids.append(90)
    assert step(book, request, story, 1) == [1]


def test_a_token_sampled_last_was_never_computed() -> None:
    book, request, story = make(8, computed=8)
    assert book.full_at_end(story, 0) == 1
    request.all_token_ids.append(5)
    assert book.full_at_end(story, 0) == 2
    # Aborted while a step was under way, whose tokens may not be there.
    request.num_computed_tokens = 8
    assert book.full_at_end(story, 3) == 1
    request.num_computed_tokens = 0
    assert book.full_at_end(story, 0) == 0


def test_blocks_the_pool_has_are_not_saved_again() -> None:
    book, request, story = make(12)
    book.known.add(book.keys(story, 3)[1:2])
    assert step(book, request, story, 12) == [0, 2]
    other = Request("s", list(range(12)))
    assert step(book, other, book.open(other, NAMESPACE), 12) == []


def test_a_preempted_request_begins_again() -> None:
    book, request, story = make(8)
    assert step(book, request, story, 8) == [0, 1]
    book.known.discard(story.keys[1:])  # It could not be saved.
    book.preempt("r")
    request.num_computed_tokens = 0
    assert step(book, request, story, 8) == [1]


def test_places_bound_what_is_saved() -> None:
    book, request, story = make(12)
    request.places = [100]
    assert step(book, request, story, 12) == [0]


def test_muted_requests_are_told_apart() -> None:
    book, _, story = make(8)
    book.mute()
    assert (story.no_loads, story.no_saves) == (True, True)
    assert book.stories.get("r") is story
    book.close("r")
    assert (book.stories.get("r"), len(book)) == (None, 0)


def test_the_oldest_beliefs_are_forgotten() -> None:
    known = KnownKeys(2)
    a, b, c = (BlockKey(bytes([n]) * 16) for n in range(1, 4))
    known.add([a, b])
    known.add([a])
    known.add([c])
    assert [key in known for key in (a, b, c)] == [True, False, True]
    known.discard([a])
    assert len(known) == 1
    known.clear()
    assert c not in known
