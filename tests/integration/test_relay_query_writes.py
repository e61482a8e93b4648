"""A SELECT that changes tables keeps no NULL of a call that failed, as other writes don't."""

from __future__ import annotations

import psycopg
import pytest

from tests.fix_postgres import RunningRelay
from tests.fix_sql import InstantGenerator, answer_text
from tierkv.kvcore.errors import RowLevelError

pytestmark = pytest.mark.integration


@pytest.mark.parametrize(
    ("sql", "table"),
    [
        ("SELECT id AS i, ai_generate(name) INTO kept FROM topics", "kept"),
        (
            "WITH w AS (UPDATE topics SET name = ai_generate(name) RETURNING id) "
            "SELECT count(*) FROM w",
            "topics",
        ),
    ],
)
def test_a_failed_call_fails_a_query_that_writes(
    ai_relay: RunningRelay, generator: InstantGenerator, sql: str, table: str
) -> None:
    with psycopg.connect(ai_relay.dsn, autocommit=True) as connection:
        connection.execute("DROP TABLE IF EXISTS kept")
        before = connection.execute("SELECT * FROM topics ORDER BY id").fetchall()
        generator.failing = {"sport": RowLevelError("no answer to this")}
        with pytest.raises(psycopg.Error, match="no answer to this"):
            connection.execute(sql)
        assert connection.execute("SELECT * FROM topics ORDER BY id").fetchall() == before
        assert connection.execute("SELECT to_regclass('kept')").fetchone() == (None,)
        generator.failing = {}
        connection.execute(sql)
        column = "ai_generate" if table == "kept" else "name"
        answers = connection.execute(f"SELECT {column} FROM {table}").fetchall()
        assert sorted(answers, key=str) == sorted(
            ((answer_text(name),) for _, name in before), key=str
        )
        connection.execute("DROP TABLE IF EXISTS kept")
