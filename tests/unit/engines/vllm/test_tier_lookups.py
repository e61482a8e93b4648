"""The tier's book of lookups: who waits, what is held, and what is let go."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tierkv.integrations.vllm.tier_lookups import LookupBook

PATIENCE_S, HOLD_S = 0.5, 30.0
A, B, C = b"a", b"b", b"c"


def make_book() -> LookupBook:
    return LookupBook(patience_s=PATIENCE_S, hold_s=HOLD_S)


def test_a_chunk_is_asked_for_once_and_held() -> None:
    book = make_book()
    assert book.look(A, "r", 0) is None and book.look(A, "s", 0) is None
    assert book.look(B, "r", 0) is None
    assert book.take_wanted() == [A, B] and book.take_wanted() == []
    assert book.look(A, "r", 0.1) is None
    assert book.answer({A: True, B: False}, 0.2) == []
    assert book.look(A, "r", 0.3) is True and book.look(B, "r", 0.3) is False
    assert book.held == 1
    assert book.forget("r") == [] and book.forget("s") == [A]
    assert book.held == 0


def test_nobody_waits_longer_than_the_patience() -> None:
    book = make_book()
    assert book.look(A, "r", 0) is None
    book.take_wanted()
    assert book.look(A, "r", 0.5) is None and book.look(A, "r", 0.6) is False
    assert book.answer({A: True}, 0.7) == []
    assert book.look(A, "r", 0.8) is True


def test_what_nobody_wants_any_more_is_let_go_when_the_answer_comes() -> None:
    book = make_book()
    book.look(A, "r", 0)
    book.look(B, "r", 0)
    book.take_wanted()
    assert book.forget("r") == []
    assert book.answer({A: True, B: False}, 0.1) == [A]
    book.look(A, "r", 0)
    assert book.forget("r") == [] and book.take_wanted() == []


def test_an_answer_serves_who_came_while_it_was_on_its_way() -> None:
    book = make_book()
    book.look(A, "r", 0)
    book.take_wanted()
    book.forget("r")
    assert book.look(A, "s", 0.1) is None and book.take_wanted() == []
    assert book.answer({A: True}, 0.2) == []
    assert book.look(A, "s", 0.2) is True


def test_a_load_keeps_its_hold_until_it_ends() -> None:
    book = make_book()
    for key in (A, B):
        book.look(key, "r", 0)
    book.answer(dict.fromkeys(book.take_wanted(), True), 0)
    assert book.begin_load([A, B, C]) == [A, B] and book.held == 0
    assert book.forget("r") == [] and book.expire(1000) == []
    book.end_load([A, B], {A})
    assert book.look(A, "s", 1) is None


def test_a_failed_load_is_not_tried_again_by_its_request() -> None:
    book = make_book()
    book.look(A, "r", 0)
    book.answer(dict.fromkeys(book.take_wanted(), True), 0)
    book.end_load(book.begin_load([A]), set())
    assert book.look(A, "r", 1) is False
    book.stored([A])
    assert book.look(A, "r", 2) is None


def test_a_hold_expires() -> None:
    book = make_book()
    book.look(A, "r", 0)
    book.answer(dict.fromkeys(book.take_wanted(), True), 0)
    book.look(B, "r", 10)
    book.answer(dict.fromkeys(book.take_wanted(), True), 10)
    assert book.expire(30) == [] and book.expire(31) == [A] and book.expire(31) == []
    assert book.look(A, "r", 31) is None and book.look(B, "r", 31) is True


def test_clear_forgets_answers_to_come() -> None:
    book = make_book()
    book.look(A, "r", 0)
    book.answer(dict.fromkeys(book.take_wanted(), True), 0)
    book.look(B, "r", 0)
    asked = book.take_wanted()
    assert book.clear() == [A]
    assert book.answer(dict.fromkeys(asked, True), 1) == [B]
    assert book.look(A, "r", 1) is None


class Reservations(RuleBasedStateMachine):
    """Whatever happens, the pool holds exactly what the book has, loads and still has to let go."""

    def __init__(self) -> None:
        super().__init__()
        self.book = make_book()
        self.now = 0.0
        self.held: set[bytes] = set()
        self.on_the_way: list[dict[bytes, bool]] = []
        self.loads: list[list[bytes]] = []

    keys = st.sampled_from([bytes([n]) for n in range(5)])
    requests = st.sampled_from("rst")

    def let_go(self, keys: list[bytes]) -> None:
        assert len(set(keys)) == len(keys) and self.held.issuperset(keys)
        self.held.difference_update(keys)

    @rule(key=keys, request=requests)
    def look(self, key: bytes, request: str) -> None:
        if self.book.look(key, request, self.now):
            assert key in self.held

    @rule(data=st.data())
    def ask(self, data: st.DataObject) -> None:
        wanted = self.book.take_wanted()
        there = {key: data.draw(st.booleans()) for key in wanted}
        if there:
            self.on_the_way.append(there)

    @rule()
    def answer(self) -> None:
        if self.on_the_way:
            there = self.on_the_way.pop(0)
            found = {key for key, ok in there.items() if ok}
            assert not self.held & found
            self.held |= found
            self.let_go(self.book.answer(there, self.now))

    @rule(some=st.sets(keys))
    def load(self, some: set[bytes]) -> None:
        held = self.book.begin_load(sorted(some))
        assert self.held.issuperset(held)
        if held:
            self.loads.append(held)

    @rule(data=st.data())
    def end_load(self, data: st.DataObject) -> None:
        if self.loads:
            held = self.loads.pop(0)
            self.book.end_load(held, {key for key in held if data.draw(st.booleans())})
            self.let_go(held)

    @rule(request=requests)
    def forget(self, request: str) -> None:
        self.let_go(self.book.forget(request))

    @rule(seconds=st.sampled_from([0.1, 1.0, 40.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.let_go(self.book.expire(self.now))

    @rule(some=st.sets(keys))
    def stored(self, some: set[bytes]) -> None:
        self.book.stored(some)

    @invariant()
    def books_agree(self) -> None:
        self.book.check_invariants()
        loading = sum(len(load) for load in self.loads)
        assert len(self.held) == self.book.held + loading


Reservations.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestReservations = Reservations.TestCase
