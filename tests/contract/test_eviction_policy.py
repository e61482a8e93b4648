"""Every eviction policy against the numbered sentences of policies/eviction.py."""

from __future__ import annotations

import pytest

from tierkv.kvcore.block import Outlook
from tierkv.policies.eviction import BlockFacts, EvictionPolicy
from tierkv.policies.select import PRODUCTION_POLICIES, make_policy

NAMES = sorted(PRODUCTION_POLICIES)


@pytest.fixture(params=NAMES)
def policy(request: pytest.FixtureRequest) -> EvictionPolicy:
    return make_policy(request.param, 8, seed=3)


def enter_chain(policy: EvictionPolicy, first: int, blocks: int, now: float) -> list[int]:
    """Enter a chain of blocks, head first, and answer its handles."""
    handles = list(range(first, first + blocks))
    for depth, handle in enumerate(handles):
        parent = handle - 1 if depth else None
        facts = BlockFacts(handle, parent, Outlook(depth=depth, tail=depth == blocks - 1))
        policy.entered(handle, facts, now)
    return handles


def test_2_what_left_or_was_withdrawn_is_no_victim(policy: EvictionPolicy) -> None:
    chain = enter_chain(policy, 0, 3, 1.0)
    for handle in chain:
        policy.offer(handle)
        policy.offer(handle)
    policy.withdraw(0)
    policy.withdraw(0)
    policy.left(1, 2.0)
    assert policy.victim(2.0) == 2
    policy.used(0, BlockFacts(0), 3.0)
    assert policy.victim(3.0) == 2, "a use offers nothing"


def test_3_victim_is_offered_and_stable(policy: EvictionPolicy) -> None:
    assert policy.victim(0.0) is None
    chain = enter_chain(policy, 0, 4, 1.0)
    assert policy.victim(1.0) is None, "nothing was offered"
    policy.offer(chain[3])
    assert policy.victim(1.0) == policy.victim(1.0) == chain[3]


def test_3_all_offered_blocks_go_in_the_end(policy: EvictionPolicy) -> None:
    for first in (0, 3, 6):
        for handle in enter_chain(policy, first, 3, float(first)):
            policy.offer(handle)
    gone = []
    while (handle := policy.victim(10.0)) is not None:
        policy.left(handle, 10.0)
        gone.append(handle)
    assert sorted(gone) == list(range(9))


def test_3_a_block_that_is_offered_again_in_the_same_moment_is_a_victim(
    policy: EvictionPolicy,
) -> None:
    """A cache withdraws whom it may not take when it asks, and offers it again when it may."""
    (handle,) = enter_chain(policy, 0, 1, 1.0)
    policy.offer(handle)
    assert policy.victim(1.0) == handle
    policy.withdraw(handle)
    assert policy.victim(1.0) is None
    policy.offer(handle)
    assert policy.victim(1.0) == handle


def test_4_a_handle_is_used_again_for_another_block(policy: EvictionPolicy) -> None:
    enter_chain(policy, 0, 1, 1.0)
    policy.offer(0)
    policy.left(0, 2.0)
    policy.entered(0, BlockFacts("another"), 3.0)
    assert policy.victim(3.0) is None, "it was offered as another block"
    policy.offer(0)
    assert policy.victim(3.0) == 0


def test_5_everything_is_admitted_while_nothing_is_offered(policy: EvictionPolicy) -> None:
    enter_chain(policy, 0, 8, 1.0)
    assert policy.admits(BlockFacts("new"), 2.0)


@pytest.mark.parametrize("name", NAMES)
def test_6_same_calls_same_answers(name: str) -> None:
    def run() -> list[int]:
        policy, gone = make_policy(name, 8, seed=5), []
        for turn in range(40):
            for handle in enter_chain(policy, 8 * (turn % 3), 8, float(turn)):
                policy.offer(handle)
            for _ in range(8):
                handle = policy.victim(float(turn))
                assert handle is not None
                policy.left(handle, float(turn))
                gone.append(handle)
        return gone

    assert run() == run()


def test_of_one_request_the_deepest_goes_first(policy: EvictionPolicy) -> None:
    for handle in enter_chain(policy, 0, 3, 1.0):
        policy.offer(handle)
    assert policy.victim(1.0) == 2


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="leaf_lru"):
        make_policy("clairvoyant", 8)
