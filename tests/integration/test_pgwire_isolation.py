"""One user can't act in, read from, or put errors into another's running statement."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import psycopg
import pytest

from dbfront.engines.duckdb_engine import DuckDbConfig
from dbfront.session import DuckDbSqlServer
from tests.fix_pgwire import RunningServer, running_pgwire
from tests.fix_sql import InstantGenerator

pytestmark = pytest.mark.integration

USERS = {"ann": "ann's word", "bob": "bob's word"}
VICTIM = "SELECT count(ai_generate('p' || (i % 3))) FROM range(400000) r(i)"
NUMBERS = range(12)
"""Sessions of a young front are numbered from 1; forms of the first plan follow 4096 times that."""


@pytest.fixture
def generator() -> InstantGenerator:
    return InstantGenerator()


@pytest.fixture
def server(generator: InstantGenerator) -> Iterator[RunningServer]:
    def sql() -> DuckDbSqlServer:
        return DuckDbSqlServer(DuckDbConfig(threads=2), generator)

    with running_pgwire(sql, users=USERS) as running:
        yield running


@pytest.fixture
def connect(server: RunningServer) -> Callable[[str], psycopg.Connection]:
    def open_as(user: str) -> psycopg.Connection:
        dsn = f"host=127.0.0.1 port={server.port} dbname=main user={user}"
        return psycopg.connect(dsn, password=USERS[user], autocommit=True)

    return open_as


def test_nobody_acts_in_anothers_statement(
    connect: Callable[[str], psycopg.Connection], generator: InstantGenerator
) -> None:
    attacks = [
        f"SELECT * FROM query('SELECT {call}')"
        for number in NUMBERS
        for call in (
            f"tierkv_ai_call({4096 * number}, ''mallory'')",
            f"tierkv_ai_call_kept({4096 * number}, ''mallory'')",
            f"tierkv_window({4096 * number}, 0)",
        )
    ]
    with connect("ann") as ann, connect("bob") as bob, ThreadPoolExecutor(1) as pool:
        ann.execute("SET tierkv.execution = replay")
        running = pool.submit(lambda: [ann.execute(VICTIM).fetchone() for _ in range(3)])
        while not running.done():
            for attack in attacks:
                assert bob.execute(attack).fetchall() == [(None,)], attack
        assert running.result(60) == [(400_000,)] * 3
    assert set(generator.prompts) == {"p0", "p1", "p2"}


def test_nobody_puts_an_error_into_anothers_session(
    connect: Callable[[str], psycopg.Connection],
) -> None:
    with connect("ann") as ann, connect("bob") as bob:
        for number in NUMBERS:
            bob.execute(f"SET VARIABLE tierkv_session = {number}")
            for attack in (
                "tierkv.stat_reset('nonsense')",
                "tierkv.simulate('/nowhere', nodes => 1)",
            ):
                with suppress(psycopg.Error):
                    bob.execute(
                        f"SELECT * FROM {attack}" if "simulate" in attack else f"SELECT {attack}"
                    )
        with pytest.raises(psycopg.errors.UndefinedTable, match="nowhere"):
            ann.execute("SELECT * FROM nowhere")
        assert ann.execute("SELECT 1").fetchone() == (1,)
