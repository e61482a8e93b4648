"""The answer cache in processes: two fronts on one PostgreSQL, kills, lost stores, versions.

Greedy answers with the cache equal those without it throughout.
"""

from __future__ import annotations

import json
import sqlite3
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.fix_cluster import free_port, wait_for
from tests.fix_postgres import PostgresServer
from tests.fix_roles import COMPUTE, Roles

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]
ROWS = 40


def asks(about: str, rows: int = ROWS, *, tokens: int = 6, detail: bool = False) -> str:
    function = "to_json(ai_generate_detail" if detail else "(ai_generate"
    return (
        f"SELECT i, {function}('{about} ' || i, options => '{{\"max_tokens\": {tokens}}}')) "
        f"FROM range({rows}) t(i) ORDER BY i"
    )


class TwoFronts(Roles):
    """Roles with a second front, ``front-b``; its ports are in ``b``."""

    def __init__(self, folder: Path, url: str) -> None:
        self.b = (free_port(), free_port())
        own = [f"front.pg_port={self.b[0]}", f"front.http_port={self.b[1]}"]
        store = f"front.answer_cache={url}"
        super().__init__(folder, {"front": [store, "front.admins=dba"], "front-b": [*own, store]})

    def sql(
        self, statement: str, *, user: str = "ann", scope: str = "tenant", at_b: bool = False
    ) -> list[tuple[Any, ...]]:
        """Run a statement with the answer cache in use."""
        port = self.b[0] if at_b else self.pg_port
        with psycopg.connect(
            f"host=127.0.0.1 port={port} user={user} dbname=main", autocommit=True
        ) as connection:
            connection.execute(f"SET tierkv.answer_cache = {scope}")
            cursor = connection.execute(statement)
            return cursor.fetchall() if cursor.description else []

    def counts(self, *, at_b: bool = False) -> dict[str, Any]:
        """Return the row of the view of a front."""
        columns = "hits", "shared", "misses", "kept", "errors"
        found = self.sql(f"SELECT {', '.join(columns)} FROM tierkv.answer_cache", at_b=at_b)
        return dict(zip(columns, found[0], strict=True))

    def kept(self, server: PostgresServer, since_s: float) -> int:
        """Return how many answers are in the database that were made since a Unix time."""
        counted = "SELECT count(*) FROM tierkv_front.answers WHERE made_s >= %s"
        with psycopg.connect(server.dsn, autocommit=True) as connection:
            try:
                found = connection.execute(counted, (since_s,)).fetchone()
            except psycopg.errors.UndefinedTable:  # Before the first answer.
                return 0
        assert found is not None
        return int(found[0])

    def chat(self, body: dict[str, Any], port: int) -> dict[str, Any]:
        """POST /v1/chat/completions."""
        known = {"messages": [{"role": "user", "content": "Say it"}], "max_tokens": 6}
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/chat/completions",
            json.dumps(known | body).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            answer: dict[str, Any] = json.load(response)
            return answer


@pytest.fixture(scope="module")
def fronts(
    tmp_path_factory: pytest.TempPathFactory, postgres: PostgresServer
) -> Iterator[TwoFronts]:
    url = postgres.url
    roles = TwoFronts(tmp_path_factory.mktemp("answers"), url)
    try:
        roles.start("meta", "dmp-0", *COMPUTE, "front", "front-b")
        yield roles
    finally:
        roles.stop()


def test_an_answer_is_found_at_the_other_front_but_by_no_other_tenant(
    fronts: TwoFronts, postgres: PostgresServer
) -> None:
    question, before, begun_s = asks("Shared"), fronts.counts()["kept"], time.time()
    expected = fronts.sql(question, scope="off")
    assert fronts.counts()["kept"] == before
    assert fronts.sql(question) == expected
    assert fronts.sql(question) == expected
    assert fronts.counts()["kept"] == before + ROWS
    wait_for(lambda: fronts.kept(postgres, begun_s) == ROWS, what="all answers are in the database")
    at_b = fronts.counts(at_b=True)
    assert fronts.sql(question, at_b=True) == expected
    now_b = fronts.counts(at_b=True)
    assert now_b["hits"] - at_b["hits"] == ROWS
    assert now_b["misses"] == at_b["misses"]
    assert fronts.sql(question, user="bob", at_b=True) == expected
    assert fronts.counts(at_b=True)["misses"] - now_b["misses"] == ROWS
    detail = [row[1] for row in fronts.sql(asks("Shared", detail=True), at_b=True)]
    assert [one["value"] for one in detail] == [row[1] for row in expected]
    assert all(one["cached"] and one["prompt_tokens"] for one in detail)
    used = fronts.sql(
        "SELECT result_cache_hits, prompt_tokens FROM tierkv.stat_statements "
        "WHERE query LIKE '%ai_generate_detail%'",
        at_b=True,
    )
    assert used == [(ROWS, 0)]


