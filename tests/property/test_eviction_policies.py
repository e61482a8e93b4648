"""Every eviction policy under random calls: only what is offered goes, and nothing is forgotten.

The cache's side is modelled naively; a second policy of the same seed gets the same calls and has
to give the same answers.
"""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tierkv.kvcore.block import Expectation, Outlook
from tierkv.policies.eviction import BlockFacts, EvictionPolicy
from tierkv.policies.select import PRODUCTION_POLICIES
from tierkv.simulator.yardsticks import BLOCK_POLICIES

CAPACITY = 6
POLICIES = PRODUCTION_POLICIES | BLOCK_POLICIES
HANDLES = st.integers(0, CAPACITY - 1)
PATHS = st.lists(st.integers(0, 2), min_size=1, max_size=4).map(tuple)
EXPECTED = st.one_of(st.none(), st.floats(0, 1000))


class PolicyMachine(RuleBasedStateMachine):
    """Blocks are paths in a tree; handles are places in a cache of six."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.pair: list[EvictionPolicy] = [POLICIES[name](CAPACITY, 7) for _ in range(2)]
        self.here: dict[int, tuple[int, ...]] = {}
        self.offered: set[int] = set()
        self.now = 0.0
        self.entries = self.exits = 0

    def facts(self, path: tuple[int, ...], data: st.DataObject) -> BlockFacts:
        return BlockFacts(
            key=path,
            parent=path[:-1] or None,
            outlook=Outlook(
                depth=len(path) - 1,
                tail=data.draw(st.booleans()),
                expectation=data.draw(st.sampled_from(Expectation)),
                expected_in_s=data.draw(EXPECTED),
            ),
            prompt_blocks=data.draw(st.integers(0, 5)),
        )

    @rule(seconds=st.sampled_from([0.0, 0.5, 3.0, 100.0, 1e6]))
    def time_goes_on(self, seconds: float) -> None:
        self.now += seconds

    @rule(handle=HANDLES, path=PATHS, data=st.data())
    def enter(self, handle: int, path: tuple[int, ...], data: st.DataObject) -> None:
        if handle in self.here:
            return
        facts = self.facts(path, data)
        if len(self.here) == CAPACITY - 1:
            self.ask_for_room(facts)
        for policy in self.pair:
            policy.entered(handle, facts, self.now)
        self.here[handle] = path
        self.entries += 1

    @rule(handle=HANDLES, data=st.data())
    def use(self, handle: int, data: st.DataObject) -> None:
        if handle in self.here:
            facts = self.facts(self.here[handle], data)
            for policy in self.pair:
                policy.used(handle, facts, self.now)

    @rule(handle=HANDLES)
    def offer(self, handle: int) -> None:
        if handle in self.here:
            for policy in self.pair:
                policy.offer(handle)
            self.offered.add(handle)

    @rule(handle=HANDLES)
    def withdraw(self, handle: int) -> None:
        if handle in self.here:
            for policy in self.pair:
                policy.withdraw(handle)
            self.offered.discard(handle)

    @rule(handle=HANDLES)
    def drop(self, handle: int) -> None:
        if handle in self.here:
            self.leave(handle)

    @precondition(lambda self: self.offered)
    @rule()
    def evict(self) -> None:
        victim = self.pair[0].victim(self.now)
        assert victim is not None
        self.leave(victim)

    @rule(path=PATHS, data=st.data())
    def refuse(self, path: tuple[int, ...], data: st.DataObject) -> None:
        facts = self.facts(path, data)
        if path not in self.here.values():
            for policy in self.pair:
                policy.refused(facts, self.now)

    def ask_for_room(self, facts: BlockFacts) -> None:
        first, second = (policy.admits(facts, self.now) for policy in self.pair)
        assert first == second
        assert first or self.offered, "refused although nobody would have to go"

    def leave(self, handle: int) -> None:
        for policy in self.pair:
            policy.left(handle, self.now)
        del self.here[handle]
        self.offered.discard(handle)
        self.exits += 1

    @invariant()
    def the_victim_is_offered_and_the_same_for_equals(self) -> None:
        first, second = (policy.victim(self.now) for policy in self.pair)
        assert first == second == self.pair[0].victim(self.now)
        assert first in self.offered if self.offered else first is None

    @invariant()
    def what_came_is_here_or_gone(self) -> None:
        assert self.entries - self.exits == len(self.here)

    def teardown(self) -> None:
        """All that may go does go, one after the other."""
        while self.offered:
            self.evict()
        assert self.pair[0].victim(self.now) is None


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_policies_keep_their_contract(name: str) -> None:
    run_state_machine_as_test(
        partial(PolicyMachine, name), settings=settings(max_examples=40, stateful_step_count=40)
    )
