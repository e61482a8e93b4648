"""Cursors with AI calls on PostgreSQL ask for the rows that are fetched, and give PostgreSQL's."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from tests.differential.answers import POSTGRES_FUNCTIONS, DigestGenerator, plain
from tests.fix_postgres import PostgresServer, RunningRelay
from tests.fix_sql import InstantGenerator
from tierkv.dbfront.postgres.statements.windows import WINDOW_ROWS

pytestmark = pytest.mark.integration
Connection = psycopg.Connection[tuple[Any, ...]]

TABLE = f"""
DROP SCHEMA IF EXISTS walks CASCADE;
CREATE SCHEMA walks;
CREATE TABLE walks.docs AS SELECT i AS id, i % 3 AS topic,
  CASE WHEN i % 17 = 5 THEN NULL ELSE 'body ' || i END AS body FROM generate_series(1, 2000) i;
CREATE INDEX ON walks.docs (id);
SET search_path = walks;
{plain(POSTGRES_FUNCTIONS)}
"""
QUERIES = (
    "SELECT id, ai_generate(body) FROM docs ORDER BY id DESC",
    "SELECT id, body FROM docs WHERE ai_filter('q', body)",
    "SELECT ai_generate(body) AS a, * FROM docs d WHERE ai_filter('q', body) AND topic <> 1 "
    "AND ai_filter('z', d.body) ORDER BY topic, id",
    "SELECT id FROM docs WHERE ai_generate(body) <> 'a1' OR ai_filter('q', body) ORDER BY body, id",
)
STEPS = (
    "FETCH c", "FETCH 5 FROM c", "FETCH FORWARD 70 IN c", "MOVE 9 c", "FETCH RELATIVE 3 FROM c",
    "FETCH 0 FROM c", "SAVEPOINT s", "ROLLBACK TO s", "FETCH ABSOLUTE 200 c",
    "UPDATE docs SET body = body || 'new', id = id + 1 WHERE topic = 2", "FETCH 200 c",
)  # fmt: skip


@pytest.fixture
def generator() -> InstantGenerator:
    return DigestGenerator()


@pytest.fixture(params=["extended", "simple"])
def doors(
    postgres: PostgresServer, ai_relay: RunningRelay, request: pytest.FixtureRequest
) -> Iterator[tuple[Connection, Connection]]:
    factory = psycopg.ClientCursor if request.param == "simple" else psycopg.Cursor
    options: dict[str, Any] = {"options": "-c search_path=walks", "cursor_factory": factory}
    with psycopg.connect(postgres.dsn, **options) as direct:
        direct.execute(TABLE)
        direct.commit()
        with psycopg.connect(ai_relay.dsn, **options) as relayed:
            relayed.execute("SET tierkv.max_calls = 0")
            relayed.commit()
            yield direct, relayed
        direct.rollback()
        direct.execute("DROP SCHEMA walks CASCADE")


@pytest.mark.parametrize("binary", [False, True])
@pytest.mark.parametrize("query", QUERIES)
def test_a_named_cursor_asks_a_window(
    doors: tuple[Connection, Connection], generator: InstantGenerator, query: str, binary: bool
) -> None:
    direct, relayed = doors
    expected = direct.execute(plain(query)).fetchall()
    with relayed.cursor("walk", binary=binary) as cursor:
        cursor.execute(query)
        assert not generator.calls
        found = cursor.fetchmany(5)
        assert len(found) == 5
        assert 0 < len(generator.calls) <= 3 * WINDOW_ROWS
        found += cursor.fetchall()
    assert found == expected
    assert len(set(generator.calls)) == len(generator.calls)


@pytest.mark.parametrize("seed", range(6))
def test_any_walk_is_postgresqls(doors: tuple[Connection, Connection], seed: int) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    query = rng.choice(QUERIES)
    steps = [f"DECLARE c CURSOR FOR {query}", "SAVEPOINT s", *rng.choices(STEPS, k=12)]
    told: list[list[Any]] = []
    for connection, change in zip(doors, (plain, None), strict=True):
        said: list[Any] = []
        for step in steps:
            cursor = connection.execute(change(step) if change else step)
            said.append((cursor.statusmessage, cursor.description and cursor.fetchall()))
        connection.rollback()
        told.append(said)
    for step, one, other in zip(steps, *told, strict=True):
        assert one == other, step


def test_what_ends_a_cursor(
    doors: tuple[Connection, Connection], generator: InstantGenerator
) -> None:
    _, relayed = doors
    relayed.execute("SET tierkv.max_calls = 100")
    relayed.commit()
    with pytest.raises(psycopg.Error, match="max_calls"), relayed.transaction():
        relayed.execute(f"DECLARE c CURSOR FOR {QUERIES[0]}")
        assert len(relayed.execute("FETCH 5 c").fetchall()) == 5
        relayed.execute("FETCH 90 c")
    generator.calls.clear()
    with relayed.transaction():
        relayed.execute(f"DECLARE c CURSOR FOR {QUERIES[0]}")
        relayed.execute("CLOSE c")
        relayed.execute("DECLARE c CURSOR FOR SELECT 7")
        assert relayed.execute("FETCH ALL c").fetchall() == [(7,)]
    assert not generator.calls
    with relayed.transaction():
        relayed.execute("DECLARE c CURSOR FOR SELECT 8")
        assert relayed.execute("FETCH ALL c").fetchall() == [(8,)]
    relayed.execute("SET tierkv.max_calls = 0")
    relayed.commit()
    for options in ("READ ONLY", "READ WRITE, ISOLATION LEVEL SERIALIZABLE"):
        with relayed.transaction():
            relayed.execute(f"SET TRANSACTION {options}")
            relayed.execute(f"DECLARE c NO SCROLL CURSOR FOR {QUERIES[0]}")
            if "WRITE" in options:
                relayed.execute("SELECT ai_generate(body) FROM docs WHERE id < 4")
            assert len(relayed.execute("FETCH 80 c").fetchall()) == 80
    with relayed.transaction():
        relayed.execute(f"DECLARE c CURSOR FOR {QUERIES[1]}")
        relayed.execute("FETCH 3 c")
        relayed.execute("UPDATE docs SET topic = 50 WHERE CURRENT OF c")
    assert relayed.execute("SELECT count(*) FROM docs WHERE topic = 50").fetchone() == (1,)
