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


@pytest.mark.parametrize(
    "text",
    [
        "SELECT i FROM big WHERE ai_generate(p) = 'red' ORDER BY i DESC LIMIT %s",
        "SELECT i FROM big WHERE ai_generate(p) = 'red' ORDER BY 1 DESC LIMIT %s",
        "SELECT i AS n FROM big AS b WHERE i >= 0 AND ai_generate(b.p) = 'red' ORDER BY n DESC "
        "FETCH FIRST %s ROWS ONLY",
        "SELECT * FROM (SELECT i FROM big WHERE ai_generate(p) = 'red' ORDER BY i DESC LIMIT %s) s",
    ],
)
def test_a_limit_stops_filters_in_order(
    connection: psycopg.Connection, generator: InstantGenerator, text: str
) -> None:
    expected = [(i,) for i in range(499, -1, -1) if answer_text(f"p{i}") == "red"][:3]
    # The inner SELECT of the last one is not looked into: all rows are asked, the rows are right.
    most = 64 if not text.startswith("SELECT *") else 500
    assert connection.execute(text, [3]).fetchall() == expected
    assert len(generator.prompts) <= most


def test_a_limit_stops_an_unordered_filter_early_and_by_a_parameter(
    connection: psycopg.Connection, generator: InstantGenerator
) -> None:
    rows = connection.execute(
        "SELECT *, ai_generate('of ' || p) AS a FROM big WHERE ai_generate(p) = 'red' LIMIT %s", [2]
    ).fetchall()
    expected = [i for i in range(500) if answer_text(f"p{i}") == "red"][:2]
    assert [(row[0], row[3]) for row in rows] == [(i, answer_text(f"of p{i}")) for i in expected]
    assert len(generator.prompts) <= 64 + 2


def test_a_limit_beyond_all_rows_asks_them_all(connection: psycopg.Connection) -> None:
    rows = connection.execute(
        "SELECT i FROM big WHERE ai_generate(p) = 'red' ORDER BY i OFFSET 1 LIMIT 1000"
    ).fetchall()
    assert rows == [(i,) for i in range(500) if answer_text(f"p{i}") == "red"][1:]


def test_rounds_meet_rows_in_one_order(connection: psycopg.Connection) -> None:
    names = ("synchronize_seqscans", "max_parallel_workers_per_gather", "cursor_tuple_fraction")
    shown = ", ".join(f"current_setting('{name}')" for name in names)
    with connection.transaction():
        connection.execute("SET LOCAL max_parallel_workers_per_gather = 3")
        assert connection.execute(f"SELECT {shown}, ai_generate('x')").fetchall() == [
            ("off", "0", "1", answer_text("x"))
        ]
        assert connection.execute(f"SELECT {shown}").fetchall() == [("on", "3", "0.1")]


def test_text_of_any_collation(connection: psycopg.Connection) -> None:
    connection.execute(
        "CREATE COLLATION IF NOT EXISTS loose "
        "(provider = icu, locale = 'und-u-ks-level2', deterministic = false)"
    )
    connection.execute("CREATE TEMP TABLE collated (q text COLLATE loose)")
    connection.execute("INSERT INTO collated VALUES ('a'), ('A'), (NULL)")
    query = "SELECT ai_generate('q ' || q COLLATE loose), ai_filter('is', q) FROM collated"
    plain = connection.execute(query).fetchall()
    assert [row[0] for row in plain] == [answer_text("q a"), answer_text("q A"), None]
    with connection.transaction():
        connection.execute("SET TRANSACTION READ ONLY")
        assert connection.execute(query).fetchall() == plain


def test_functions_of_the_user_do_not_stand_in_for_ours(connection: psycopg.Connection) -> None:
    connection.execute("""
        DROP SCHEMA IF EXISTS mine CASCADE; CREATE SCHEMA mine;
        CREATE FUNCTION mine.num_nulls(int, int) RETURNS int LANGUAGE sql AS 'SELECT -1';
        CREATE FUNCTION mine.json_build_array(text, text) RETURNS json LANGUAGE sql
          AS $$ SELECT '[]'::json $$;
        CREATE FUNCTION mine.to_jsonb(text) RETURNS jsonb LANGUAGE sql AS $$ SELECT '1'::jsonb $$;
        CREATE DOMAIN mine.text AS varchar(1); CREATE DOMAIN mine.jsonb AS int;
        SET search_path = mine, pg_catalog, public""")
    try:
        rows = connection.execute(
            "SELECT count(*), min(ai_generate(ai_prompt('p{0}', b.i))) FROM big b "
            "JOIN topics t ON t.id = b.topic WHERE ai_filter('q', b.p || t.name) IS NOT NULL "
            "AND ai_classify(b.p || '.', ARRAY['x', 'y' || b.i]) IS NOT NULL AND b.i = 1"
        ).fetchall()
        assert rows == [(1, answer_text("p1"))]
    finally:
        connection.execute("DROP SCHEMA mine CASCADE")
