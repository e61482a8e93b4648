"""KV indexes and AI tables behind PostgreSQL that refresh by themselves, through real fronts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.fix_cluster import free_port, wait_for
from tests.fix_postgres import PASSWORD, USER, PostgresServer
from tests.fix_roles import Roles

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

FRONTS = ("front-a", "front-b")
DATABASE = "kept_indexes"  # of its own: other tests leave tables in theirs
ROWS = 30


class KeepingFronts(Roles):
    """Two fronts over one PostgreSQL, each with a login for what its keeper refreshes."""

    def __init__(self, folder: Path, postgres: PostgresServer) -> None:
        super().__init__(folder, environment={"PGPASSWORD": PASSWORD})
        self.dsn = postgres.dsn.replace("dbname=app", f"dbname={DATABASE}")
        self.ports = {name: free_port() for name in FRONTS}

    def _settings(self, name: str) -> Iterator[str]:
        yield from super()._settings(name)
        if name in FRONTS:
            yield from (f"front.pg_port={self.ports[name]}", "front.http_port=0")
            yield f"front.postgres={self.dsn}"
            yield f"front.queue_door=host=127.0.0.1 port={self.ports[name]}"

    def session(self) -> psycopg.Connection[Any]:
        """Connect to the first front that lives."""
        ports = ",".join(str(self.ports[name]) for name in FRONTS)
        dsn = f"host=127.0.0.1,127.0.0.1 port={ports} user={USER} dbname={DATABASE}"
        return psycopg.connect(dsn, password=PASSWORD, autocommit=True)

    def rows(self, sql: str) -> list[tuple[Any, ...]]:
        with self.session() as connection:
            cursor = connection.execute(sql.encode())
            return cursor.fetchall() if cursor.description else []

    def index(self) -> tuple[Any, ...]:
        rows = self.rows("SELECT state, documents, source FROM tierkv.kv_indexes")
        return rows[0] if rows else ()

    def keeper_pid(self) -> int:
        """Return the backend that has the keepers' lock; 0 if none has it."""
        locked = (
            "SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND granted AND objid = "
            f"{0x746B766B} AND database = (SELECT oid FROM pg_database WHERE datname = "
            "current_database())"
        )
        with psycopg.connect(self.dsn) as direct:
            rows = direct.execute(locked.encode()).fetchall()
        return int(rows[0][0]) if rows else 0


@pytest.fixture(scope="module")
def fronts(
    tmp_path_factory: pytest.TempPathFactory, postgres: PostgresServer
) -> Iterator[KeepingFronts]:
    roles = KeepingFronts(tmp_path_factory.mktemp("keepers"), postgres)
    try:
        with psycopg.connect(postgres.dsn, autocommit=True) as direct:
            direct.execute(f"CREATE DATABASE {DATABASE}".encode())
        roles.start("meta", "dmp-0", "compute-0", *FRONTS)
        yield roles
    finally:
        roles.stop()


@pytest.fixture
def tickets(fronts: KeepingFronts) -> Iterator[KeepingFronts]:
    fronts.rows("CREATE TABLE tickets (id int PRIMARY KEY, body text)")
    fronts.rows(
        "INSERT INTO tickets SELECT i, 'Ticket ' || i || repeat(' is late', 30) "
        f"FROM generate_series(1, {ROWS}) t(i)"
    )
    yield fronts
    fronts.rows("DROP KV INDEX IF EXISTS tickets_kv")
    fronts.rows("DROP TABLE IF EXISTS tickets, moved CASCADE")


def becomes(fronts: KeepingFronts, documents: int, source: str = "tickets") -> None:
    wait_for(lambda: fronts.index() == ("fresh", documents, source), what=f"{documents} documents")


