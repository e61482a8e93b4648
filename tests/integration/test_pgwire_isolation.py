"""One user can't act in, read from, or put errors into another's running statement."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest
from psycopg.errors import InsufficientPrivilege

from tests.fix_pgwire import RunningServer, running_pgwire
from tests.fix_sql import InstantGenerator, answer_text
from tierkv.dbfront.databases.duckdb_engine import DuckDbConfig
from tierkv.dbfront.statement.server import DuckDbSqlServer

pytestmark = pytest.mark.integration

USERS = {"ann": "ann's word", "bob": "bob's word"}
VICTIM = "SELECT count(ai_generate('p' || (i % 3))) FROM range(10000) r(i)"
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
                with pytest.raises(InsufficientPrivilege, match="clients may not call"):
                    bob.execute(attack)
        assert running.result(60) == [(10_000,)] * 3
    assert set(generator.prompts) == {"p0", "p1", "p2"}


def test_nobody_puts_an_error_into_anothers_session(
    connect: Callable[[str], psycopg.Connection],
) -> None:
    with connect("ann") as ann, connect("bob") as bob:
        with pytest.raises(InsufficientPrivilege):
            bob.execute("SET VARIABLE tierkv_session = 1")
        for attack in (
            "SELECT tierkv.stat_reset('nonsense')",
            "SELECT * FROM tierkv.simulate('/nowhere', nodes => 1)",
        ):
            with pytest.raises(psycopg.Error) as told:
                bob.execute(attack)
            assert "tierkv-error" not in str(told.value)
        with pytest.raises(psycopg.errors.UndefinedTable, match="nowhere"):
            ann.execute("SELECT * FROM nowhere")
        assert ann.execute("SELECT 1").fetchone() == (1,)


def test_what_one_defines_does_not_ask_in_anothers_statement(
    connect: Callable[[str], psycopg.Connection], generator: InstantGenerator
) -> None:
    """Text hides the name of our function from whoever reads the definition."""
    number = "regexp_extract(current_query(), 'call[(]([0-9]+)', 1)::BIGINT"
    hidden = "SELECT tierkv_' || 'ai_call((getvariable(''tierkv_session'') * 4096)::BIGINT, ''m'')"
    stolen = f"SELECT tierkv_' || 'ai_call({number.replace(chr(39), chr(39) * 2)}, ''m'')"
    with connect("ann") as ann, connect("bob") as bob:
        bob.execute("CREATE TABLE notes AS SELECT 'n' || i AS body FROM range(5) r(i)")
        for text in (hidden, stolen):
            for definition in (
                f"CREATE VIEW v AS SELECT * FROM query('{text}')",
                f"CREATE MACRO m() AS (SELECT * FROM query('{text}'))",
                f"CREATE TABLE d (a INT, b VARCHAR DEFAULT ((SELECT * FROM query('{text}'))))",
            ):
                with pytest.raises(InsufficientPrivilege, match="other users"):
                    ann.execute(definition)
        ann.execute("CREATE MACRO secret() AS getvariable('tierkv_session')")
        ann.execute("CREATE TABLE kept (a VARCHAR, told VARCHAR DEFAULT current_query())")
        bob.execute("INSERT INTO kept (a) SELECT ai_generate(body) || ' ' || secret() FROM notes")
        rows = ann.execute("SELECT a, told FROM kept").fetchall()
        keys = {int(key) for _, told in rows for key in re.findall(r"call\w*\((\d+)", told)}
        keys |= {4096 * int(a.split()[-1]) for a, _ in rows}
        assert len(keys) == 2
        for key in keys:
            with pytest.raises(InsufficientPrivilege):
                ann.execute(f"SELECT * FROM query('SELECT tierkv_ai_call({key}, ''mallory'')')")
    assert set(generator.prompts) == {f"n{i}" for i in range(5)}


REFUSED = (InsufficientPrivilege, psycopg.errors.SyntaxError)
"""Several statements at once are no prepared statement."""


@pytest.mark.parametrize(
    "attack",
    [
        "DROP SCHEMA tierkv CASCADE",
        "CREATE OR REPLACE VIEW tierkv.nodes AS SELECT 1",
        "CREATE OR REPLACE VIEW tierkv_pg.main.pg_class AS SELECT 1",
        "SELECT 1 -- \r; DROP SCHEMA tierkv CASCADE",
        "EXPLAIN ANALYZE DROP SCHEMA tierkv CASCADE",
        "DETACH tierkv_pg",
        "ATTACH ':memory:' AS tierkv",
        "SET search_path = 'tierkv'",
        "SELECT set_config('search_path', 'tierkv', false)",
        "USE tierkv",
        "PRAGMA search_path='tierkv'",
        "CREATE MACRO lower(x) AS 'poisoned'",
        "CREATE MACRO tierkv_window(a, b) AS 'poisoned'",
        "CREATE MACRO ai_generate(a) AS 'poisoned'",
        "CREATE TYPE json AS INTEGER",
    ],
)
def test_what_all_share_is_nobodys_to_change(
    connect: Callable[[str], psycopg.Connection], attack: str
) -> None:
    with connect("bob") as bob, connect("ann") as ann:
        for run in (
            lambda: bob.execute(attack),
            lambda: bob.execute(attack, prepare=True),
            lambda: bob.execute(attack.encode()),
        ):
            with pytest.raises(REFUSED):
                run()
        with bob.transaction(), pytest.raises(REFUSED), bob.transaction():
            bob.execute(attack)
        assert ann.execute("SELECT count(*) FROM tierkv.stat_activity").fetchone() == (2,)
        assert ann.execute("SELECT lower('ABC'), typeof('1'::JSON)").fetchone() == ("abc", "JSON")
        assert ann.execute("SELECT relname FROM pg_class WHERE relname = 'none'").fetchall() == []
        assert ann.execute("SELECT ai_generate('p')").fetchone() == (answer_text("p"),)


def test_a_startup_option_is_no_way_around(server: RunningServer) -> None:
    dsn = f"host=127.0.0.1 port={server.port} dbname=main user=ann"
    with pytest.raises(psycopg.OperationalError, match="search path"):
        psycopg.connect(dsn, password=USERS["ann"], options="-c search_path=tierkv")
