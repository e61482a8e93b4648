"""Leases on blocks against a naive model: who holds what until when, and how much at most."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tierkv.kvcore.block_event import LeaseId
from tierkv.policies.holds import Holds

LIMIT = 20
LEASES = st.integers(1, 4).map(LeaseId)


class HoldsMachine(RuleBasedStateMachine):
    """The model: blocks and deadline by lease; what was refused was refused for want of room."""

    def __init__(self) -> None:
        super().__init__()
        self.holds = Holds(LIMIT)
        self.now = 0.0
        self.leases: dict[LeaseId, tuple[set[int], float]] = {}

    def _held(self) -> set[int]:
        return set().union(*(blocks for blocks, _ in self.leases.values()))

    @staticmethod
    def cost_of(block: int) -> int:
        return 1 + block % 3

    @rule(lease=LEASES, blocks=st.lists(st.integers(0, 15), max_size=6), ttl_s=st.integers(1, 9))
    def hold(self, lease: LeaseId, blocks: list[int], ttl_s: int) -> None:
        refused_before, until = self.holds.refused, self.now + ttl_s
        self.holds.hold(lease, [(block, self.cost_of(block)) for block in blocks], until)
        mine = self.leases.get(lease, (set(), 0.0))[0]
        refused, full = 0, False
        for block in blocks:
            held = self._held() | mine
            room = LIMIT - sum(map(self.cost_of, held))
            full = full or (block not in held and self.cost_of(block) > room)
            if full and block not in held:
                refused += 1
            else:
                mine.add(block)
        if mine:
            self.leases[lease] = (mine, until)
        assert self.holds.refused == refused_before + refused

    @rule(lease=LEASES, ttl_s=st.integers(1, 9))
    def prolong(self, lease: LeaseId, ttl_s: int) -> None:
        self.holds.prolong(lease, self.now + ttl_s)
        if lease in self.leases:
            self.leases[lease] = (self.leases[lease][0], self.now + ttl_s)

    @rule(lease=LEASES)
    def end(self, lease: LeaseId) -> None:
        self._ends([lease], self.holds.end(lease))

    def _ends(self, leases: list[LeaseId], freed: list[int]) -> None:
        before = self._held()
        for lease in leases:
            self.leases.pop(lease, None)
        assert sorted(freed) == sorted(before - self._held())

    @rule(step=st.integers(1, 5))
    def wait(self, step: int) -> None:
        self.now += step
        due = [lease for lease, (_, until) in self.leases.items() if until <= self.now]
        self._ends(due, self.holds.expire(self.now))

    @rule()
    def give_way(self) -> None:
        if not self.leases:
            assert self.holds.give_way() == []
            return
        earliest = min(until for _, until in self.leases.values())
        first = [lease for lease, (_, until) in self.leases.items() if until == earliest]
        self._ends([min(first)], self.holds.give_way())

    @rule(block=st.integers(0, 15))
    def gone(self, block: int) -> None:
        self.holds.gone(block)
        for lease, (blocks, _) in list(self.leases.items()):
            blocks.discard(block)
            if not blocks:
                del self.leases[lease]

    @invariant()
    def agrees(self) -> None:
        self.holds.check_invariants()
        assert {block for block in range(16) if block in self.holds} == self._held()
        assert len(self.holds) == len(self._held())


HoldsMachine.TestCase.settings = settings(
    max_examples=80, stateful_step_count=40, deadline=None, derandomize=True
)
TestHolds = HoldsMachine.TestCase


def test_prolonging_leaves_no_deadlines_behind() -> None:
    holds = Holds(LIMIT)
    holds.hold(LeaseId(1), [(1, 1)], 1.0)
    for second in range(2, 5_000):
        holds.prolong(LeaseId(1), float(second))
    assert len(holds._deadlines) < 200
    assert holds.expire(4_998.0) == [] and holds.expire(4_999.0) == [1]