def test_a_session_keeps_its_answers_to_itself(fronts: TwoFronts) -> None:
    question = asks("Session", 5)
    before = fronts.counts()
    fronts.sql(question, scope="session")
    fronts.sql(question, scope="session")
    after = fronts.counts()
    assert (after["hits"] - before["hits"], after["misses"] - before["misses"]) == (0, 10)
    with psycopg.connect(
        f"host=127.0.0.1 port={fronts.pg_port} user=ann dbname=main", autocommit=True
    ) as connection:
        connection.execute("SET tierkv.answer_cache = session")
        once = connection.execute(question).fetchall()
        assert connection.execute(question).fetchall() == once
    assert fronts.counts()["hits"] - after["hits"] == 5


def test_rest_gets_the_same_answers_and_says_so(fronts: TwoFronts) -> None:
    greedy = {"temperature": 0, "answer_cache": "tenant"}
    first = fronts.chat(greedy, fronts.http_port)
    again = fronts.chat(greedy, fronts.http_port)
    assert again["choices"] == first["choices"]
    assert "cached_answers" not in first["usage"]["prompt_tokens_details"]
    assert again["usage"]["prompt_tokens_details"]["cached_answers"] == 1
    assert again["usage"]["completion_tokens"] == first["usage"]["completion_tokens"]
    by_chance = {"answer_cache": "tenant"}
    for _ in range(2):
        drawn = fronts.chat(by_chance, fronts.http_port)
        assert "cached_answers" not in drawn["usage"]["prompt_tokens_details"]
    for wrong, named in (("session", "session_id"), ("everybody", "answer_cache")):
        with pytest.raises(urllib.error.HTTPError) as caught:
            fronts.chat({"answer_cache": wrong}, fronts.http_port)
        with caught.value as refused:
            assert refused.code == 400
            assert named in refused.read().decode()


def test_a_version_of_the_namespace_hides_all_earlier_answers(fronts: TwoFronts) -> None:
    fronts.sql("CREATE KV NAMESPACE team WITH (tenants = 'tea, tim')", user="dba")
    question = asks("Version", 5)
    expected = fronts.sql(question, user="tea", scope="namespace")

    def misses(user: str) -> int:
        before = fronts.counts()["misses"]
        assert fronts.sql(question, user=user, scope="namespace") == expected
        return int(fronts.counts()["misses"]) - before

    assert misses("tim") == 0, "tenants of a namespace share"
    assert misses("ann") == 5, "others do not"
    fronts.sql("ALTER KV NAMESPACE team SET VERSION 'r2'", user="dba")
    assert misses("tea") == 5
    assert misses("tea") == 0


def test_equal_statements_at_the_same_time_ask_once(fronts: TwoFronts) -> None:
    question, found = asks("Together"), []
    before = fronts.counts()

    def run() -> None:
        found.append(fronts.sql(question))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert all(one == found[0] for one in found)
    after = fronts.counts()
    assert after["misses"] - before["misses"] == ROWS
    assert after["hits"] + after["shared"] - before["hits"] - before["shared"] == 3 * ROWS


