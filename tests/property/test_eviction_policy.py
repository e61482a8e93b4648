"""Every production policy against a naive model of who is resident and who may go.

Which block is worth least is the policy's own affair; that it names one of those offered, whenever
there is one, and none else, is checked in any order of calls, within one moment too.
"""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from tierkv.kvcore.block import Expectation, Outlook
from tierkv.policies.eviction import BlockFacts
from tierkv.policies.select import PRODUCTION_POLICIES, make_policy

HANDLES = st.integers(0, 2)
KEYS = st.integers(0, 9)


class PolicyMachine(RuleBasedStateMachine):
    """``resident`` maps handles to keys; ``offered`` are those that may go."""

    name = "default"

    @initialize(seed=st.integers(0, 3))
    def begin(self, seed: int) -> None:
        self.policy = make_policy(self.name, 4, seed=seed)
        self.resident: dict[int, int] = {}
        self.offered: set[int] = set()
        self.now = 0.0

    def facts(self, key: int, expectation: Expectation = Expectation.UNKNOWN) -> BlockFacts:
        parent = key - 1 if key % 3 else None
        outlook = Outlook(expectation, depth=key % 3, tail=key % 3 == 2)
        return BlockFacts(key, parent, outlook)

    @rule(handle=HANDLES, key=KEYS, expectation=st.sampled_from(Expectation))
    def enter_or_use(self, handle: int, key: int, expectation: Expectation) -> None:
        if handle in self.resident:
            facts = self.facts(self.resident[handle], expectation)
            self.policy.used(handle, facts, self.now)
        elif key not in self.resident.values():
            self.policy.entered(handle, self.facts(key, expectation), self.now)
            self.resident[handle] = key

    @rule(handle=HANDLES)
    def offer(self, handle: int) -> None:
        if handle in self.resident:
            self.policy.offer(handle)
            self.offered.add(handle)

    @rule(handle=HANDLES)
    def withdraw(self, handle: int) -> None:
        if handle in self.resident:
            self.policy.withdraw(handle)
            self.offered.discard(handle)

    @rule(handle=HANDLES)
    def leave(self, handle: int) -> None:
        if handle in self.resident:
            self.policy.left(handle, self.now)
            del self.resident[handle]
            self.offered.discard(handle)

    @rule()
    def evict(self) -> None:
        victim = self.policy.victim(self.now)
        if victim is not None:
            self.leave(victim)

    @rule()
    def refuse_the_victim(self) -> None:
        """What a cache does with one that got a child or a reader since it was offered."""
        victim = self.policy.victim(self.now)
        if victim is not None:
            self.withdraw(victim)

    @rule()
    def offer_all(self) -> None:
        for handle in self.resident:
            self.offer(handle)

    @rule(key=KEYS)
    def ask_admission(self, key: int) -> None:
        if key not in self.resident.values():
            admitted = self.policy.admits(self.facts(key), self.now)
            assert admitted or self.offered, "nothing would have to go"

    @rule(seconds=st.sampled_from([0.25, 1.0, 30.0, 10_000.0]))
    def let_time_pass(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def somebody_offered_goes(self) -> None:
        if not hasattr(self, "policy"):
            return
        victim = self.policy.victim(self.now)
        assert victim == self.policy.victim(self.now)
        if self.offered:
            assert victim in self.offered
        else:
            assert victim is None


@pytest.mark.parametrize("name", sorted(PRODUCTION_POLICIES))
def test_policy(name: str) -> None:
    machine = type("Machine", (PolicyMachine,), {"name": name})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=150, stateful_step_count=40, deadline=None, derandomize=True
        ),
    )