def test_an_index_follows_committed_writes(tickets: KeepingFronts) -> None:
    tickets.rows("CREATE KV INDEX tickets_kv ON tickets (body)")
    becomes(tickets, ROWS)
    stale = "SELECT stale_rows FROM tierkv.kv_indexes WHERE name = 'tickets_kv'"
    wait_for(lambda: tickets.rows(stale) == [(0,)], what="the index has caught up")
    manual = "CREATE KV INDEX other_kv ON tickets (body) WITH (refresh = manual, background = off)"
    tickets.rows(manual)
    assert tickets.rows(stale.replace("tickets_kv", "other_kv")) == [(None,)], "writes unseen"
    tickets.rows("DROP KV INDEX other_kv")
    tickets.rows("REFRESH KV INDEX tickets_kv")
    with tickets.session() as connection:
        connection.execute("INSERT INTO tickets VALUES (1000, 'a new one')")
        becomes(tickets, ROWS + 1)
        connection.execute("BEGIN")
        connection.execute("DELETE FROM tickets")
        connection.execute("ROLLBACK")
        connection.execute("UPDATE tickets SET body = 'changed' WHERE id IN (1, 2)")
        becomes(tickets, ROWS)
    with psycopg.connect(tickets.dsn, autocommit=True) as direct:
        direct.execute("INSERT INTO tickets VALUES (1001, 'written behind the front')")
        becomes(tickets, ROWS + 1)
        direct.execute("ALTER TABLE tickets RENAME TO moved")
        direct.execute("DELETE FROM moved WHERE id = 1001")
        becomes(tickets, ROWS, "moved")
        direct.execute("TRUNCATE moved")
        becomes(tickets, 0, "moved")
        wait_for(lambda: tickets.rows(stale) == [(0,)], what="the index has caught up again")
    tickets.rows("DROP KV INDEX tickets_kv")
    triggers = "SELECT count(*) FROM pg_trigger WHERE tgname LIKE 'tierkv%'"
    assert tickets.rows(triggers) == [(0,)]


def test_explain_names_the_index_and_answers_are_those_without_it(
    tickets: KeepingFronts,
) -> None:
    asked = "SELECT id, ai_generate(body || ' Why?', options => '{\"max_tokens\": 6}') FROM tickets"
    where = " WHERE id < 6 ORDER BY id"
    with tickets.session() as connection:
        connection.execute("SET tierkv.cache = off")
        plain = connection.execute((asked + where).encode()).fetchall()
        connection.execute("RESET tierkv.cache")
        connection.execute("CREATE KV INDEX tickets_kv ON tickets (body) WITH (background = off)")
        becomes(tickets, ROWS)
        for option in ("AI_ESTIMATE", "ANALYZE"):
            lines = connection.execute(f"EXPLAIN ({option}) {asked}{where}".encode()).fetchall()
            (line,) = (text.strip() for (text,) in lines if "kv index" in text)
            verb = "are" if option == "AI_ESTIMATE" else "were"
            found = re.fullmatch(
                rf"kv index tickets_kv: (\d+) of (\d+) prompt tokens {verb} cached", line
            )
            assert found and 0.5 * int(found[2]) < int(found[1]) < int(found[2]), line
        assert connection.execute((asked + where).encode()).fetchall() == plain
        used = "SELECT calls, hit_tokens > 0, saved_s > 0 FROM tierkv.kv_indexes"
        assert connection.execute(used.encode()).fetchone() == (10, True, True)
        ((document,),) = connection.execute(f"EXPLAIN (FORMAT JSON) {asked}".encode()).fetchall()
        assert document[0]["AI Plan"]["Calls"][0]["KV Index"] == "tickets_kv"


def test_bytes_by_tier_are_told_and_a_silent_meta_server_gives_null(
    tickets: KeepingFronts,
) -> None:
    tickets.rows("CREATE KV INDEX tickets_kv ON tickets (body) WITH (background = off)")
    by_tier = "SELECT l1_bytes, memory_bytes, disk_bytes FROM tierkv.kv_indexes"

    def known() -> bool:
        ((in_pages, in_memory, on_disk),) = tickets.rows(by_tier)
        return bool(in_pages and in_memory and on_disk == 0)

    wait_for(known, what="the texts are located")
    tickets.kill("meta")
    try:
        wait_for(lambda: tickets.rows(by_tier) == [(None, None, None)], what="it is known no more")
    finally:
        tickets.start("meta")
    wait_for(known, what="the meta server is back")
    becomes(tickets, ROWS)


def test_texts_expire_by_themselves(tickets: KeepingFronts) -> None:
    tickets.rows("CREATE KV INDEX tickets_kv ON tickets (body) WITH (ttl = '2 s', tier = memory)")
    seen = "SELECT documents, indexed, removed FROM tierkv.kv_indexes"
    wait_for(lambda: tickets.rows(seen) == [(0, 0, ROWS)], what="all texts have expired")
    tickets.rows("UPDATE tickets SET body = 'A new text' || repeat(' came', 30) WHERE id = 1")
    wait_for(lambda: tickets.rows(seen) == [(0, 0, 1)], what="the new text has expired")
    pins = "SELECT count(*) FROM tierkv.pins"
    wait_for(lambda: tickets.rows(pins) == [(0,)], what="no pin is left")


