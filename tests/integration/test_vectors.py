"""Embeddings behind PostgreSQL: pgvector's type, operators and index beside AI calls."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import psycopg
import pytest

from tests.fix_postgres import PostgresServer, RunningRelay, attendants, running_relay
from tests.fix_sql import InstantGenerator
from tests.sql.script import EchoGenerator
from tierkv.dbfront.postgres.install import install

pytestmark = pytest.mark.integration

_NOTES = """
CREATE TABLE notes (id int PRIMARY KEY, body text);
INSERT INTO notes SELECT i, CASE WHEN i = 7 THEN NULL ELSE 'note ' || i END
  FROM generate_series(0, 19) i;
"""


def _relay(
    postgres: PostgresServer, name: str, generator: InstantGenerator
) -> Iterator[RunningRelay]:
    """A relay with a database of its own, which has a table of notes."""
    with psycopg.connect(postgres.dsn, autocommit=True) as direct:
        direct.execute(f"CREATE DATABASE {name}")
    dsn = postgres.dsn.replace("dbname=app", f"dbname={name}")
    with psycopg.connect(dsn) as direct:
        direct.execute(_NOTES)
    asyncio.run(install(dsn))
    with running_relay(dsn, attendants(generator)) as running:
        yield running
    with psycopg.connect(postgres.dsn, autocommit=True) as direct:
        direct.execute(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture(params=["simple", "extended"])
def client(
    request: pytest.FixtureRequest, relay_of_vectors: RunningRelay
) -> Iterator[psycopg.Connection]:
    dsn = relay_of_vectors.dsn.replace("dbname=app", "dbname=vectors")
    kind = psycopg.ClientCursor if request.param == "simple" else psycopg.Cursor
    with psycopg.connect(dsn, autocommit=True, cursor_factory=kind) as connection:
        connection.execute("DROP TABLE IF EXISTS mem")
        yield connection


@pytest.fixture(scope="module")
def relay_of_vectors(postgres: PostgresServer) -> Iterator[RunningRelay]:
    with psycopg.connect(postgres.dsn) as direct:
        known = direct.execute("SELECT 1 FROM pg_available_extensions WHERE name = 'vector'")
        if known.fetchone() is None:
            pytest.skip("pgvector is not installed: no extension vector for this PostgreSQL")
    for relay in _relay(postgres, "vectors", EchoGenerator()):
        dsn = postgres.dsn.replace("dbname=app", "dbname=vectors")
        with psycopg.connect(dsn, autocommit=True) as direct:
            direct.execute("CREATE EXTENSION vector")
        yield relay


@pytest.fixture(scope="module")
def relay_without(postgres: PostgresServer) -> Iterator[RunningRelay]:
    yield from _relay(postgres, "no_vectors", EchoGenerator())


@pytest.mark.parametrize("operator", ["<=>", "<->", "<#>", "<+>"])
def test_nearest_rows_are_the_documents(client: psycopg.Connection, operator: str) -> None:
    client.execute(
        "CREATE TABLE mem AS SELECT id, body, ai_embed(body)::vector(8) AS embedding FROM notes"
    )
    found = client.execute(
        "SELECT ai_generate(%(q)s::text, documents => (SELECT body FROM mem WHERE id <> 7 "
        f"ORDER BY embedding {operator} ai_embed(%(q)s::text), id LIMIT 1))",
        {"q": "note 3"},
    ).fetchone()
    assert found == ("<note 3\nnote 3>",)


@pytest.mark.parametrize("kind", ["vector(8)", "halfvec(8)"])
def test_vectors_are_no_documents(client: psycopg.Connection, kind: str) -> None:
    client.execute(f"CREATE TABLE mem AS SELECT id, body, ai_embed(body)::{kind} AS v FROM notes")
    ask = "SELECT ai_generate('Who?', documents => (SELECT {} FROM mem LIMIT 2))"
    with pytest.raises(psycopg.errors.DatatypeMismatch) as refused:
        client.execute(ask.format("v"))
    assert f"documents must be text, not {kind[:-3]}" in str(refused.value)
    assert "SELECT body FROM" in str(refused.value.diag.message_hint)
    with pytest.raises(psycopg.errors.SyntaxError, match="returns 2 columns, not one"):
        client.execute(ask.format("v, body"))


def test_a_question_per_row_finds_its_own_documents(client: psycopg.Connection) -> None:
    client.execute("CREATE TABLE mem (id int, body text, embedding vector(8))")
    client.execute("INSERT INTO mem SELECT id, body, ai_embed(body) FROM notes")
    client.execute("UPDATE mem SET body = 'other', embedding = ai_embed('other') WHERE id = 1")
    rows = client.execute(
        "SELECT q, ai_generate(q, documents => (SELECT body FROM mem WHERE body IS NOT NULL "
        "ORDER BY ai_embed(q) <=> embedding LIMIT 1)) FROM (VALUES ('note 5'), ('other')) v(q)"
    ).fetchall()
    assert rows == [("note 5", "<note 5\nnote 5>"), ("other", "<other\nother>")]


def test_an_index_finds_the_nearest(client: psycopg.Connection) -> None:
    client.execute("CREATE TABLE mem (id int, body text, embedding vector(8))")
    client.execute("INSERT INTO mem SELECT id, body, ai_embed(body) FROM notes WHERE id <> 7")
    client.execute("CREATE INDEX ON mem USING hnsw (embedding vector_cosine_ops)")
    client.execute("SET enable_seqscan = off")
    query = "SELECT id FROM mem ORDER BY embedding <=> ai_embed('note 12') LIMIT 2"
    plan = "\n".join(row[0] for row in client.execute(f"EXPLAIN {query}").fetchall())
    assert "Index Scan using mem_embedding_idx" in plan
    rows = client.execute(query).fetchall()
    assert rows[0] == (12,)
    assert len(rows) == 2


def test_half_vectors_and_own_casts(client: psycopg.Connection) -> None:
    client.execute(
        "CREATE TABLE mem AS SELECT id, ai_embed(body)::halfvec(8) AS half, ai_embed(body) AS list "
        "FROM notes WHERE body IS NOT NULL"
    )
    for order in (
        "half <=> ai_embed('note 4')",
        "half <=> ai_embed('note 4')::halfvec(8)",
        "list::vector <=> ai_embed('note 4')",
    ):
        assert client.execute(f"SELECT id FROM mem ORDER BY {order} LIMIT 1").fetchone() == (4,)


def test_a_list_beside_a_vector_needs_a_cast(client: psycopg.Connection) -> None:
    client.execute("CREATE TABLE mem AS SELECT id, ai_embed(body) AS embedding FROM notes")
    with pytest.raises(psycopg.errors.UndefinedFunction) as error:
        client.execute("SELECT id FROM mem ORDER BY embedding <=> ai_embed('a')")
    assert "embedding::vector" in (error.value.diag.message_hint or "")
    assert error.value.diag.statement_position == "39"


def test_another_length_is_refused(client: psycopg.Connection) -> None:
    client.execute("CREATE TABLE mem (id int, embedding vector(3))")
    with pytest.raises(psycopg.errors.DataException, match="expected 3 dimensions, not 8"):
        client.execute("INSERT INTO mem SELECT id, ai_embed(body) FROM notes")


def test_without_the_extension_the_error_names_the_cure(relay_without: RunningRelay) -> None:
    dsn = relay_without.dsn.replace("dbname=app", "dbname=no_vectors")
    with psycopg.connect(dsn, autocommit=True) as connection:
        with pytest.raises(psycopg.errors.UndefinedFunction, match="pgvector") as error:
            connection.execute("SELECT id FROM notes ORDER BY ai_embed(body) <=> ai_embed('a')")
        assert "CREATE EXTENSION vector" in (error.value.diag.message_hint or "")
        assert error.value.diag.statement_position == "31"
        with pytest.raises(psycopg.errors.UndefinedObject) as named:
            connection.execute("SELECT ai_embed(body)::vector(8) FROM notes")
        assert "CREATE EXTENSION vector" in (named.value.diag.message_hint or "")
        # Lists and functions of one's own need no extension.
        connection.execute(
            "CREATE FUNCTION apart(a real[], b real[]) RETURNS float8 LANGUAGE sql IMMUTABLE AS "
            "$$ SELECT 1 - sum(x * y) FROM unnest(a, b) v(x, y) $$"
        )
        connection.execute(
            "CREATE OPERATOR <=> (LEFTARG = real[], RIGHTARG = real[], FUNCTION = apart)"
        )
        found = connection.execute(
            "SELECT id FROM notes WHERE body IS NOT NULL "
            "ORDER BY ai_embed(body)::real[] <=> ai_embed('note 2')::real[] LIMIT 1"
        ).fetchone()
        assert found == (2,)


def test_filters_and_cursors_over_the_nearest_rows(client: psycopg.Connection) -> None:
    client.execute("CREATE TABLE mem (id int, body text, embedding vector(8))")
    client.execute("INSERT INTO mem SELECT id, body, ai_embed(body) FROM notes WHERE id <> 7")
    query = (
        "SELECT id, ai_generate(body, documents => (SELECT m.body FROM mem m "
        "WHERE m.id <> mem.id ORDER BY m.embedding <=> mem.embedding LIMIT 1)) IS NOT NULL "
        "FROM mem WHERE ai_filter('note 1', body) "
        "ORDER BY embedding <=> ai_embed('note 12') LIMIT 2"
    )
    rows = client.execute(query).fetchall()
    assert rows[0] == (12, True)
    assert len(rows) == 2 and rows[1][0] in {1, *range(10, 20)}
    with client.transaction():
        client.execute(f"DECLARE near CURSOR FOR {query}")
        assert client.execute("FETCH 1 FROM near").fetchall() == rows[:1]
        assert client.execute("FETCH ALL FROM near").fetchall() == rows[1:]
