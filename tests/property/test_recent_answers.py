"""RecentAnswers against a list: the most recently used answers that fit are there, no others."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tierkv.dbfront.answer_cache.kept_answer import KeptAnswer, RecentAnswers
from tierkv.kvcore.request import FinishReason

KEYS = st.integers(0, 8).map(lambda n: bytes([n]))
MEMORY = 6_000


class Recent(RuleBasedStateMachine):
    """``model`` has (key, answer) from the least to the most recently used."""

    def __init__(self) -> None:
        super().__init__()
        self.recent = RecentAnswers(MEMORY)
        self.model: list[tuple[bytes, KeptAnswer]] = []
        self.evicted = 0

    def _without(self, key: bytes) -> list[tuple[bytes, KeptAnswer]]:
        return [pair for pair in self.model if pair[0] != key]

    @rule(
        key=KEYS, chars=st.sampled_from([0, 1, 200, 700, 1_399, 1_400, 1_401]), at=st.integers(0, 9)
    )
    def put(self, key: bytes, chars: int, at: int) -> None:
        answer = KeptAnswer("x" * chars, FinishReason.STOP, 1, 1, made_s=float(at))
        self.recent.put(key, answer)
        self.model = self._without(key)
        if answer.memory_bytes > MEMORY:
            return
        self.model.append((key, answer))
        while sum(one.memory_bytes for _, one in self.model) > MEMORY:
            self.model.pop(0)
            self.evicted += 1

    @rule(key=KEYS, oldest=st.integers(0, 9))
    def find(self, key: bytes, oldest: int) -> None:
        known = dict(self.model).get(key)
        expected = known if known is not None and known.made_s >= oldest else None
        assert self.recent.find(key, float(oldest)) == expected
        if expected is not None:
            self.model = [*self._without(key), (key, expected)]

    @rule(key=KEYS)
    def drop(self, key: bytes) -> None:
        self.recent.drop(key)
        self.model = self._without(key)

    @invariant()
    def the_books_agree(self) -> None:
        assert len(self.recent) == len(self.model)
        assert self.recent.used_bytes == sum(one.memory_bytes for _, one in self.model) <= MEMORY
        assert self.recent.evicted == self.evicted


TestRecent = Recent.TestCase
TestRecent.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
