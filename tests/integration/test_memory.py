"""An agent's memory on a real cluster: retrieval, reuse of documents, answer: one statement.

The oracle is the same statement with the cache off.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest

from tests.fix_cluster import Cluster, wait_for
from tests.integration.test_blending import DOCUMENTS, NAMES, QUESTION, namespace

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

_FOUND = "SELECT body FROM mem ORDER BY embedding <=> ai_embed(%(q)s), id LIMIT 3"
_RECENT = (
    "SELECT body FROM (SELECT %(said)s AS body, -1 AS far UNION ALL "
    "SELECT body, embedding <=> ai_embed(%(q)s) FROM mem) ORDER BY far LIMIT 4"
)
"""What was said last, then what is nearest: no two prompts begin with the same document."""
_OUT_OF_PLACE = re.compile(r"blended: (\d+) tokens reused out of place, (\d+) computed again")
_TOKENS = re.compile(r"prompt tokens (\d+), .*hit tokens L1 (\d+) L2 (\d+) L3 (\d+) L4 (\d+)")


@pytest.fixture(scope="module")
def cluster(start_cluster: Callable[..., Cluster]) -> Cluster:
    return start_cluster("--set", "compute.load_policy=always")


@pytest.fixture
def connect(cluster: Cluster) -> Iterator[Callable[[str], psycopg.Connection[Any]]]:
    """Connect as a user whose memory is a table of embedded documents."""
    opened: list[psycopg.Connection[Any]] = []

    def open_as(user: str) -> psycopg.Connection[Any]:
        dsn = f"host=127.0.0.1 port={cluster.pg_port} user={user} dbname=main"
        db = psycopg.connect(dsn, autocommit=True)
        opened.append(db)
        db.execute("CREATE TEMP TABLE docs (id INTEGER, body VARCHAR)")
        with db.cursor() as cursor:
            cursor.executemany("INSERT INTO docs VALUES (%s, %s)", list(enumerate(DOCUMENTS)))
        db.execute("CREATE TEMP TABLE mem AS SELECT *, ai_embed(body) AS embedding FROM docs")
        return db

    yield open_as
    for db in opened:
        db.close()


def answers(db: psycopg.Connection[Any], *, cache: bool) -> list[str]:
    """Ask about each customer over the documents that are nearest to the question."""
    sql = (
        f"SELECT ai_generate(%(q)s, documents => ({_FOUND}), "
        f"options => {{'max_tokens': 8, 'cache': {str(cache).lower()}, 'answer_cache': 'off'}})"
    )
    found = []
    for name in NAMES:
        row = db.execute(sql, {"q": QUESTION.format(name)}).fetchone()
        assert row is not None
        found.append(row[0])
    return found


@pytest.mark.parametrize(
    ("user", "blend"),
    [("exact", ("off",)), ("lossless", ("on", "--recompute-ratio", "1"))],
)
def test_answers_are_those_without_the_cache(
    cluster: Cluster, connect: Callable[[str], Any], user: str, blend: tuple[str, ...]
) -> None:
    namespace(cluster, "set", user, "--blend", *blend)
    db = connect(user)
    plain = answers(db, cache=False)
    assert answers(db, cache=True) == plain
    assert answers(db, cache=True) == plain


def test_documents_in_another_order_are_not_computed_again(
    cluster: Cluster, connect: Callable[[str], Any]
) -> None:
    namespace(cluster, "set", "agent", "--blend", "on", "--recompute-ratio", "0.2")
    db = connect("agent")
    numbers = itertools.count()
    sql = f"EXPLAIN ANALYZE SELECT ai_generate(%(q)s, documents => ({_RECENT}))"

    def plan_of(number: int) -> str:
        name = NAMES[number % len(NAMES)]
        values = {"q": QUESTION.format(name), "said": f"Note {number}."}
        return "\n".join(line for (line,) in db.execute(sql, values).fetchall())

    first = plan_of(next(numbers))
    assert _OUT_OF_PLACE.search(first) is None
    prompt, *hits = map(int, _TOKENS.findall(first)[0])
    assert sum(hits) < prompt / 4, first

    def moved() -> str | None:
        plan = plan_of(next(numbers))
        found = _OUT_OF_PLACE.search(plan)
        return plan if found and int(found[1]) > prompt / 2 else None

    plan = wait_for(moved, what="documents reused at other positions")
    reused, recomputed = map(int, _OUT_OF_PLACE.findall(plan)[0])
    assert recomputed < reused / 2
    prompt, *hits = map(int, _TOKENS.findall(plan)[0])
    assert prompt - sum(hits) + recomputed < 0.8 * prompt, plan
    assert "documents of a query" in plan
    assert "stage 2" in plan and "ai_embed in SELECT, stage 1" in plan
