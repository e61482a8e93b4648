"""Replays small enough to count by hand."""

from __future__ import annotations

import pytest

from tierkv.kvcore.block import Expectation
from tierkv.kvcore.errors import UserError
from tierkv.simulator.cache_replay import NO_HINT, Hint, TraceHints, policy_names, replay
from tierkv.simulator.trace import Request


def request(at: float, *ids: int, tokens: int | None = None, **extra: object) -> Request:
    return Request(at, 512 * len(ids) if tokens is None else tokens, 1, ids, **extra)


TURNS = [request(0, 1, 2), request(1, 1, 2, 3), request(2, 9), request(3, 1, 2, 3, 4)]


@pytest.mark.parametrize("name", policy_names())
def test_a_cache_that_holds_everything_hits_all_that_was_there(name: str) -> None:
    result = replay(TURNS, name, 100)
    assert (result.block_hits, result.block_references) == (5, 10)
    assert result.block_hit_rate == 0.5
    assert result.token_hit_rate == 0.5


@pytest.mark.parametrize("name", policy_names())
def test_same_seed_same_answer(name: str) -> None:
    trace = [request(i, *range(i % 7, i % 7 + 5 - i % 3)) for i in range(200)]
    assert replay(trace, name, 6, seed=3) == replay(trace, name, 6, seed=3)


def test_a_partial_last_block_hits_its_tokens_only() -> None:
    result = replay([request(0, 1, 2, tokens=700)] * 2, "leaf_lru", 4)
    assert result.token_hits == 700


def test_order_matters_when_the_prompt_is_longer_than_the_cache() -> None:
    twice = [request(i, 1, 2, 3) for i in range(2)]
    hits = {order: replay(twice, "lru", 2, order=order).block_hits for order in ("head", "tail")}
    assert hits == {"head": 0, "tail": 2}
    assert replay(twice, "leaf_lru", 2).block_hits == 2, "what does not fit is not let in"


def test_leaves_go_and_the_request_spares_its_own() -> None:
    trace = [request(0, 1, 2), request(1, 1, 3), request(2, 1, 3, 4), request(3, 1, 2)]
    assert replay(trace, "leaf_lru", 3).block_hits == 0 + 1 + 2 + 1


def test_an_id_under_two_prefixes_does_no_harm() -> None:
    trace = [request(0, 1, 2), request(1, 5, 2, 6), request(2, 5, 2), request(3, 1, 2)] * 20
    for name in policy_names():
        assert 0 <= replay(trace, name, 3).block_hits <= 160


def test_progress_is_told_to_the_end() -> None:
    told: list[tuple[int, int]] = []
    replay(TURNS * 100, "lru", 3, progress=lambda done, of: told.append((done, of)))
    assert told == [(256, 400), (400, 400)]


def test_unknown_policies_and_no_capacity_are_refused() -> None:
    with pytest.raises(UserError, match="clairvoyant") as caught:
        replay(TURNS, "clairvoyant", 3)
    assert "belady" in caught.value.hint
    with pytest.raises(UserError, match="at least 1"):
        replay(TURNS, "lru", 0)


def test_hints_say_only_what_they_are_asked_to() -> None:
    trace = [
        request(0, 1, session_id="a", tool_use=True),
        request(9, 1, 2, session_id="a", tool_use=False, think_time_s=4.0),
        request(9, 7),
    ]
    turn, none, unknown = Expectation.TURN, Expectation.NONE, Expectation.UNKNOWN
    assert list(TraceHints().of(trace)) == [NO_HINT] * 3
    assert [h.expectation for h in TraceHints(turn=True).of(trace)] == [turn, unknown, unknown]
    assert [h.expectation for h in TraceHints(final=True).of(trace)] == [turn, none, unknown]
    assert list(TraceHints(think_time=True).of(trace)) == [Hint(unknown, 4.0), NO_HINT, NO_HINT]