def test_another_front_goes_on_when_the_one_that_listens_is_killed(
    tickets: KeepingFronts,
) -> None:
    tickets.rows("CREATE KV INDEX tickets_kv ON tickets (body)")
    becomes(tickets, ROWS)
    before = tickets.keeper_pid()
    assert before
    tickets.kill("front-a")
    with psycopg.connect(tickets.dsn, autocommit=True) as direct:
        direct.execute("DELETE FROM tickets WHERE id <= 10")
    becomes(tickets, ROWS - 10)
    tickets.start("front-a")
    tickets.kill("front-b")
    with psycopg.connect(tickets.dsn, autocommit=True) as direct:
        direct.execute("DELETE FROM tickets WHERE id <= 12")
    becomes(tickets, ROWS - 12)
    tickets.start("front-b")


def test_partitions_written_by_name_wake_the_index(tickets: KeepingFronts) -> None:
    for text in (
        "CREATE TABLE moved (id int, body text) PARTITION BY RANGE (id)",
        "CREATE TABLE moved_low PARTITION OF moved FOR VALUES FROM (0) TO (100)",
        "CREATE KV INDEX tickets_kv ON moved (body)",
        "CREATE TABLE moved_high PARTITION OF moved FOR VALUES FROM (100) TO (200)",
        "INSERT INTO moved_high VALUES (150, 'in a partition')",
    ):
        tickets.rows(text)
    becomes(tickets, 1, "moved")


def test_a_user_without_privileges_gets_an_index_that_is_refreshed_by_hand(
    tickets: KeepingFronts,
) -> None:
    with tickets.session() as connection:
        connection.execute("CREATE ROLE reader")
        connection.execute("GRANT SELECT ON tickets TO reader")
        connection.execute("SET ROLE reader")
        notices: list[str] = []
        connection.add_notice_handler(lambda told: notices.append(told.message_primary or ""))
        connection.execute("CREATE KV INDEX read_kv ON tickets (body) WITH (background = off)")
        assert any("reader has no privilege TRIGGER on tickets" in told for told in notices)
        with pytest.raises(psycopg.errors.FeatureNotSupported, match="no privilege TRIGGER"):
            connection.execute("CREATE KV INDEX b ON tickets (body) WITH (refresh = 'on change')")
        connection.execute("DROP KV INDEX read_kv")
        connection.execute("RESET ROLE")
        connection.execute("GRANT TRIGGER ON tickets TO reader")
        connection.execute("SET ROLE reader")
        connection.execute("CREATE KV INDEX read_kv ON tickets (body)")
        wait_for(lambda: tickets.index()[:2] == ("fresh", ROWS), what="built as reader")
        notices.clear()
        connection.execute("DROP KV INDEX read_kv")
        assert any("the owner of tickets may drop its triggers" in told for told in notices)
        connection.execute("RESET ROLE")
        connection.execute("DROP OWNED BY reader")
        connection.execute("DROP ROLE reader")


def test_an_ai_table_is_refreshed_by_the_clock(tickets: KeepingFronts) -> None:
    asked = "ai_generate(body, options => '{\"max_tokens\": 2}') AS said"
    tickets.rows(
        f"CREATE AI TABLE told AS SELECT id, {asked} FROM tickets WHERE id <= 5 "
        "WITH (key = id, refresh = '1 second')"
    )
    assert tickets.rows("SELECT count(*) FROM told") == [(5,)]
    with psycopg.connect(tickets.dsn, autocommit=True) as direct:
        direct.execute("DELETE FROM tickets WHERE id = 3")
    wait_for(lambda: tickets.rows("SELECT count(*) FROM told") == [(4,)], what="a refresh")
    tickets.rows("ALTER AI TABLE told SUSPEND")
    tickets.rows("DROP AI TABLE told")


TRIGGERS = "SELECT count(*) FROM pg_trigger WHERE tgname LIKE 'tierkv%'"


