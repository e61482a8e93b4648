"""The answer cache without a model: whose turn it is, how long answers serve, lost stores."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import replace
from threading import Event

import pytest

from tests.fix_accounts import USAGE, make_answer
from tests.fix_sql import make_model
from tests.fix_text import text_call
from tierkv.dbfront.answer_cache.answer_cache import AnswerCache
from tierkv.dbfront.answer_cache.answer_key import (
    AnswerKey,
    answer_key,
    check_scope,
    may_keep,
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
