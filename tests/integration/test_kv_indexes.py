"""KV indexes through both doors: what is indexed, freed, refused; with one model behind."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from hashlib import md5
from pathlib import Path
from typing import Any

import duckdb
import psycopg
import pytest

from tests.fix_cluster import Cluster, wait_for
from tests.fix_jobs import ROWS, Door, Running
from tests.fix_pgwire import running_pgwire
from tests.fix_sql import InstantGenerator, make_model
from tierkv.dbfront.databases.duckdb_engine import DuckDbConfig
from tierkv.dbfront.statement.server import DuckDbSqlServer
from tierkv.kvcore import limits
from tierkv.kvcore.call_options import TOO_SHORT, KvAction
from tierkv.kvcore.errors import ContextTooLongError
from tierkv.sql.jobs.job_tables import MAKE_TABLES

MADE = "CREATE KV INDEX docs_kv ON docs (body) WITH (background = off)"


def steered(door: Door) -> list[tuple[KvAction, str]]:
    """Return what was asked about which text since the last call."""
    asked = [
        (call.steering.action, call.messages[-1].content)
        for call in door.generator.calls
        if call.steering is not None
        and call.messages is not None
        and call.steering.action is not KvAction.LOCATE
    ]
    door.generator.calls.clear()
    return sorted(asked)


def index_row(door: Door) -> tuple[Any, ...]:
    rows = door.rows("SELECT state, documents, failed, indexed, removed FROM tierkv.kv_indexes")
    return rows[0] if rows else ()


def test_documents_are_indexed_once_and_freed_with_their_last_row(door: Door) -> None:
    with door.session() as connection:
        connection.execute("INSERT INTO docs VALUES (900, 'text 1'), (901, NULL), (902, '')")
        connection.execute(MADE)
        texts = sorted(f"text {number}" for number in range(1, ROWS + 1))
        assert steered(door) == [(KvAction.WARM, text) for text in texts]
        assert index_row(door) == ("fresh", ROWS, 0, ROWS, 0)
        connection.execute("DELETE FROM docs WHERE id = 1")
        connection.execute("UPDATE docs SET body = 'other' WHERE id IN (2, 3)")
        connection.execute("REFRESH KV INDEX docs_kv")
        assert steered(door) == [
            (KvAction.FORGET, "text 2"), (KvAction.FORGET, "text 3"), (KvAction.WARM, "other"),
        ], "row 900 still has text 1"  # fmt: skip
        assert index_row(door) == ("fresh", ROWS - 1, 0, 1, 2)
        connection.execute("REFRESH KV INDEX docs_kv")
        assert steered(door) == []
        connection.execute("DROP KV INDEX docs_kv")
        assert len(steered(door)) == ROWS - 1 and index_row(door) == ()


def test_the_bytes_of_an_index_are_told_by_tier(door: Door) -> None:
    bytes_of = "SELECT l1_bytes, memory_bytes, disk_bytes FROM tierkv.kv_indexes"
    with door.session() as connection:
        connection.execute("DELETE FROM docs WHERE id > 9")
        connection.execute(MADE)
        steered(door)
        memory = 10 * 9 * len("text 1")
        assert [door.rows(bytes_of) for _ in range(3)] == [[(0, memory, 1)]] * 3
        assert len(door.generator.calls) == 10, "once for all looks"
        options = connection.execute("SELECT options FROM tierkv_jobs.kv_indexes").fetchone()
        old = json.loads(options[0]) if options else {}
        assert old.pop("tenant") == connection.info.user
        connection.execute("UPDATE tierkv_jobs.kv_indexes SET options = %s", (json.dumps(old),))
        assert door.rows(bytes_of) == [(None, None, None)], "of an older release"
        connection.execute("DROP KV INDEX docs_kv")
        assert steered(door) == [(KvAction.FORGET, f"text {number}") for number in range(1, 10)]


def test_documents_come_in_another_order_than_samples_have(door: Door) -> None:
    with door.session() as connection:
        connection.execute(MADE.replace("(background", "(batch = 1, background"))
        warmed = [call.messages[-1].content for call in door.generator.calls if call.messages]
        connection.execute("DROP KV INDEX docs_kv")
    digests = [md5(text.encode(), usedforsecurity=False).hexdigest() for text in warmed]
    assert len(digests) == ROWS and digests == sorted(digests, key=lambda digest: digest[::-1])


def test_stale_rows_are_what_an_index_has_not_caught_up_with(door: Door) -> None:
    stale = "SELECT stale_rows FROM tierkv.kv_indexes"
    is_counted = "password" not in door.dsn  # Behind PostgreSQL only a keeper hears of writes.
    with door.session() as connection:

        def becomes(rows: int | None) -> None:
            assert door.rows(stale) == [(rows if is_counted else None,)]

        door.hold()
        building = Running(door, MADE)
        asyncio.run_coroutine_threadsafe(door.generator.started.wait(), door.loop).result(20)
        assert door.rows(stale) == [(ROWS,)], "left to do"
        door.release()
        building.join()
        becomes(0)
        connection.execute("INSERT INTO docs VALUES (1000, 'w')")
        door.hold()
        refreshing = Running(door, "REFRESH KV INDEX docs_kv")
        asyncio.run_coroutine_threadsafe(door.generator.started.wait(), door.loop).result(20)
        assert door.rows(stale) == [(1,)], "left to do, not written and left"
        door.release()
        refreshing.join()
        becomes(0)
        connection.execute("DELETE FROM docs WHERE id < 4")
        connection.execute("INSERT INTO docs VALUES (1001, 'x'), (1002, 'y')")
        becomes(5)
        connection.execute("BEGIN")
        connection.execute("UPDATE docs SET body = 'z'")
        connection.execute("ROLLBACK")
        becomes(5)
        with connection.cursor().copy("COPY docs FROM STDIN") as copy:
            copy.write_row((2000, "copied"))
        becomes(6)
        connection.execute("CREATE TABLE made AS SELECT * FROM docs")
        connection.execute("TRUNCATE docs")
        becomes(None)
        connection.execute("REFRESH KV INDEX docs_kv")
        becomes(0)
        connection.execute("DROP KV INDEX docs_kv")
        connection.execute("DROP TABLE made")


def test_texts_expire_and_are_warmed_again_when_they_come_back(door: Door) -> None:
    aged = "UPDATE tierkv_jobs.kv_index_times SET indexed_s = indexed_s - 100000 WHERE digest = "
    with door.session() as connection:
        connection.execute(MADE.replace("= off", "= off, ttl = '1 day'"))
        assert door.rows("SELECT tier, ttl_s FROM tierkv.kv_indexes") == [("pool", 86_400.0)]
        steered(door)
        for number in (1, 2):
            connection.execute(f"{aged}md5('text {number}')".encode())
        connection.execute("REFRESH KV INDEX docs_kv")
        assert steered(door) == [(KvAction.FORGET, "text 1"), (KvAction.FORGET, "text 2")]
        assert index_row(door) == ("fresh", ROWS - 2, 0, 0, 2)
        connection.execute("REFRESH KV INDEX docs_kv")
        assert steered(door) == [], "their rows are still there"
        connection.execute("DELETE FROM docs WHERE id IN (1, 3)")
        connection.execute("REFRESH KV INDEX docs_kv")
        assert steered(door) == [(KvAction.FORGET, "text 3")]
        connection.execute("INSERT INTO docs VALUES (1, 'text 1')")
        connection.execute("REFRESH KV INDEX docs_kv")
        assert steered(door) == [(KvAction.WARM, "text 1")], "anew"
        connection.execute("DROP KV INDEX docs_kv")
        assert len(steered(door)) == ROWS - 2
        assert door.rows("SELECT count(*) FROM tierkv_jobs.kv_index_times") == [(0,)]


def test_texts_stay_in_memory_for_as_long_as_the_index_exists(door: Door) -> None:
    aged = "UPDATE tierkv_jobs.kv_index_times SET pinned_s = pinned_s - 20000000 WHERE digest = "
    in_memory = MADE.replace("= off", "= off, tier = memory")
    with door.session() as connection:
        connection.execute("DELETE FROM docs WHERE id > 5")
        connection.execute(in_memory)
        kept = {c.steering.keep_s for c in door.generator.calls if c.steering}
        assert kept == {limits.MAX_PIN_S}
        assert steered(door) == [(KvAction.PIN, f"text {number}") for number in range(1, 6)]
        connection.execute(f"{aged}md5('text 2')".encode())
        connection.execute("REFRESH KV INDEX docs_kv")
        assert steered(door) == [(KvAction.PIN, "text 2")], "before the pin ends"
        connection.execute("REFRESH KV INDEX docs_kv")
        assert steered(door) == []
        connection.execute("DROP KV INDEX docs_kv")
        assert {action for action, _ in steered(door)} == {KvAction.FORGET}
        short = {"outcome": "rejected", "tokens": 0, "reason": TOO_SHORT}
        full = {"outcome": "rejected", "tokens": 0, "reason": "9 bytes exceed what is left: 8"}
        door.generator.texts = {"text 3": json.dumps(short), "text 4": json.dumps(full)}
        with pytest.raises(psycopg.errors.DiskFull, match="can't stay in memory: 9 bytes"):
            connection.execute(in_memory)
        assert index_row(door)[0] == "stale"
        undone = [text for action, text in steered(door) if action is KvAction.FORGET]
        assert undone == [f"text {number}" for number in range(1, 6)], "a drop would not know them"
        door.generator.texts = {"text 3": json.dumps(short)}
        connection.execute("REFRESH KV INDEX docs_kv")
        assert index_row(door)[:3] == ("fresh", 5, 0)
        connection.execute("DROP KV INDEX docs_kv")


def test_options_reach_the_calls(door: Door) -> None:
    with door.session() as connection:
        connection.execute("SET tierkv.system_prompt = 'Be brief.'")
        connection.execute(
            "CREATE KV INDEX docs_kv ON docs ('Doc ' || id || ': ' || body) USING MODEL tiny "
            "WITH (background = off, pin = '2 hours', batch = 7)"
        )
        calls = [call for call in door.generator.calls if call.steering is not None]
        assert len(calls) == ROWS and {call.model for call in calls} == {"tiny"}
        for call in calls:
            assert call.steering is not None and call.messages is not None
            assert (call.steering.action, call.steering.keep_s) == (KvAction.PIN, 7200.0)
            system, user = call.messages
            assert system.content == "Be brief." and user.content.startswith("Doc ")
        door.generator.calls.clear()
        connection.execute("DROP KV INDEX docs_kv")
        connection.execute(
            "CREATE KV INDEX docs_kv ON docs (body) "
            "WITH (kind = chunk, background = off, system_prompt = '')"
        )
        calls = [c for c in door.generator.calls if c.steering and c.steering.action == "warm"]
        assert sorted(call.documents[0] for call in calls)[0] == "text 1"
        connection.execute("DROP KV INDEX docs_kv")


def test_a_document_that_fails_has_its_error_and_the_others_are_indexed(door: Door) -> None:
    door.generator.failing["text 7"] = ContextTooLongError("the prompt is too long")
    with door.session() as connection:
        connection.execute(MADE)
        assert index_row(door) == ("fresh", ROWS - 1, 1, ROWS, 0)
        failures = door.rows("SELECT job, sqlstate, message FROM tierkv.job_failures")
        assert failures == [("docs_kv", "54000", "the prompt is too long")]
        connection.execute("UPDATE docs SET body = 'short' WHERE id = 7")
        connection.execute("REFRESH KV INDEX docs_kv")
        assert index_row(door) == ("fresh", ROWS, 0, 1, 1)
        connection.execute("DROP KV INDEX docs_kv")


def test_long_texts_and_a_table_that_goes(door: Door) -> None:
    with door.session() as connection:
        connection.execute("CREATE TABLE long_docs (body text)")
        connection.execute(
            "INSERT INTO long_docs SELECT repeat('it''s ' || i || '\\ ', 60000) "
            "FROM generate_series(1, 5) t(i)"
        )
        made = "CREATE KV INDEX long_kv ON long_docs (left(body, 500000)) WITH (background = off)"
        door.generator.served = (make_model(context_tokens=2_000_000),)
        connection.execute(made)
        assert len(steered(door)) == 5 and index_row(door)[:3] == ("fresh", 5, 0)
        connection.execute("DROP TABLE long_docs")
        connection.execute("REFRESH KV INDEX long_kv")
        assert {action for action, _ in steered(door)} == {KvAction.FORGET}
        assert index_row(door) == ()


REFUSED = {
    "CREATE KV INDEX unmade ON docs (boddy)": "42703",
    "CREATE KV INDEX unmade ON nobody (body)": "42P01",
    "CREATE KV INDEX unmade ON docs (body || random())": "42P17",
    "CREATE KV INDEX unmade ON docs (body || current_timestamp)": "42P17",
    "CREATE KV INDEX unmade ON docs (ai_generate(body))": "0A000",
    "CREATE KV INDEX unmade ON docs (body) WITH (kid = chunk)": "42601",
    "CREATE KV INDEX unmade ON docs (body) WITH (capacity = '1 GiB')": "42601",
    "CREATE KV INDEX unmade ON docs (body) WITH (ttl = 'long')": "22023",
    "CREATE KV INDEX unmade ON docs (body) WITH (tier = gpu)": "22023",
    "CREATE KV INDEX unmade ON docs (body) WITH (tier = disk)": "0A000",
    "CREATE KV INDEX unmade ON docs (body) WITH (tier = memory, pin = '1 h')": "22023",
    "CREATE KV INDEX unmade ON docs (body) WITH (kind = both)": "22023",
    "CREATE KV INDEX unmade ON docs (body) WITH (pin = 'long')": "22023",
    "CREATE KV INDEX unmade ON docs (id, body)": "42601",
    "CREATE KV INDEX unmade ON docs": "42601",
    "CREATE KV INDEX unmade ON docs ()": "42601",
    "CREATE KV INDEX ON docs (body)": "42601",
    "REFRESH KV INDEX nobody": "42704",
    "DROP KV INDEX nobody": "42704",
}


def test_what_can_not_be_an_index_is_refused(door: Door) -> None:
    with door.session() as connection:
        for text, sqlstate in REFUSED.items():
            with pytest.raises(psycopg.Error) as refused:
                connection.execute(text.encode())
            assert refused.value.sqlstate == sqlstate, text
        connection.execute("CREATE TEMP TABLE own_docs (body text)")
        with pytest.raises(psycopg.errors.FeatureNotSupported, match="temporary table"):
            connection.execute("CREATE KV INDEX unmade ON own_docs (body)")
        connection.execute("DROP TABLE own_docs")
        assert connection.execute("SELECT count(*) FROM tierkv.kv_indexes").fetchone() == (0,)
        connection.execute(MADE)
        with pytest.raises(psycopg.errors.DuplicateObject):
            connection.execute(MADE)
        connection.execute(MADE.replace("INDEX", "INDEX IF NOT EXISTS"))
        with pytest.raises(psycopg.errors.ActiveSqlTransaction), connection.transaction():
            connection.execute("REFRESH KV INDEX docs_kv")
        connection.execute("DROP KV INDEX docs_kv")
        connection.execute("DROP KV INDEX IF EXISTS docs_kv")


@pytest.mark.parametrize(
    ("statement", "tag", "work"),
    [
        (MADE, "CREATE KV INDEX", "refresh"),
        ("CREATE AI TABLE a AS SELECT ai_generate(body) FROM docs", "CREATE AI TABLE", "refresh"),
        (
            "CREATE AI JOB a AS INSERT INTO docs SELECT id, ai_generate(body) FROM docs",
            "CREATE AI JOB", "job",
        ),
    ],
)  # fmt: skip
def test_what_commits_batches_is_refused_inside_a_transaction(
    door: Door, statement: str, tag: str, work: str
) -> None:
    with door.session() as connection:
        connection.execute("BEGIN")
        with pytest.raises(psycopg.errors.ActiveSqlTransaction, match=tag) as refused:
            connection.execute(statement.encode())
        assert refused.value.diag.message_hint == f"A {work} commits each batch: COMMIT first."
        connection.execute("ROLLBACK")
        assert index_row(door) == ()


def test_without_a_keeper_an_index_is_refreshed_by_statements_and_says_so(door: Door) -> None:
    with door.session() as connection:
        with pytest.raises(psycopg.errors.FeatureNotSupported) as refused:
            connection.execute("CREATE KV INDEX d ON docs (body) WITH (refresh = 'on change')")
        assert "can't refresh by itself" in str(refused.value)
        notices: list[str] = []
        connection.add_notice_handler(lambda told: notices.append(told.message_primary or ""))
        connection.execute("CREATE KV INDEX docs_kv ON docs (body)")
        assert any("docs_kv does not refresh by itself: " in notice for notice in notices)
        connection.execute("DROP KV INDEX docs_kv")
        notices.clear()
        connection.execute("CREATE KV INDEX docs_kv ON docs (body) WITH (refresh = manual)")
        assert not any("by itself" in notice for notice in notices)
        connection.execute("DROP KV INDEX docs_kv")


def test_an_index_of_a_view_is_refreshed_by_statements(door: Door) -> None:
    with door.session() as connection:
        connection.execute("CREATE VIEW shown AS SELECT body FROM docs WHERE id < 4")
        connection.execute("CREATE KV INDEX docs_kv ON shown (body) WITH (background = off)")
        assert index_row(door) == ("fresh", 3, 0, 3, 0)
        connection.execute("DROP KV INDEX docs_kv")
        connection.execute("DROP VIEW shown")


def test_a_renamed_table_keeps_its_index_on_the_embedded_door(door: Door) -> None:
    if "password" in door.dsn:
        pytest.skip("behind PostgreSQL the trigger tells the name: test_postgres_keepers.py")
    with door.session() as connection:
        connection.execute(MADE)
        door.generator.calls.clear()
        connection.execute("ALTER TABLE docs RENAME TO papers")
        connection.execute("DELETE FROM papers WHERE id = 1")
        connection.execute("REFRESH KV INDEX docs_kv")
        assert steered(door) == [(KvAction.FORGET, "text 1")]
        source = "SELECT source, state FROM tierkv.kv_indexes"
        assert door.rows(source) == [('"main"."papers"', "fresh")]
        connection.execute("DROP TABLE papers")
        connection.execute("CREATE TABLE papers (body text)")
        connection.execute("DROP TABLE papers")
        connection.execute("REFRESH KV INDEX docs_kv")
        assert index_row(door) == ()


def test_a_database_of_an_older_release_gets_the_new_tables(
    tmp_path: Path, generator: InstantGenerator
) -> None:
    path = str(tmp_path / "old.duckdb")
    with duckdb.connect(path) as old:
        for text in MAKE_TABLES:
            if "kv_index" not in text:
                old.execute(text)
        old.execute("INSERT INTO tierkv_jobs.failures VALUES ('', 'j', 1, 'k', '22000', 'no', 1)")
    sql = DuckDbSqlServer(DuckDbConfig(path, threads=1), generator)
    with running_pgwire(lambda: sql) as running, psycopg.connect(running.dsn) as connection:
        for view, rows in (("job_failures", 1), ("kv_indexes", 0)):
            found = connection.execute(f"SELECT count(*) FROM tierkv.{view}".encode()).fetchone()
            assert found == (rows,)


@pytest.mark.timeout(240)
def test_an_index_follows_committed_writes_and_survives_its_front(
    start_cluster: Callable[..., Cluster],
) -> None:
    cluster = start_cluster("--set", "compute.load_policy=always")
    dsn = f"host=127.0.0.1 port={cluster.pg_port} user=tierkv dbname=main"

    def state() -> tuple[Any, ...]:
        try:
            rows = cluster.query("SELECT state, documents, removed FROM tierkv.kv_indexes")
        except psycopg.Error:
            return ()
        return rows[0] if rows else ()

    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("CREATE TABLE docs (id int, body text)")
        connection.execute(
            "INSERT INTO docs SELECT i, 'Ticket ' || i || repeat(' is late', 40) "
            "FROM generate_series(1, 300) t(i)"
        )
        connection.execute("CREATE KV INDEX docs_kv ON docs (body) WITH (batch = 10)")
    wait_for(lambda: 10 <= (*state(), 0, 0)[1] < 290, what="it is being built")
    cluster.kill("front")
    wait_for(lambda: state()[:2] == ("fresh", 300), what="the next front has built it")
    with psycopg.connect(dsn, autocommit=True) as connection:
        asked = "ai_generate_detail(body || ' Why?', options => '{\"max_tokens\": 1}')"
        detail = f"SELECT (d).cached_tokens, (d).prompt_tokens FROM (SELECT {asked} d"
        row = connection.execute(f"{detail} FROM docs WHERE id = 9) t".encode()).fetchone()
        assert row is not None and row[0] > 0.8 * row[1]
        explain = "EXPLAIN ANALYZE SELECT ai_generate(body || '?') FROM docs LIMIT 2"
        assert "kv index docs_kv: " in str(connection.execute(explain).fetchall())
        used = "SELECT calls, hit_tokens, saved_s > 0 FROM tierkv.kv_indexes"
        calls, hit_tokens, has_saved = connection.execute(used.encode()).fetchone() or ()
        assert (calls, has_saved) == (3, True) and row[0] < hit_tokens < 4 * row[0]
        by_tier = "SELECT l1_bytes, memory_bytes, disk_bytes FROM tierkv.kv_indexes"
        sizes = connection.execute(by_tier.encode()).fetchone() or ()
        whole = "SELECT sum(bytes) FROM tierkv.kvcache_blocks WHERE tier = 'L2'"
        stored = int(cluster.query(whole)[0][0])
        assert 0.8 * stored < sizes[1] < 1.2 * stored and sizes[2] == 0, (sizes, stored)
        connection.execute("INSERT INTO docs VALUES (1000, 'a new one')")
        wait_for(lambda: state()[1] == 301, what="the new document is indexed")
        connection.execute("BEGIN")
        connection.execute("DELETE FROM docs WHERE id < 11")
        connection.execute("ROLLBACK")
        connection.execute("UPDATE docs SET body = 'changed' WHERE id IN (20, 21)")
        wait_for(lambda: state()[:2] == ("fresh", 300), what="two are freed, one is new")
        with connection.cursor() as cursor, cursor.copy("COPY docs FROM STDIN") as copy:
            copy.write_row((2000, "copied"))
        wait_for(lambda: state()[1] == 301, what="a copied document is indexed")
        connection.execute("DROP KV INDEX docs_kv")
        left = "SELECT * FROM tierkv.kvcache_blocks"
        wait_for(lambda: not cluster.query(left), what="no block is left")


@pytest.mark.timeout(240)
def test_texts_stay_in_memory_until_they_expire_and_answers_stay_the_same(
    start_cluster: Callable[..., Cluster],
) -> None:
    cluster = start_cluster("--set", "compute.load_policy=always")
    dsn = f"host=127.0.0.1 port={cluster.pg_port} user=tierkv dbname=main"
    asked = (
        b"SELECT id, ai_generate(body || ' Why?', options => '{\"max_tokens\": 6}') FROM docs "
        b"ORDER BY id"
    )
    state = "SELECT state, documents, stale_rows, disk_bytes FROM tierkv.kv_indexes"
    pinned = "SELECT count(*), min(seconds_left) > 30000000 FROM tierkv.pins"
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("CREATE TABLE docs (id int, body text)")
        connection.execute(
            "INSERT INTO docs SELECT i, 'Ticket ' || i || repeat(' is late', 40) "
            "FROM generate_series(1, 12) t(i)"
        )
        connection.execute("SET tierkv.cache = off")
        plain = connection.execute(asked).fetchall()
        connection.execute("RESET tierkv.cache")
        connection.execute("CREATE KV INDEX docs_kv ON docs (body) WITH (tier = memory)")
        wait_for(lambda: cluster.query(state) == [("fresh", 12, 0, 0)], what="it is built")
        assert cluster.query(pinned) == [(12, True)]
        assert connection.execute(asked).fetchall() == plain
        connection.execute("DROP KV INDEX docs_kv")
        assert cluster.query("SELECT count(*) FROM tierkv.pins") == [(0,)]
        connection.execute("CREATE KV INDEX docs_kv ON docs (body) WITH (ttl = '2 s')")
        seen = "SELECT documents, indexed, removed FROM tierkv.kv_indexes"
        wait_for(lambda: cluster.query(seen) == [(0, 0, 12)], what="all texts have expired")
        left = "SELECT * FROM tierkv.kvcache_blocks"
        wait_for(lambda: not cluster.query(left), what="no block is left")
        assert connection.execute(asked).fetchall() == plain
        connection.execute("INSERT INTO docs VALUES (13, 'a new one' || repeat(' comes', 40))")
        wait_for(lambda: cluster.query(seen) == [(0, 0, 1)], what="a new text has expired, too")
        connection.execute("DROP KV INDEX docs_kv")