def test_an_ai_table_follows_committed_writes(tickets: KeepingFronts) -> None:
    query = (
        "SELECT t.id, kind, ai_generate(body, options => '{\"max_tokens\": 2}') AS said "
        "FROM tickets t JOIN moved USING (id)"
    )

    def becomes_right(what: str) -> None:
        def is_right() -> bool:
            return sorted(tickets.rows("SELECT * FROM told")) == sorted(tickets.rows(query))

        wait_for(is_right, what=what)

    tickets.rows("CREATE TABLE moved AS SELECT id, 'plain' AS kind FROM tickets WHERE id <= 6")
    tickets.rows(f"CREATE AI TABLE told AS {query} WITH (key = 't.id', refresh = 'on change')")
    shown = "SELECT refresh_s, state FROM tierkv.ai_tables"
    assert tickets.rows(shown) == [(-1.0, "fresh")] and tickets.rows(TRIGGERS) == [(4,)]
    tickets.rows("UPDATE tickets SET body = 'by a client of the front' WHERE id = 2")
    becomes_right("a write through a front")
    with psycopg.connect(tickets.dsn, autocommit=True) as direct:
        direct.execute("UPDATE moved SET kind = 'other' WHERE id = 3")
        becomes_right("a write behind the front, to the joined table")
        direct.execute("BEGIN")
        direct.execute("DELETE FROM tickets WHERE id = 4")
        direct.execute("COMMIT")
        becomes_right("a committed transaction")
        tickets.rows("ALTER AI TABLE told SUSPEND")
        direct.execute("UPDATE tickets SET body = 'suspended' WHERE id = 1")
        tickets.rows("ALTER AI TABLE told RESUME")
        becomes_right("what was written before RESUME")
        tickets.rows("ALTER AI TABLE told SET (refresh = manual)")
        assert tickets.rows(TRIGGERS) == [(0,)]
        tickets.rows("ALTER AI TABLE told SET (refresh = 'on change')")
        assert tickets.rows(TRIGGERS) == [(4,)]
        listening = "front-b" if tickets.keeper_pid() == 0 else "front-a"
        tickets.kill(listening)
        direct.execute("DELETE FROM moved WHERE id = 5")
        becomes_right("a write while no front, or the other one, listens")
        tickets.start(listening)
    tickets.rows("DROP AI TABLE told")
    assert tickets.rows(TRIGGERS) == [(0,)]


def test_an_ai_table_of_a_view_is_refreshed_by_hand(tickets: KeepingFronts) -> None:
    with tickets.session() as connection:
        notices: list[str] = []
        connection.add_notice_handler(lambda told: notices.append(told.message_primary or ""))
        connection.execute("CREATE VIEW moved_view AS SELECT * FROM tickets WHERE id < 3")
        connection.execute(
            "CREATE AI TABLE told AS SELECT v.id, ai_generate(v.body) FROM tickets "
            "JOIN moved_view v USING (id) WITH (key = 'v.id', refresh = 'on change')"
        )
        assert notices[0].endswith("moved_view is no table, so it has no triggers")
        assert tickets.rows(TRIGGERS) == [(0,)], "those of tickets are gone, too"
        connection.execute("CREATE TEMP TABLE passing AS SELECT 1 AS id, 'once' AS body")
        connection.execute(
            "CREATE AI TABLE passed AS SELECT id, ai_generate(body) FROM passing "
            "WITH (key = id, refresh = 'on change')"
        )
        assert any("passing is a temporary table" in notice for notice in notices)
        connection.execute("DROP AI TABLE passed")
        connection.execute("DROP AI TABLE told")
        connection.execute("DROP VIEW moved_view")


def test_an_owner_that_can_not_log_in_is_told(tickets: KeepingFronts) -> None:
    with tickets.session() as connection:
        connection.execute("CREATE ROLE owner_kv LOGIN PASSWORD 'another password'")
        connection.execute("GRANT ALL ON SCHEMA public TO owner_kv")
    with psycopg.connect(
        host="127.0.0.1", port=tickets.ports["front-a"], user="owner_kv", dbname=DATABASE,
        password="another password", autocommit=True,
    ) as owner:  # fmt: skip
        owner.execute("CREATE TABLE own (body text)")
        owner.execute("CREATE KV INDEX own_kv ON own (body) WITH (background = off)")
        owner.execute("INSERT INTO own VALUES ('unheard of')")
        seen = "SELECT state, last_error FROM tierkv.kv_indexes"
        failed = "password authentication failed"
        wait_for(lambda: failed in str(owner.execute(seen).fetchone()), what="the error is shown")
        row = owner.execute(seen).fetchone()
        assert row is not None and row[0] == "stale" and row[1].startswith("28")
        owner.execute("REFRESH KV INDEX own_kv")
        assert owner.execute(seen).fetchone() == ("fresh", None)
        owner.execute("DROP KV INDEX own_kv")
        owner.execute("DROP TABLE own")
    with tickets.session() as connection:
        connection.execute("DROP OWNED BY owner_kv")
        connection.execute("DROP ROLE owner_kv")
