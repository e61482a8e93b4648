"""Fewer calls on PostgreSQL: filters above joins, after plain conjuncts, one behind the other."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest

from tests.fix_postgres import RunningRelay
from tests.fix_sql import InstantGenerator, answer_text

pytestmark = pytest.mark.integration


@pytest.fixture
def connection(ai_relay: RunningRelay) -> Iterator[psycopg.Connection]:
    with psycopg.connect(ai_relay.dsn, autocommit=True) as connection:
        connection.execute(
            "CREATE TEMP TABLE big AS SELECT i, i % 50 AS topic, 'p' || i AS p "
            "FROM generate_series(0, 499) i"
        )
        connection.execute("ANALYZE big")
        connection.execute("SET tierkv.max_calls = 0")
        yield connection


SPORT = [i for i in range(500) if i % 50 == 0]

JOINS = {
    "joined": "FROM big JOIN topics ON topics.id = big.topic WHERE topics.name = 'sport'",
    "listed": "FROM big b, topics t WHERE t.id = b.topic AND t.name = 'sport'",
    "outer": 'FROM topics AS "T" LEFT JOIN big ON big.topic = "T".id WHERE "T".name = \'sport\'',
    "cased": 'FROM big AS T JOIN topics AS "t2" ON T.topic = "t2".id '
    "WHERE \"t2\".name = 'sport' AND T.i IS DISTINCT FROM NULL",
    "schema": "FROM big JOIN public.topics ON topics.id = big.topic WHERE topics.name = 'sport'",
    "using": "FROM big JOIN (SELECT id AS topic FROM topics WHERE name = 'sport') s USING (topic) "
    "WHERE true",
    "function": "FROM big JOIN generate_series(0, 0) AS g ON g = topic WHERE true",
}


@pytest.mark.parametrize("shape", JOINS)
def test_a_filter_is_asked_about_joined_rows_only(
    connection: psycopg.Connection, generator: InstantGenerator, shape: str
) -> None:
    rows = connection.execute(
        f"SELECT i {JOINS[shape]} AND ai_generate(p) <> 'no' ORDER BY i"
    ).fetchall()
    assert rows == [(i,) for i in SPORT if answer_text(f"p{i}") != "no"]
    assert len(generator.prompts) == len(SPORT)


def test_a_filter_with_rows_of_both_sides(
    connection: psycopg.Connection, generator: InstantGenerator
) -> None:
    rows = connection.execute(
        "SELECT i FROM topics t LEFT JOIN big b ON b.topic = t.id AND t.name = 'sport' "
        "WHERE ai_generate(t.name || coalesce(b.p, '-')) IS NOT NULL ORDER BY i"
    ).fetchall()
    assert rows == [*((i,) for i in SPORT), (None,), (None,)]


def test_filters_come_after_plain_conjuncts_and_one_behind_the_other(
    connection: psycopg.Connection, generator: InstantGenerator
) -> None:
    (row,) = connection.execute(
        "SELECT count(*) FROM big WHERE ai_generate(p) = 'red' AND ai_generate('z' || p) <> 'red' "
        "AND i % 5 = 0"
    ).fetchall()
    fifth = range(0, 500, 5)
    red = [i for i in fifth if answer_text(f"p{i}") == "red"]
    assert row == (len([i for i in red if answer_text(f"zp{i}") != "red"]),)
    assert len(generator.prompts) == len(fifth) + len(red)
