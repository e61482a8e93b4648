"""AI calls in statements that PostgreSQL runs: every kind, both protocols, inside transactions."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest

from tests.fix_postgres import PostgresServer, RunningRelay
from tests.fix_sql import InstantGenerator, answer_text

pytestmark = pytest.mark.integration


@pytest.fixture(params=["extended", "simple"])
def connection(
    ai_relay: RunningRelay, request: pytest.FixtureRequest
) -> Iterator[psycopg.Connection]:
    """A connection whose statements go by one of the protocols."""
    factory = psycopg.ClientCursor if request.param == "simple" else psycopg.Cursor
    with psycopg.connect(ai_relay.dsn, autocommit=True, cursor_factory=factory) as connection:
        yield connection


def bodies() -> list[str | None]:
    return [None if i % 10 == 7 else f"body {i % 30}" for i in range(60)]


def test_a_parameter_is_a_prompt(connection: psycopg.Connection) -> None:
    for prompt in ("one", "two", "ünï", "a\\b'c", None):
        row = connection.execute("SELECT ai_generate(%s::text)", (prompt,)).fetchone()
        assert row == (answer_text(prompt),)


def test_prepared_statements_are_answered_each_time(
    connection: psycopg.Connection, generator: InstantGenerator
) -> None:
    connection.prepare_threshold = 0
    for number in (1, 2, 3):
        rows = connection.execute(
            "SELECT ai_generate(body || ' again') FROM docs WHERE id = %s", (number,)
        ).fetchall()
        assert rows == [(answer_text(f"body {number} again"),)]
    assert len(generator.prompts) == 3


def test_a_write_writes_once(connection: psycopg.Connection) -> None:
    connection.execute("CREATE TEMP TABLE s (id serial, a text)")
    done = connection.execute(
        "INSERT INTO s (a) SELECT ai_generate(body || %s) FROM docs RETURNING id, a", ("!",)
    )
    assert sorted(row[0] for row in done.fetchall()) == list(range(1, 61))
    connection.execute("UPDATE s SET a = ai_generate(a || id) WHERE a IS NOT NULL")
    # What the collecting SELECT may not do does not matter.
    connection.execute("CREATE TEMP TABLE c (a text CHECK (length(a) > 1), b int)")
    with pytest.raises(psycopg.errors.InvalidTextRepresentation):
        connection.execute("INSERT INTO c SELECT ai_generate(body), body::int FROM docs")
    assert connection.execute("SELECT count(*) FROM c").fetchone() == (0,)


def test_explain_asks_nobody(connection: psycopg.Connection, generator: InstantGenerator) -> None:
    lines = [row[0] for row in connection.execute("EXPLAIN SELECT ai_generate(body) FROM docs")]
    assert "Seq Scan on docs" in lines[0]
    assert any("ai_generate in SELECT" in line for line in lines)
    assert generator.prompts == []
    lines = [
        row[0] for row in connection.execute("EXPLAIN ANALYZE SELECT ai_generate(body) FROM docs")
    ]
    assert any("distinct 27" in line for line in lines)


def test_a_limit_stops_early(connection: psycopg.Connection, generator: InstantGenerator) -> None:
    rows = connection.execute(
        "SELECT i FROM generate_series(1, 5000) i WHERE ai_generate('n' || i) = 'yes' LIMIT 5"
    ).fetchall()
    expected = [i for i in range(1, 5001) if answer_text(f"n{i}") == "yes"][:5]
    assert [row[0] for row in rows] == expected
    assert len(generator.prompts) <= 256


def test_cursors(connection: psycopg.Connection, generator: InstantGenerator) -> None:
    expected = [(i, answer_text(body)) for i, body in enumerate(bodies())]
    with connection.transaction(), connection.cursor("c") as cursor:
        cursor.itersize = 7
        cursor.execute("SELECT id, ai_generate(body) FROM docs ORDER BY id")
        assert list(cursor) == expected
    with connection.cursor("held", withhold=True) as cursor:
        cursor.execute("SELECT id, ai_generate(body) FROM docs ORDER BY id")
        assert cursor.fetchmany(3) == expected[:3]
        assert cursor.fetchall() == expected[3:]
    assert len(generator.prompts) == 54
    with pytest.raises(psycopg.errors.NoActiveSqlTransaction, match="transaction blocks"):
        connection.execute("DECLARE d CURSOR FOR SELECT ai_generate('x')")
    assert connection.execute("SELECT 1").fetchone() == (1,)


def test_copy_out(connection: psycopg.Connection) -> None:
    with connection.cursor().copy(
        "COPY (SELECT id, ai_generate(body) FROM docs WHERE id < 3 ORDER BY id) TO STDOUT"
    ) as copy:
        rows = list(copy.rows())
    assert rows == [(str(i), answer_text(f"body {i}")) for i in range(3)]


def test_several_statements_in_one_query(connection: psycopg.Connection) -> None:
    cursor = connection.execute("SELECT 1; SELECT ai_generate('second'); SELECT 3")
    results = [cursor.fetchall()]
    while cursor.nextset():
        results.append(cursor.fetchall())
    assert results == [[(1,)], [(answer_text("second"),)], [(3,)]]
    connection.execute("CREATE TEMP TABLE m (a text)")
    with pytest.raises(psycopg.errors.DivisionByZero):
        connection.execute("INSERT INTO m SELECT ai_generate('x'); SELECT 1 / 0")
    assert connection.execute("SELECT count(*) FROM m").fetchone() == (0,)
    connection.execute("BEGIN; INSERT INTO m SELECT ai_generate('x'); COMMIT; SELECT 1")
    assert connection.execute("SELECT count(*) FROM m").fetchone() == (1,)


def test_calls_outside_the_front_are_refused(
    postgres: PostgresServer, ai_relay: RunningRelay
) -> None:
    refused = pytest.raises(psycopg.errors.FeatureNotSupported, match="no answer to this AI call")
    with psycopg.connect(postgres.dsn) as direct, refused:
        direct.execute("SELECT tierkv.ai_call(1, 'x')")


def test_pipelines_with_calls(ai_relay: RunningRelay) -> None:
    with psycopg.connect(ai_relay.dsn) as connection:
        connection.execute("CREATE TEMP TABLE p (id int, a text)")
        connection.commit()
        with connection.pipeline():
            connection.execute("INSERT INTO p VALUES (1, 'plain')")
            cursor = connection.execute("SELECT ai_generate(a) FROM p")
            connection.execute("INSERT INTO p SELECT 2, ai_generate('second')")
            last = connection.execute("SELECT count(*) FROM p")
        assert cursor.fetchall() == [(answer_text("plain"),)]
        assert last.fetchone() == (2,)
        connection.rollback()
        assert connection.execute("SELECT count(*) FROM p").fetchone() == (0,)
    with psycopg.connect(ai_relay.dsn, autocommit=True) as connection:
        connection.execute("CREATE TEMP TABLE p (id int, a text)")
        with pytest.raises(psycopg.errors.DivisionByZero), connection.pipeline():
            connection.execute("INSERT INTO p VALUES (1, 'plain')")
            connection.execute("INSERT INTO p SELECT 2, ai_generate('second')")
            connection.execute("SELECT 1 / 0")
        assert connection.execute("SELECT count(*) FROM p").fetchone() == (0,)


def test_admin_views(connection: psycopg.Connection, ai_relay: RunningRelay) -> None:
    connection.execute("SELECT ai_generate(body) FROM docs")
    with pytest.raises(psycopg.errors.DivisionByZero):
        connection.execute("SELECT ai_generate('x'), 1 / 0")
    pid = connection.info.backend_pid
    for _ in range(2):
        rows = connection.execute(
            "SELECT usename, state FROM tierkv.stat_activity WHERE pid = %s", (pid,)
        ).fetchall()
        assert rows == [("alice", "idle")]
    assert connection.execute(
        "SELECT query, calls, rounds, errors FROM tierkv.stat_statements ORDER BY query"
    ).fetchall() == [
        ("SELECT ai_generate($1), $2 / $3", 1, 1, 0),
        ("SELECT ai_generate(body) FROM docs", 1, 2, 0),
    ]
    for view, column in (("stat_statements", "ai_calls_deduped"), ("stat_functions", '"rows"')):
        told = connection.execute(f"SELECT DISTINCT {column} FROM tierkv.{view}").fetchall()
        assert told == [(None,)]
    logged = connection.execute("SELECT type, exception_code FROM tierkv.query_log").fetchall()
    assert logged[-1] == ("ExceptionWhileProcessing", "22012") and len(logged) == 4
    assert connection.execute(
        "SELECT setting FROM tierkv.settings WHERE name = 'tierkv.max_calls'"
    ).fetchall() == [("1000",)]
    assert connection.execute("SELECT tierkv.stat_reset('statements') > now() - '1 h'::interval")
    counted = "SELECT count(*) FROM tierkv.stat_statements"
    assert connection.execute(counted).fetchone() == (0,)
    assert connection.execute("SELECT count(*) FROM tierkv.query_log").fetchone() == (4,)
    with pytest.raises(psycopg.Error, match="nothing"):
        connection.execute("SELECT tierkv.stat_reset('nothing')")
    with connection.transaction():
        connection.execute("SET LOCAL tierkv.max_calls = 3")
        shown = "SELECT setting FROM tierkv.settings WHERE name = 'tierkv.max_calls'"
        assert connection.execute(shown).fetchall() == [("3",)]
        text = "SELECT ai_generate(name) FROM (SELECT name FROM tierkv.settings LIMIT 1) s"
        assert connection.execute(text).fetchone()[0] is not None
