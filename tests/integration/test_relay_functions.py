"""The AI function family behind PostgreSQL: the same answers and types as behind DuckDB."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from tests.fix_postgres import RunningRelay, attendants, running_postgres, running_relay
from tests.fix_sql import InstantGenerator, answer_text, embedding
from tierkv.dbfront.postgres.install import install

pytestmark = pytest.mark.integration


@pytest.fixture
def connection(ai_relay: RunningRelay) -> Iterator[psycopg.Connection]:
    with psycopg.connect(ai_relay.dsn, autocommit=True) as connection:
        yield connection


def test_results_have_their_types(connection: psycopg.Connection) -> None:
    cursor = connection.execute(
        "SELECT ai_generate('p'), ai_generate_json('p', '{\"type\": \"integer\"}'), "
        "ai_filter('p'), ai_classify_multi('p', ARRAY['a']), ai_extract('p', '[\"x\"]'), "
        "ai_score('p'), ai_embed('p'), ai_count_tokens('p'), ai_generate_detail('p')"
    )
    row: Any = cursor.fetchone()
    assert cursor.description is not None
    names = [connection.adapters.types.get(column.type_code) for column in cursor.description[:-1]]
    assert [None if info is None else info.name for info in names] == [
        "text", "jsonb", "bool", "text", "jsonb", "float8", "float4", "int4",
    ]  # fmt: skip
    assert row[1] == len("p")
    assert row[6] == pytest.approx(embedding("p"), abs=1e-6)
    assert [column.name for column in cursor.description][:3] == [
        "ai_generate", "ai_generate_json", "ai_filter",
    ]  # fmt: skip


def test_a_detail_is_made_json_by_to_json(connection: psycopg.Connection) -> None:
    row = connection.execute("SELECT to_json(ai_generate_detail('p'))").fetchone()
    assert row is not None and row[0]["value"] and row[0]["error"] is None


def test_a_detail_of_an_earlier_release_gets_the_new_field() -> None:
    with running_postgres() as server:
        asyncio.run(install(server.dsn))
        with psycopg.connect(server.dsn, autocommit=True) as direct:
            direct.execute("ALTER TYPE tierkv.ai_result DROP ATTRIBUTE cached")
            direct.execute("CREATE TABLE kept (detail tierkv.ai_result)")
            direct.execute("INSERT INTO kept VALUES (ROW ('old', 0, 0, 0, 0, 0, 0, 0, 0, 0))")
            direct.execute("CREATE TABLE typed OF tierkv.ai_result")
            direct.execute("COMMENT ON SCHEMA tierkv IS 'an earlier release'")
        assert asyncio.run(install(server.dsn))
        with (
            running_relay(server.dsn, attendants(InstantGenerator())) as relay,
            psycopg.connect(relay.dsn, autocommit=True) as connection,
        ):
            row = connection.execute("SELECT to_json(ai_generate_detail('p'))").fetchone()
            assert row is not None
            assert (row[0]["value"], row[0]["cached"]) == (answer_text("p"), False)
            old = connection.execute("SELECT (detail).value, (detail).cached FROM kept").fetchone()
            assert old == ("old", None)


def test_parameters_may_be_arguments_of_every_kind(connection: psycopg.Connection) -> None:
    row = connection.execute(
        "SELECT ai_classify(%s, %s), ai_extract(%s, %s), ai_agg(body, %s), "
        "ai_generate('p', options => %s) FROM docs WHERE id = 1",
        ("t", ["a", "b"], "t", json.dumps(["x"]), "q", json.dumps({"max_tokens": 3})),
    ).fetchone()
    assert row is not None
    assert row[0] in ("a", "b")
    assert row[1:] == (
        {"x": answer_text("t\nQuestion: Extract the x.")},
        answer_text("body 1\nQuestion: q"),
        answer_text("p"),
    )


def test_answers_with_nul_do_not_break_a_statement(
    connection: psycopg.Connection, generator: InstantGenerator
) -> None:
    generator.texts |= {"p": "a\0b", "t\nQuestion: Extract the x.": "c\0\ud800"}
    row = connection.execute(
        "SELECT ai_generate('p'), ai_extract('t', '[\"x\"]'), (ai_generate_detail('p')).value"
    ).fetchone()
    assert row == ("a\ufffdb", {"x": "c\ufffd\ufffd"}, "a\ufffdb")
