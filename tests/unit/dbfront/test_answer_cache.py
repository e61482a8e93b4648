"""The answer cache without a model: whose turn it is, how long answers serve, lost stores."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from threading import Event

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fix_accounts import USAGE, make_answer
from tests.fix_sql import make_model
from tests.fix_text import text_call
from tierkv.dbfront.answer_cache.answer_cache import AnswerCache
from tierkv.dbfront.answer_cache.answer_key import (
    MARK_LENGTHS,
    AnswerKey,
    PromptMark,
    answer_key,
    check_scope,
    last_mark,
    may_keep,
    prompt_marks,
)
from tierkv.dbfront.answer_cache.kept_answer import KeptAnswer, StoreLimits, StoreLostError
from tierkv.dbfront.contracts import PreparedCall, TextAnswer
from tierkv.kvcore.call_options import AnswerScope
from tierkv.kvcore.clock import ManualClock
from tierkv.kvcore.errors import UserError
from tierkv.kvcore.ids import NamespaceKey, RequestId
from tierkv.kvcore.layout import KvCodec
from tierkv.kvcore.request import (
    OPTIONAL_FIELDS,
    Blend,
    FinishReason,
    GenerateRequest,
    HitTokens,
    SamplingParams,
    Usage,
)

ONE = AnswerKey(b"1" * 16, lasts=True, most_age_s=0.0)
EXACT = make_answer(usage=replace(USAGE, blended_tokens=0))


class MemoryStore:
    """An AnswerStore that can be broken or held up; used from threads."""

    place = "a test"

    def __init__(self) -> None:
        self.answers: dict[bytes, KeptAnswer] = {}
        self.used: dict[bytes, float] = {}
        self.looks: list[set[bytes]] = []
        self.broken = False
        self.goes = Event()
        self.goes.set()

    def find(self, keys: Iterable[bytes]) -> dict[bytes, KeptAnswer]:
        wanted = set(keys)
        self.looks.append(wanted)
        self.goes.wait(30)
        self._check()
        return {key: self.answers[key] for key in wanted if key in self.answers}

    def keep(
        self, answers: Mapping[bytes, KeptAnswer], used: Mapping[bytes, float], now_s: float
    ) -> None:
        self._check()
        self.answers |= answers
        self.used |= used

    def forget(self, marks: Sequence[PromptMark]) -> set[bytes]:
        self._check()
        gone = {k for k, a in self.answers.items() if any(mark.is_in(a.marks) for mark in marks)}
        for key in gone:
            del self.answers[key]
        return gone

    def close(self) -> None:
        self.broken = True

    def _check(self) -> None:
        if self.broken:
            raise StoreLostError("a test: broken")


def prepared(
    *,
    scope: AnswerScope | None = AnswerScope.TENANT,
    token_ids: tuple[int, ...] = (1, 2),
    **asked: object,
) -> PreparedCall:
    made = {"max_tokens": 9, "temperature": 0.0}
    sampling = SamplingParams(
        **{name: asked.pop(name, value) for name, value in made.items()},  # type: ignore[arg-type]
        seed=asked.pop("seed", None),  # type: ignore[arg-type]
        top_p=asked.pop("top_p", 1.0),  # type: ignore[arg-type]
        **{name: asked.pop(name) for name in OPTIONAL_FIELDS if name in asked},  # type: ignore[arg-type]
    )
    namespace = asked.pop("namespace", bytes(32))
    more = {name: asked.pop(name) for name in ("blend", "guide", "use_cache") if name in asked}
    revision = str(asked.pop("revision", "r1"))
    call = text_call(prompt="x", answer_cache=scope, **asked)
    request = GenerateRequest(
        RequestId("r"),
        "tiny",
        token_ids,
        NamespaceKey(namespace),
        call.tenant,
        sampling,
        **more,  # type: ignore[arg-type]
    )
    return PreparedCall(call, replace(make_model(), revision=revision), request)


def digest(**asked: object) -> bytes:
    key = answer_key(prepared(**asked))  # type: ignore[arg-type]
    assert key is not None
    return key.digest


def test_a_key_stands_for_all_that_decides_about_an_answer() -> None:
    different: list[dict[str, object]] = [
        {},
        {"token_ids": (1, 3)},
        {"token_ids": (1, 2, 0)},
        {"max_tokens": 8},
        {"temperature": 0.5, "seed": 1},
        {"temperature": 0.5, "seed": 2},
        {"temperature": 0.6, "seed": 2},
        {"temperature": 0.5, "seed": 1, "top_p": 0.5},
        {"temperature": 0.5, "seed": 1, "top_k": 3},
        {"temperature": 0.5, "seed": 1, "min_p": 0.5},
        {"presence_penalty": 0.5},
        {"frequency_penalty": 0.5},
        {"repetition_penalty": 0.5},
        {"logit_bias": ((1, 0.5),)},
        {"logit_bias": ((1, 0.5), (2, 0.5))},
        {"min_tokens": 5},
        {"guide": "{}"},
        {"labels": ("a", "b")},
        {"labels": ("b", "a")},
        {"embed": True},
        {"stop": ("a",)},
        {"stop": ("a", "b")},
        {"tenant": "ann"},
        {"revision": "r2"},
        {"namespace": b"n" * 32},
        {"scope": AnswerScope.NAMESPACE},
        {"scope": AnswerScope.SESSION, "session": "s1"},
        {"scope": AnswerScope.SESSION, "session": "s2"},
        {"scope": AnswerScope.SESSION, "session": "s1", "tenant": "ann"},
    ]
    keys = [digest(**asked) for asked in different]
    assert len(set(keys)) == len(different)


def test_a_key_leaves_out_what_does_not_decide() -> None:
    assert digest() == digest()
    for asked in ({"priority": 5}, {"seed": 3}, {"session": "s1"}, {"retries": 2}, {"key": "k"}):
        assert digest(**asked) == digest(), asked
    namespace = {"scope": AnswerScope.NAMESPACE}
    assert digest(**namespace, tenant="ann") == digest(**namespace, tenant="bob")


@pytest.mark.parametrize(
    "asked",
    [
        {"scope": AnswerScope.OFF},
        {"scope": None},
        {"temperature": 0.1},
        {"logprobs": 0},
        {"use_cache": False},
        {"blend": Blend(((1, 2),))},
    ],
)
def test_an_answer_that_may_differ_has_no_key(asked: dict[str, object]) -> None:
    assert answer_key(prepared(**asked)) is None  # type: ignore[arg-type]


def test_a_sessions_answers_do_not_outlive_the_process() -> None:
    kept = {
        scope: answer_key(prepared(scope=scope, session="s1")) for scope in list(AnswerScope)[1:]
    }
    assert [key.lasts for key in kept.values() if key is not None] == [False, True, True]
    check_scope(AnswerScope.SESSION, "s1")
    check_scope(AnswerScope.TENANT, "")
    with pytest.raises(UserError, match="needs a session"):
        check_scope(AnswerScope.SESSION, "")


def test_only_exact_answers_are_kept() -> None:
    assert may_keep(EXACT)
    lossy = next(codec for codec in KvCodec if codec.is_lossy)
    assert not may_keep(make_answer(usage=Usage(9, 1, HitTokens(l1=8), blended_tokens=4)))
    assert not may_keep(make_answer(usage=Usage(9, 1, HitTokens(l2=8), kv_codec=lossy)))
    assert may_keep(make_answer(usage=Usage(9, 1, kv_codec=lossy)))


def cache(store: MemoryStore | None = None, **changes: object) -> tuple[AnswerCache, ManualClock]:
    clock = ManualClock()
    known = {"keep_s": 1_000.0} | changes
    return AnswerCache(clock, store=store, **known), clock  # type: ignore[arg-type]


async def ask(
    answers: AnswerCache,
    key: AnswerKey = ONE,
    answer: TextAnswer | None = EXACT,
    *,
    leads: bool = True,
) -> KeptAnswer | None:
    """Return what was found; a call that found nothing gives ``answer``."""
    async with answers.turn(key, leads=leads) as turn:
        if turn.found is None:
            turn.given = answer
        return turn.found


SECRET = NamespaceKey(bytes(range(32)))


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=80),
    st.lists(st.integers(0, 3), max_size=40),
    st.lists(st.integers(0, 3), min_size=1, max_size=80),
)
def test_a_mark_is_in_every_prompt_that_begins_with_the_forgotten_one(
    forgotten: list[int], more: list[int], other: list[int]
) -> None:
    mark = last_mark(SECRET, forgotten)
    assert mark is not None and PromptMark.of_text(mark.text) == mark
    assert mark.is_in(prompt_marks(SECRET, forgotten + more))
    length = MARK_LENGTHS[mark.at]
    assert 0.75 * len(forgotten) < length <= len(forgotten)
    assert mark.is_in(prompt_marks(SECRET, other)) == (other[:length] == forgotten[:length])
    assert not mark.is_in(prompt_marks(NamespaceKey(bytes(32)), forgotten))


def keyed(name: bytes, *tokens: int, lasts: bool = True) -> AnswerKey:
    request = prepared(token_ids=tokens).request
    return AnswerKey(16 * name, lasts=lasts, most_age_s=0.0, request=request)


async def test_answers_to_a_forgotten_prompt_leave_memory_and_store() -> None:
    store = MemoryStore()
    answers, clock = cache(store)
    mark = last_mark(NamespaceKey(bytes(32)), (1, 2, 3))
    assert mark is not None
    mine = [keyed(b"a", 1, 2, 3), keyed(b"b", 1, 2, 3, 4, lasts=False)]
    other = keyed(b"c", 1, 2)
    for key in (*mine, other):
        await ask(answers, key)
    await answers.flush()
    unwritten = keyed(b"d", 1, 2, 3, 5)
    await ask(answers, unwritten)
    assert await answers.forget([mark]) == {key.digest for key in (*mine, unwritten)}
    await answers.flush()
    assert set(store.answers) == {other.digest}
    clock.advance(1)
    for key in (*mine, unwritten):
        assert await ask(answers, key) is None, "it is asked again, and kept again"
    assert await ask(answers, other) is not None and await ask(answers, mine[0]) is not None


async def test_an_answer_on_its_way_to_a_forgotten_prompt_is_not_kept() -> None:
    store = MemoryStore()
    answers, _ = cache(store)
    key = keyed(b"a", 1, 2, 3)
    mark = last_mark(NamespaceKey(bytes(32)), (1, 2, 3))
    assert mark is not None
    async with answers.turn(key, leads=True) as turn:
        await answers.forget([mark])
        turn.given = EXACT
    assert len(answers.recent) == 0 and await ask(answers, key, None) is None
    store.answers[key.digest] = KeptAnswer.of(EXACT, answers._clock.wall(), key.marks())
    store.goes.clear()
    finding = asyncio.create_task(ask(answers, key, None))
    while not any(key.digest in look for look in store.looks[1:]):
        await asyncio.sleep(0)
    await answers.forget([mark])
    store.answers[key.digest] = KeptAnswer.of(EXACT, answers._clock.wall(), key.marks())
    store.goes.set()
    assert await finding is None and len(answers.recent) == 0


async def test_a_lost_store_fails_to_forget() -> None:
    store = MemoryStore()
    answers, _ = cache(store)
    store.broken = True
    with pytest.raises(StoreLostError):
        await answers.forget([PromptMark(0, b"abcd")])


def test_a_deletion_leaves_a_tenth_of_the_limit_free() -> None:
    limits = StoreLimits(most_bytes=1_000, keep_s=1.0)
    assert [limits.surplus(total) for total in (0, 1_000, 1_001, 5_000)] == [0, 0, 101, 4_100]


async def test_an_answer_is_found_until_it_is_too_old() -> None:
    answers, clock = cache()
    assert await ask(answers) is None
    found = await ask(answers)
    assert found == KeptAnswer("yes", FinishReason.STOP, 100, 7, made_s=clock.wall())
    assert found.usage == Usage(100, 7)
    clock.advance(600)
    young = replace(ONE, most_age_s=500.0)
    assert await ask(answers, young, replace(EXACT, text="newer")) is None
    again = await ask(answers)
    assert again is not None and again.text == "newer"
    clock.advance(1_001)
    assert await ask(answers, answer=None) is None
    counts = answers.counts
    assert (counts.hits, counts.misses, counts.kept, counts.shared) == (2, 3, 2, 0)
    assert (counts.saved_prompt_tokens, counts.saved_completion_tokens) == (200, 14)


async def test_equal_calls_wait_for_the_first_one() -> None:
    answers, _ = cache()
    async with answers.turn(ONE, leads=True) as first:
        waiting = [asyncio.create_task(ask(answers)) for _ in range(5)]
        gone = asyncio.create_task(ask(answers))
        await asyncio.sleep(0)
        gone.cancel()
        first.given = EXACT
    found = await asyncio.gather(*waiting)
    assert all(one is not None and one.text == "yes" for one in found)
    assert (answers.counts.shared, answers.counts.misses) == (5, 1)
    assert not answers._asked


@pytest.mark.parametrize("given", [None, make_answer(usage=Usage(9, 1, blended_tokens=3))])
async def test_without_an_answer_each_asks_by_itself(given: TextAnswer | None) -> None:
    answers, _ = cache()
    async with answers.turn(ONE, leads=True) as first:
        waiting = [asyncio.create_task(ask(answers)) for _ in range(3)]
        await asyncio.sleep(0)
        first.given = given
    assert await asyncio.gather(*waiting) == [None] * 3
    assert answers.counts.misses == 4
    assert not answers._asked


async def test_a_failed_call_keeps_nothing_and_lets_others_go_on() -> None:
    answers, _ = cache()
    with pytest.raises(RuntimeError):
        async with answers.turn(ONE, leads=True):
            waiting = asyncio.create_task(ask(answers))
            await asyncio.sleep(0)
            raise RuntimeError
    assert await waiting is None
    assert (await ask(answers)) is not None


async def test_nobody_waits_for_a_call_that_may_be_slow() -> None:
    answers, _ = cache()
    async with answers.turn(ONE, leads=False) as slow:
        assert await ask(answers) is None
        slow.given = EXACT
    assert answers.counts.shared == 0


async def test_a_store_serves_the_next_process() -> None:
    store = MemoryStore()
    answers, _ = cache(store)
    await ask(answers)
    await ask(answers, replace(ONE, digest=b"s" * 16, lasts=False))
    await answers.flush()
    assert set(store.answers) == {ONE.digest}, "a session's answers are not stored"
    other, later = cache(store)
    later.advance(100)
    found = await asyncio.gather(*(ask(other) for _ in range(8)))
    assert all(one is not None for one in found)
    assert len(store.looks) == 2, "one for the miss, one for eight calls"
    await other.flush()
    assert store.used == {ONE.digest: later.wall()}
    later.advance(1_000)
    assert await ask(other, answer=None) is None, "too old by the time it was made"


async def test_a_broken_store_costs_only_what_it_had() -> None:
    store = MemoryStore()
    store.broken = True
    answers, clock = cache(store)
    assert await ask(answers) is None
    assert (await ask(answers)) is not None, "in memory"
    await answers.flush()
    looks = len(store.looks)
    assert await ask(answers, replace(ONE, digest=b"2" * 16)) is None
    assert len(store.looks) == looks, "it is left alone for a while"
    store.broken = False
    clock.advance(10)
    await ask(answers, replace(ONE, digest=b"3" * 16))
    await answers.flush()
    assert set(store.answers) == {ONE.digest, b"2" * 16, b"3" * 16}, "what waited is written"
    assert answers.counts.errors == 1


async def test_a_hanging_store_holds_calls_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tierkv.dbfront.answer_cache.answer_cache._FIND_S", 0.05)
    store = MemoryStore()
    store.goes.clear()
    answers, _ = cache(store)
    try:
        assert await ask(answers) is None
        assert await ask(answers, replace(ONE, digest=b"2" * 16)) is None
        assert len(store.looks) == 1
        assert answers.counts.errors == 1
    finally:
        store.goes.set()


async def test_a_cancelled_call_takes_no_other_with_it() -> None:
    store = MemoryStore()
    store.goes.clear()
    answers, _ = cache(store)
    first = asyncio.create_task(ask(answers))
    second = asyncio.create_task(ask(answers, replace(ONE, digest=b"2" * 16)))
    while not store.looks:
        await asyncio.sleep(0)
    first.cancel()
    store.goes.set()
    assert await second is None
    assert (await ask(answers)) is None


async def test_the_writer_writes_by_itself_and_stop_writes_the_rest() -> None:
    store = MemoryStore()
    answers, _ = cache(store)
    answers._full.set()
    await answers.start()
    await ask(answers)
    answers._full.set()
    while not store.answers:
        await asyncio.sleep(0.001)
    await ask(answers, replace(ONE, digest=b"2" * 16))
    await answers.stop()
    assert set(store.answers) == {ONE.digest, b"2" * 16}
