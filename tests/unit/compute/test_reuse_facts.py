from __future__ import annotations

from dataclasses import replace

import pytest

from tests.fix_dmp import make_put
from tests.fix_model import make_request
from tierkv.compute.batching.reuse_facts import (
    block_of,
    expectation_of,
    facts_of_hits,
    prompt_blocks,
)
from tierkv.compute.batching.sequence import Sequence, make_sequence
from tierkv.dmp.wire.messages import check_put
from tierkv.kvcore.block import Expectation
from tierkv.kvcore.request import ReuseHint
from tierkv.policies.eviction import BlockFacts

E = Expectation


def sequence(hint: ReuseHint | None, tokens: int = 35) -> Sequence:
    request = make_request(list(range(tokens)), hint=hint)
    return make_sequence(1, request, arrival_s=0.0, block_tokens=8)


def facts_of(seq: Sequence, block: int) -> BlockFacts:
    return BlockFacts.of(block_of(seq, block), prompt_blocks(seq))


def expectations(hint: ReuseHint | None) -> list[Expectation]:
    seq = sequence(hint)
    return [block_of(seq, block).outlook.expectation for block in range(4)]


@pytest.mark.parametrize(
    ("hint", "expected"),
    [
        (None, [E.UNKNOWN] * 4),
        (ReuseHint(), [E.UNKNOWN] * 4),
        (ReuseHint(next_turn=True), [E.TURN] * 4),
        (ReuseHint(next_turn=False), [E.NONE] * 4),
        (ReuseHint(pending_calls=3, pending_tokens=17), [E.ROWS, E.ROWS, E.NONE, E.NONE]),
        (ReuseHint(pending_calls=3), [E.NONE] * 4),
        (ReuseHint(pending_calls=0, pending_tokens=16), [E.UNKNOWN, E.UNKNOWN, E.NONE, E.NONE]),
        (ReuseHint(next_turn=True, pending_calls=1, pending_tokens=8), [E.ROWS] + [E.TURN] * 3),
    ],
)
def test_what_a_hint_says_of_each_block(hint: ReuseHint | None, expected: list[E]) -> None:
    assert expectations(hint) == expected


def test_a_block_that_only_begins_in_what_is_shared_is_private() -> None:
    hint = ReuseHint(pending_calls=1, pending_tokens=15)
    assert (expectation_of(hint, 15), expectation_of(hint, 16)) == (E.ROWS, E.NONE)


def test_place_and_time_are_told() -> None:
    seq = sequence(ReuseHint(next_turn=True, next_turn_s=2.5))
    first, last = facts_of(seq, 0), facts_of(seq, 3)
    assert (first.parent, first.outlook.depth, first.outlook.tail) == (None, 0, False)
    assert (last.parent, last.outlook.depth, last.outlook.tail) == (seq.keys[2], 3, True)
    assert last.outlook.expected_in_s == 2.5


def test_a_turn_that_is_never_expected_to_come_is_no_reason_to_refuse_a_put() -> None:
    facts = facts_of(sequence(ReuseHint(next_turn=True, next_turn_s=1e300)), 0)
    assert facts.outlook.expectation is E.TURN
    check_put(replace(make_put("n1"), outlook=facts.outlook))


def test_of_hits_only_what_changes_is_made_again() -> None:
    before = sequence(ReuseHint(next_turn=True))
    known = [facts_of(before, block) for block in range(4)]
    again = facts_of_hits(sequence(None, tokens=60), known)
    fresh = [facts_of(sequence(None, tokens=60), block) for block in range(4)]
    assert fresh[0].prompt_blocks == 7, "of use where a block is new"
    assert again == [replace(facts, prompt_blocks=4) for facts in fresh]
    same = facts_of_hits(sequence(None, tokens=60), again)
    assert all(one is other for one, other in zip(same, again, strict=True))
