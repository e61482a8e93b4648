"""What DBeaver, Metabase, Grafana and others ask the catalogue, and the right answers."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest

from tests.fix_pgwire import RunningServer, running_pgwire
from tests.integration.pgwire_tools import ASKED, SETUP, Asked

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_pgwire() as running:
        yield running


@pytest.fixture(scope="module")
def conn(server: RunningServer) -> Iterator[psycopg.Connection]:
    dsn = server.dsn.replace("dbname=main", "dbname=shop")
    with psycopg.connect(dsn, autocommit=True) as connection:
        for statement in SETUP:
            connection.execute(statement)
        yield connection


@pytest.mark.parametrize("asked", ASKED, ids=lambda asked: f"{asked.tool}: {asked.what}")
def test_a_tools_question(conn: psycopg.Connection, asked: Asked) -> None:
    facts = conn.execute(
        "SELECT 'docs'::regclass::oid, oid FROM pg_namespace WHERE nspname = 'main'"
    ).fetchone()
    assert facts is not None
    sql = asked.sql.replace("{docs}", str(facts[0])).replace("{main}", str(facts[1]))
    assert conn.execute(sql).fetchall() == asked.rows
    assert conn.execute(sql, prepare=True).fetchall() == asked.rows
