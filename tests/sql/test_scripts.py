"""Every script of this folder through every door."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import duckdb
import psycopg
import pytest
from psycopg.types.json import Jsonb

from tests import fix_postgres, fix_sql
from tests.differential.doors import Door, DuckDbFront, WireDoor
from tests.fix_postgres import PostgresServer, attendants, running_relay
from tests.sql.script import RELAY, EchoGenerator, Player, Script, read_script
from tierkv.dbfront.postgres.install import install

pytestmark = pytest.mark.integration

SCRIPTS = sorted(Path(__file__).parent.glob("*.test"))
CASES = [
    pytest.param(script, *case, id="-".join(filter(None, (path.stem, *case))))
    for path, script in [(path, read_script(path)) for path in SCRIPTS]
    for case in script.cases
]
MADE = {
    "VIEW": "SELECT schema_name, view_name FROM duckdb_views() WHERE NOT internal AND ",
    "TABLE": "SELECT schema_name, table_name FROM duckdb_tables() WHERE NOT internal AND ",
    "SEQUENCE": "SELECT schema_name, sequence_name FROM duckdb_sequences() WHERE ",
    "MACRO": "SELECT schema_name, function_name FROM duckdb_functions() "
    "WHERE function_type = 'macro' AND NOT internal AND ",
}
"""What a script may make, by kind, in the order in which it can be dropped."""
_OURS = "database_name = current_database() AND schema_name <> 'tierkv'"


@pytest.fixture(scope="module")
def generator() -> EchoGenerator:
    return EchoGenerator()


@pytest.fixture(scope="module")
def front(generator: EchoGenerator) -> Iterator[DuckDbFront]:
    running = DuckDbFront(generator)
    yield running
    running.close()


@pytest.fixture(scope="module")
def relay_dsn(generator: EchoGenerator, postgres: PostgresServer) -> Iterator[str]:
    asyncio.run(install(postgres.dsn))
    with running_relay(postgres.dsn, attendants(generator)) as relay:
        yield relay.dsn


@pytest.fixture
def opens(request: pytest.FixtureRequest, door: str) -> Callable[[], Door]:
    """Open connections through a door, to a database that holds the tables of tests and no more."""
    if door in RELAY:
        relay_dsn: str = request.getfixturevalue("relay_dsn")
        postgres: PostgresServer = request.getfixturevalue("postgres")
        with psycopg.connect(postgres.dsn, autocommit=True) as direct:
            direct.execute("DROP SCHEMA public CASCADE; CREATE SCHEMA public")
            direct.execute("GRANT USAGE ON SCHEMA public TO PUBLIC")  # As initdb does.
            direct.execute(fix_postgres.TABLES)
        return lambda: WireDoor(relay_dsn, extended=door == "relay_extended")
    front: DuckDbFront = request.getfixturevalue("front")
    _fill(front)
    return {
        "dbapi": front.dbapi,
        "simple": front.wire,
        "extended": lambda: front.wire(extended=True),
        "rest": front.rest,
    }[door]


def _fill(front: DuckDbFront) -> None:
    cursor = front.dbapi()
    for kind, query in MADE.items():
        for schema, name in cursor.run(query + _OURS).rows:
            outcome = cursor.run(f'DROP {kind} "{schema}"."{name}"')
            assert not outcome.sqlstate, outcome
    for statement in fix_sql.TABLES.strip().split(";\n"):
        assert not cursor.run(statement).sqlstate
    cursor.close()


@pytest.mark.parametrize(("script", "door", "mode"), CASES)
def test_script(
    script: Script, door: str, mode: str, opens: Callable[[], Door], generator: EchoGenerator
) -> None:
    Player(door, opens, generator, mode).play(script)


FIELDS = ["city", 'the "order", {as} it\'s written']
PARAMETERS = {"python": FIELDS, "json": json.dumps(FIELDS), "jsonb": Jsonb(FIELDS)}


@pytest.mark.parametrize("door", ["extended", "relay_extended"])
@pytest.mark.parametrize("binary", [False, True])
@pytest.mark.parametrize("kind", PARAMETERS)
@pytest.mark.parametrize("place", ["%s", "%b", "schema => %s", "%s::text[]"])
def test_fields_are_a_parameter(
    door: str, kind: str, place: str, binary: bool, request: pytest.FixtureRequest
) -> None:
    """Scripts have no parameters. A driver sends a list as an array, with or without its type."""
    if place == "%s::text[]" and kind != "python":
        pytest.skip("only a list is cast to a list")
    fixture = request.getfixturevalue("relay_dsn" if door in RELAY else "front")
    dsn: str = fixture if door in RELAY else fixture.dsn
    with psycopg.connect(dsn, autocommit=True) as connection:
        sql = f"SELECT ai_extract(%s, {place})"
        cursor = connection.execute(sql, ("a note", PARAMETERS[kind]), binary=binary)
        wanted = {name: f"<a note\nQuestion: Extract the {name}.>" for name in FIELDS}
        assert cursor.fetchone() == (wanted,)
        client_side = psycopg.ClientCursor(connection)
        if "%s" in place:
            client_side.execute(sql, ("a note", PARAMETERS[kind]))
            assert client_side.fetchone() == (wanted,)
        assert connection.execute("SELECT ai_extract('x', %s)", (None,)).fetchone() == (None,)


@pytest.mark.parametrize("door", ["extended", "relay_extended"])
def test_a_query_that_writes_takes_parameters(
    door: str, opens: Callable[[], Door], request: pytest.FixtureRequest
) -> None:
    if door == "extended" and duckdb.__version__ < "2":
        pytest.skip("the WITH of this DuckDB can't write")
    fixture = request.getfixturevalue("relay_dsn" if door in RELAY else "front")
    with psycopg.connect(fixture if door in RELAY else fixture.dsn, autocommit=True) as connection:
        found = connection.execute(
            "WITH x AS (INSERT INTO docs VALUES (%s, 1, %s) RETURNING id + 1 AS n, body) "
            "SELECT n, ai_generate(body || %s) AS a FROM x",
            [100, "a", "b"],
            prepare=True,
        )
        assert found.fetchall() == [(101, "<ab>")]
        types = [(column.name, column.type_code) for column in found.description or ()]
        assert types == [("n", 23), ("a", 25)]
        moved = connection.execute(
            "WITH gone AS (DELETE FROM docs WHERE id = %s RETURNING *) "
            "INSERT INTO docs SELECT id + 1, topic, ai_generate(body) FROM gone",
            [100],
        )
        assert moved.statusmessage == "INSERT 0 1"
        read = connection.execute("SELECT id, body FROM docs WHERE id >= %s", [100])
        assert read.fetchall() == [(101, "<a>")]


@pytest.mark.parametrize("door", ["extended", "relay_extended"])
def test_a_backslash_escapes_in_a_pattern_that_is_a_parameter(
    door: str, opens: Callable[[], Door], request: pytest.FixtureRequest
) -> None:
    fixture = request.getfixturevalue("relay_dsn" if door in RELAY else "front")
    with psycopg.connect(fixture if door in RELAY else fixture.dsn, autocommit=True) as connection:
        sql = "SELECT 'a_b' LIKE %s, 'axb' LIKE %s::varchar, 'A_B' ILIKE %s::text, 'ab' NOT LIKE %s"
        assert connection.execute(sql, ["a\\_b"] * 4).fetchone() == (True, False, True, True)