def test_forgetting_a_prompt_deletes_its_answers_at_both_fronts(
    fronts: TwoFronts, postgres: PostgresServer
) -> None:
    begun_s = time.time()
    document = "A note of Mia Brandt about her knee. " * 6
    told = "SELECT i, ai_generate('{}' || i, options => '{{\"max_tokens\": 4}}') FROM range(5) t(i)"
    mine, others = told.format(document), told.format("A recipe for soup. " * 12)
    embedded = f"SELECT ai_embed('{document}')"
    before = {text: fronts.sql(text) for text in (mine, others, embedded)}
    wait_for(lambda: fronts.kept(postgres, begun_s) >= 11, what="all answers are in the database")
    for text, rows in before.items():
        assert fronts.sql(text, at_b=True) == rows, "kept in the memory of both fronts"
    kept = fronts.kept(postgres, begun_s)
    ((gone,),) = fronts.sql(f"SELECT ai_forget('{document}') ->> 'answers'")
    assert int(gone) == 6 and fronts.kept(postgres, begun_s) == kept - 6

    def asks_again() -> bool:
        misses = fronts.counts(at_b=True)["misses"]
        assert fronts.sql(mine, at_b=True) == before[mine]
        return bool(fronts.counts(at_b=True)["misses"] == misses + 5)

    wait_for(asks_again, what="the other front has forgotten, too")
    hits = fronts.counts()["hits"]
    assert fronts.sql(others) == before[others] and fronts.counts()["hits"] == hits + 5
    left = (
        f"SELECT ai_forget('{document}', options => '{{\"answer_cache\": \"off\"}}') ->> 'answers'"
    )
    assert fronts.sql(left) == [("0",)]


def test_a_killed_fronts_answers_are_not_paid_again(
    fronts: TwoFronts, postgres: PostgresServer
) -> None:
    question = asks("Killed", 900, tokens=24)
    expected = fronts.sql(question, scope="off", at_b=True)
    begun_s = time.time()

    def run() -> None:
        with pytest.raises(psycopg.OperationalError):
            fronts.sql(question)

    running = threading.Thread(target=run)
    running.start()
    wait_for(lambda: fronts.kept(postgres, begun_s), what="some answers are in the database")
    fronts.kill("front")
    running.join()
    saved = fronts.kept(postgres, begun_s)
    before = fronts.counts(at_b=True)
    assert fronts.sql(question, at_b=True) == expected
    after = fronts.counts(at_b=True)
    assert after["hits"] - before["hits"] == saved
    assert after["misses"] - before["misses"] == 900 - saved
    fronts.start("front")


def test_without_its_database_a_front_asks_models(
    fronts: TwoFronts, postgres: PostgresServer
) -> None:
    question = asks("Lost", 10)
    expected = fronts.sql(question, scope="off", at_b=True)
    begun_s = time.time()
    postgres.stop("immediate")
    try:
        assert fronts.sql(question, at_b=True) == expected
        hits = fronts.counts(at_b=True)["hits"]
        assert fronts.sql(question, at_b=True) == expected, "in memory"
        lost = fronts.counts(at_b=True)
        assert lost["hits"] - hits == 10
        assert lost["errors"] > 0
    finally:
        postgres.start()

    wait_for(lambda: fronts.kept(postgres, begun_s) == 10, what="the answers are stored at last")


def test_a_front_with_a_file_finds_its_answers_after_kill_9(tmp_path: Path) -> None:
    more = {"front": [f"front.stats_path={tmp_path / 'stats.sqlite'}"]}
    roles = Roles(tmp_path, more)
    statement = asks("File", 10)
    counted = "SELECT place, hits, misses, errors FROM tierkv.answer_cache"
    try:
        roles.start("meta", "dmp-0", *COMPUTE, "front")
        roles.query("SELECT 1")

        def ask() -> list[tuple[Any, ...]]:
            dsn = f"host=127.0.0.1 port={roles.pg_port} user=tierkv dbname=main"
            with psycopg.connect(dsn, autocommit=True) as connection:
                connection.execute("SET tierkv.answer_cache = tenant")
                return connection.execute(statement).fetchall()

        expected = ask()
        file = tmp_path / "stats.sqlite.answers"
        wait_for(lambda: _kept_in(file) == 10, what="all answers are in the file")
        roles.kill("front")
        roles.start("front")
        assert ask() == expected
        assert roles.query(counted) == [(str(file), 10, 0, 0)]
        roles.kill("front")
        for damaged in (file, Path(f"{file}-wal")):
            damaged.write_bytes(b"not a database" * 999)
        roles.start("front")
        assert ask() == expected
        assert roles.query(counted)[0][2:] == (10, 1)
    finally:
        roles.stop()


def _kept_in(file: Path) -> int:
    if not file.exists():
        return 0
    with closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True)) as database:
        try:
            return int(database.execute("SELECT count(*) FROM answers").fetchone()[0])
        except sqlite3.OperationalError:  # The front is about to make the table.
            return 0
