"""The AnswerStore contract: in an SQLite file, and in a real PostgreSQL."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import quote

import psycopg
import pytest

from tests.fix_postgres import PASSWORD, PostgresServer
from tierkv.dbfront.answer_cache.answer_database import AnswerDatabase
from tierkv.dbfront.answer_cache.answer_file import AnswerFile
from tierkv.dbfront.answer_cache.answer_key import last_mark, prompt_marks
from tierkv.dbfront.answer_cache.kept_answer import (
    AnswerStore,
    KeptAnswer,
    StoreLimits,
    StoreLostError,
)
from tierkv.kvcore.ids import NamespaceKey
from tierkv.kvcore.request import FinishReason

Opens = Callable[..., AnswerStore]
LIMITS = StoreLimits(most_bytes=1 << 20, keep_s=1_000.0)
NOW = 1_700_000_000.0


@pytest.fixture(params=["file", "postgres"])
def opens(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Opens]:
    """Opens the same store again and again."""
    made: list[AnswerStore] = []
    place = request.getfixturevalue("front_url") if request.param == "postgres" else ""

    def open_one(limits: StoreLimits = LIMITS) -> AnswerStore:
        store = AnswerDatabase(place, limits) if place else AnswerFile(str(tmp_path / "a"), limits)
        made.append(store)
        return store

    yield open_one
    for store in made:
        store.close()


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def answer(text: str = "yes", made_s: float = NOW, **changes: object) -> KeptAnswer:
    known = {"finish_reason": FinishReason.STOP, "prompt_tokens": 9, "completion_tokens": 2}
    return KeptAnswer(text, made_s=made_s, **known | changes)  # type: ignore[arg-type]


def test_1_what_was_kept_is_found_with_all_its_bits(opens: Opens) -> None:
    store = opens()
    odd = answer(
        "é \0 \ud800 'x'",
        finish_reason=FinishReason.LENGTH,
        label_probabilities=(0.1, 1 / 3, 5e-324),
        embedding=(1.0, -2 / 3),
    )
    assert store.find([key(1)]) == {}
    store.keep({key(1): odd, key(2): answer()}, {}, NOW)
    assert store.find([key(1), key(2), key(3)]) == {key(1): odd, key(2): answer()}
    assert store.find([]) == {}


def test_1_many_keys_are_found_at_once(opens: Opens) -> None:
    store = opens()
    kept = {key(n): answer(str(n)) for n in range(1_300)}
    store.keep(kept, {}, NOW)
    assert store.find(kept) == kept


def test_2_answers_outlive_the_store_and_a_new_one_replaces_them(opens: Opens) -> None:
    opens().keep({key(1): answer("old")}, {}, NOW)
    other = opens()
    assert other.find([key(1)])[key(1)].text == "old"
    other.keep({key(1): answer("new", NOW + 5)}, {}, NOW + 5)
    assert opens().find([key(1)]) == {key(1): answer("new", NOW + 5)}


def test_3_old_answers_and_those_unused_for_longest_are_deleted(opens: Opens) -> None:
    limits = StoreLimits(most_bytes=50_000, keep_s=1_000.0)
    store = opens(limits)
    store.keep({key(9_000): answer("too old", NOW - 2_000)}, {}, NOW)
    store.keep({key(n): answer("x" * 900) for n in range(20)}, {}, NOW)
    store.keep({}, {key(3): NOW + 50}, NOW + 50)
    again = opens(limits)  # A new one looks at its first write.
    again.keep({key(n): answer("x" * 900) for n in range(100, 140)}, {}, NOW + 60)
    found = again.find([key(n) for n in (*range(20), *range(100, 140), 9_000)])
    assert key(9_000) not in found
    assert key(3) in found, "used after the others"
    assert 25 <= len(found) <= 55
    assert key(0) not in found


def test_4_threads_share_a_store(opens: Opens) -> None:
    store, wrong = opens(), []

    def work(thread: int) -> None:
        for n in range(20):
            one = key(1_000 * thread + n)
            store.keep({one: answer(str(n))}, {key(5): NOW + n}, NOW)
            if store.find([one])[one].text != str(n):
                wrong.append(one)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_5_two_stores_write_at_the_same_time(opens: Opens) -> None:
    stores, wrong = [opens(), opens()], []
    stores[0].keep({key(n): answer("first") for n in range(50)}, {}, NOW)

    def work(number: int) -> None:
        order = range(50) if number else range(49, -1, -1)
        try:
            for n in range(10):
                stores[number].keep(
                    {key(k): answer(f"{number} {n}") for k in order},
                    {key(k): NOW + n for k in order},
                    NOW,
                )
        except StoreLostError as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    found = stores[0].find([key(n) for n in range(50)])
    assert {one.text for one in found.values()} <= {"0 9", "1 9"}


def test_6_answers_to_forgotten_prompts_are_deleted(opens: Opens) -> None:
    store = opens()
    secret = NamespaceKey(bytes(32))
    prompts = {n: tuple(range(100, 100 + n)) for n in (1, 3, 40, 90)} | {50: tuple(range(50))}
    store.keep({key(n): answer(marks=prompt_marks(secret, p)) for n, p in prompts.items()}, {}, NOW)
    assert store.find([key(3)])[key(3)].marks == prompt_marks(secret, prompts[3])
    assert opens().forget([]) == set()
    marks = [last_mark(secret, range(100, 130)), last_mark(secret, range(3, 5))]
    assert store.forget([mark for mark in marks if mark is not None]) == {key(40), key(90)}
    assert set(opens().find(map(key, prompts))) == {key(1), key(3), key(50)}


def test_6_answers_of_an_older_release_have_no_marks_and_go(
    opens: Opens, front_url: str, tmp_path: Path
) -> None:
    store = opens()
    store.keep({key(1): answer(), key(2): answer()}, {}, NOW)
    old = "ALTER TABLE {} DROP COLUMN marks"
    if isinstance(store, AnswerFile):
        store._done(lambda database: database.execute(old.format("answers")))
    else:
        with psycopg.connect(front_url, autocommit=True) as connection:
            connection.execute(old.format("tierkv_front.answers").encode())
    again = opens()
    assert again.find([key(1)]) == {}
    again.keep({key(3): answer()}, {}, NOW)
    assert again.forget([]) == {key(1), key(2)}
    assert again.find([key(3)]) == {key(3): answer()}


def test_6_no_byte_of_a_forgotten_answer_is_in_the_file(tmp_path: Path) -> None:
    store, secret = AnswerFile(str(tmp_path / "a"), LIMITS), NamespaceKey(bytes(32))
    kept = answer("a very personal answer", marks=prompt_marks(secret, range(9)))
    store.keep({key(1): kept}, {}, NOW)
    mark = last_mark(secret, range(9))
    assert mark is not None and store.forget([mark]) == {key(1)}
    raw = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert b"very personal" not in raw
    store.close()


def test_an_unreadable_answer_is_none(opens: Opens, front_url: str, tmp_path: Path) -> None:
    store = opens()
    store.keep({key(1): answer(), key(2): answer()}, {}, NOW)
    if isinstance(store, AnswerFile):
        wrong = "UPDATE answers SET body = '[1]' WHERE key = ?"
        store._done(lambda database: database.execute(wrong, [key(1)]))
    else:
        with psycopg.connect(front_url, autocommit=True) as connection:
            connection.execute(
                "UPDATE tierkv_front.answers SET body = 'oops' WHERE key = %s", [key(1)]
            )
    assert store.find([key(1), key(2)]) == {key(2): answer()}


def test_a_damaged_file_is_begun_anew(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"this is no database" * 500)
    store = AnswerFile(str(path), LIMITS)
    with pytest.raises(StoreLostError, match="not a database"):
        store.find([key(1)])
    store.keep({key(1): answer()}, {}, NOW)
    assert store.find([key(1)]) == {key(1): answer()}
    assert path.stat().st_mode & 0o077 == 0
    store.close()


def test_an_unusable_path_says_why(tmp_path: Path) -> None:
    store = AnswerFile(str(tmp_path), LIMITS)
    with pytest.raises(StoreLostError, match="unable to open"):
        store.find([key(1)])
    store.close()


@pytest.mark.timeout(120)
def test_a_restarted_postgres_is_found_again(front_url: str, postgres: PostgresServer) -> None:
    store = AnswerDatabase(front_url, LIMITS)
    store.keep({key(1): answer()}, {}, NOW)
    postgres.stop("immediate")
    try:
        with pytest.raises(StoreLostError) as caught:
            store.find([key(1)])
        assert quote(PASSWORD) not in str(caught.value) and PASSWORD not in str(caught.value)
    finally:
        postgres.start()
    assert store.find([key(1)]) == {key(1): answer()}
    with psycopg.connect(postgres.dsn, autocommit=True) as connection:
        connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE application_name = 'tierkv answers'"
        )
    assert store.find([key(1)]) == {key(1): answer()}
    assert PASSWORD not in store.place
    store.close()
