"""AI calls behind the relay need no right that the statement does not need; a LIMIT asks little."""

from __future__ import annotations

import psycopg
import pytest

from tests.fix_postgres import RunningRelay
from tests.fix_sql import InstantGenerator

pytestmark = pytest.mark.integration


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT d.id FROM docs d JOIN topics t ON t.id = d.topic "
        "WHERE d.id < 9 AND ai_filter('q', t.name) ORDER BY 1",
        "SELECT docs.id FROM docs JOIN topics ON topic = topics.id WHERE ai_filter('q', name) "
        "ORDER BY 1",
        "SELECT name FROM (SELECT topic FROM docs) s JOIN topics ON topic = id "
        "WHERE ai_filter('q', name)",
        "SELECT 1 FROM topics, docs WHERE ai_filter('q', name)",
        "SELECT id FROM docs WHERE ai_filter('q', id::text) ORDER BY topic, id LIMIT 3",
    ],
)
def test_only_columns_are_read_that_may_be_read(ai_relay: RunningRelay, sql: str) -> None:
    with psycopg.connect(ai_relay.dsn, autocommit=True) as connection:
        connection.execute("CREATE ROLE reader")
        try:
            connection.execute("GRANT SELECT (id, topic) ON docs TO reader")
            connection.execute("GRANT SELECT ON topics TO reader")
            expected = connection.execute(sql).fetchall()
            connection.execute("SET ROLE reader")
            assert connection.execute(sql).fetchall() == expected
        finally:
            connection.execute("RESET ROLE")
            connection.execute("DROP OWNED BY reader")
            connection.execute("DROP ROLE reader")


def test_two_filters_and_a_limit_ask_about_few_rows(
    ai_relay: RunningRelay, generator: InstantGenerator
) -> None:
    with psycopg.connect(ai_relay.dsn, autocommit=True) as connection:
        connection.execute(
            "CREATE TEMP TABLE many AS SELECT i, 'row ' || i AS b FROM generate_series(1, 900) i"
        )
        sql = "SELECT i FROM many WHERE NOT ai_filter('q', b) AND ai_filter('r', b)"
        first = connection.execute(f"{sql} LIMIT 3").fetchall()
        assert len(first) == 3
        assert len(generator.prompts) < 200
        connection.execute("SET tierkv.max_calls = 0")
        assert set(first) <= set(connection.execute(sql).fetchall())
