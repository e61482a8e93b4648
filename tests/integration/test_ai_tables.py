"""AI tables through psycopg, over the embedded database and over a real PostgreSQL."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from tests.fix_cluster import Cluster, wait_for
from tests.fix_jobs import ROWS, Door, Running
from tierkv.kvcore.errors import NoNodeError, RowLevelError

pytestmark = pytest.mark.integration

QUERY = "SELECT id, ai_generate('say ' || body) AS answer FROM docs WHERE id % 3 <> 0"
MADE = f"CREATE AI TABLE made AS {QUERY} WITH (key = id, batch = 10)"


def rows_of(door: Door, sql: str) -> list[tuple[Any, ...]]:
    return sorted(door.rows(sql))


def test_only_rows_that_changed_are_asked_about(door: Door) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    with door.session() as connection:
        told: list[str] = []
        connection.add_notice_handler(lambda notice: told.append(str(notice.message_primary)))
        assert connection.execute(MADE).statusmessage == "CREATE AI TABLE"
        assert told[-1] == "AI table made: 40 rows asked about, 0 removed"
        assert rows_of(door, "SELECT * FROM made") == rows_of(door, QUERY)
        for number in range(4):
            changed = rng.sample(range(1, ROWS + 1), 5)
            listed = ", ".join(map(str, changed))
            connection.execute(
                f"UPDATE docs SET body = 'new {number} ' || id WHERE id IN ({listed})"
            )
            connection.execute(f"DELETE FROM docs WHERE id = {rng.randrange(1, ROWS)}")
            connection.execute(f"INSERT INTO docs VALUES ({1000 + number}, 'more {number}')")
            before = set(door.generator.prompts)
            expected_rows = rows_of(door, "SELECT id, body FROM docs WHERE id % 3 <> 0")
            door.generator.prompts.clear()
            connection.execute("REFRESH AI TABLE made")
            asked = set(door.generator.prompts)
            assert asked <= {f"say {body}" for _, body in expected_rows} - before
            assert len(asked) <= 6
            assert rows_of(door, "SELECT * FROM made") == rows_of(door, QUERY)
        door.generator.prompts.clear()
        connection.execute("REFRESH AI TABLE made")
        assert door.generator.prompts == [] and told[-1].endswith("0 rows asked about, 0 removed")
    state = door.rows("SELECT name, state, failed, asked, last_error FROM tierkv.ai_tables")
    assert state == [("made", "fresh", 0, 0, None)]
    with door.session() as connection:
        connection.execute("DROP AI TABLE made")
        connection.execute("DROP AI TABLE IF EXISTS made")
    assert door.rows("SELECT * FROM tierkv.ai_tables") == []


def test_a_row_that_fails_is_told_and_asked_about_when_it_changes(door: Door) -> None:
    door.generator.failing["text 8"] = RowLevelError("no answer")
    door.generator.failing["text 20"] = [NoNodeError("away")]
    with door.session() as connection:
        connection.execute(MADE)
        assert 8 not in [row[0] for row in door.rows("SELECT id FROM made")]
        assert door.rows("SELECT job, key, sqlstate, message FROM tierkv.job_failures") == [
            ("made", "8", "22000", "no answer")
        ]
        door.generator.prompts.clear()
        connection.execute("REFRESH AI TABLE made")
        assert door.generator.prompts == []
        connection.execute("UPDATE docs SET body = 'better' WHERE id = 8")
        connection.execute("REFRESH AI TABLE made")
        assert rows_of(door, "SELECT * FROM made") == rows_of(door, QUERY)
        assert door.rows("SELECT * FROM tierkv.job_failures") == []
        connection.execute("DROP AI TABLE made")


def test_a_refresh_that_is_cancelled_leaves_right_rows(door: Door) -> None:
    door.hold()
    running = Running(door, MADE)
    wait_for(door.generator.started.is_set, what="the first call")
    with pytest.raises(psycopg.errors.ObjectInUse):
        door.rows("REFRESH AI TABLE made")
    running.connection.cancel_safe()
    running.join()
    assert isinstance(running.error, psycopg.errors.QueryCanceled)
    door.release()
    assert door.rows("SELECT state FROM tierkv.ai_tables") == [("stale",)]
    with door.session() as connection:
        connection.execute("REFRESH AI TABLE made")
        assert rows_of(door, "SELECT * FROM made") == rows_of(door, QUERY)
        connection.execute("DROP AI TABLE made")


REFUSED = {
    "CREATE AI TABLE unmade AS SELECT ai_generate(body) FROM docs WITH (key = id)": "42601",
    f"CREATE AI TABLE unmade AS {QUERY}": "42601",
    f"CREATE AI TABLE unmade AS {QUERY} WITH (key = id, refresh = 'soon')": "22023",
    f"CREATE AI TABLE unmade AS {QUERY} WITH (key = id, refesh = manual)": "42601",
    "CREATE AI TABLE unmade AS INSERT INTO docs SELECT 1": "42601",
    "CREATE AI TABLE unmade AS SELECT DISTINCT id FROM docs WITH (key = id)": "0A000",
    "CREATE AI TABLE unmade AS SELECT id, body FROM docs WITH (key = 'id % 2')": "23505",
    "CREATE AI TABLE docs AS SELECT id, body FROM docs WITH (key = id)": "42P07",
    "REFRESH AI TABLE nobody": "42P01",
    "ALTER AI TABLE nobody SUSPEND": "42P01",
    "DROP AI TABLE nobody": "42P01",
}


def test_what_can_not_be_an_ai_table_is_refused(door: Door) -> None:
    with door.session() as connection:
        for text, sqlstate in REFUSED.items():
            with pytest.raises(psycopg.Error) as refused:
                connection.execute(text)
            assert refused.value.sqlstate == sqlstate, text
        assert connection.execute("SELECT count(*) FROM tierkv.ai_tables").fetchone() == (0,)
        connection.execute(MADE)
        connection.execute("ALTER AI TABLE made SUSPEND")
        period = "ALTER AI TABLE made SET (refresh = '1 minute')"
        if "password" in door.dsn:
            with pytest.raises(psycopg.errors.FeatureNotSupported, match="queue_door is not set"):
                connection.execute(period.encode())
        else:
            connection.execute(period.encode())
        row = connection.execute("SELECT suspended, refresh_s FROM tierkv.ai_tables").fetchone()
        assert row == (True, 0.0 if "password" in door.dsn else 60.0)
        connection.execute("ALTER AI TABLE made RESUME")
        connection.execute("DROP TABLE made")
        with pytest.raises(psycopg.errors.UndefinedTable):
            connection.execute("REFRESH AI TABLE made")
            connection.execute("UPDATE docs SET body = 'x'")
            connection.execute("REFRESH AI TABLE made")
        connection.execute("DROP AI TABLE made")


def test_without_a_keeper_a_table_that_was_to_follow_changes_says_so(door: Door) -> None:
    with door.session() as connection:
        told: list[str] = []
        connection.add_notice_handler(lambda notice: told.append(str(notice.message_primary)))
        connection.execute(MADE.replace("batch = 10", "refresh = 'on change'"))
        why = "front.queue_door is not set" if "password" in door.dsn else "no front has this"
        assert told[0].startswith("AI table made does not refresh by itself: ") and why in told[0]
        assert told[1] == "AI table made: 40 rows asked about, 0 removed"
        refresh_s = "SELECT refresh_s FROM tierkv.ai_tables"
        assert connection.execute(refresh_s).fetchone() == (0.0,)
        told.clear()
        connection.execute("ALTER AI TABLE made SET (refresh = 'on change')")
        assert len(told) == 1 and why in told[0]
        assert connection.execute(refresh_s).fetchone() == (0.0,)
        connection.execute("DROP AI TABLE made")


LENGTH = "options => '{\"max_tokens\": 3}'"
FOLLOWED = (
    f'SELECT d.id, kind, ai_generate(body, {LENGTH}) AS answer FROM docs d JOIN "Kinds" USING (id) '
    "WHERE d.id NOT IN (SELECT id FROM hidden)"
)
FOLLOWING = f"CREATE AI TABLE made AS {FOLLOWED} WITH (key = 'd.id', refresh = 'on change')"


def test_a_table_follows_committed_writes(start_cluster: Callable[..., Cluster]) -> None:
    cluster = start_cluster()
    dsn = f"host=127.0.0.1 port={cluster.pg_port} user=tierkv dbname=main"

    def becomes_right(connection: psycopg.Connection[Any], what: str) -> None:
        def is_right() -> bool:
            kept, wanted = (
                sorted(connection.execute(text.encode()).fetchall())
                for text in ("SELECT * FROM made", FOLLOWED)
            )
            return kept == wanted

        wait_for(is_right, what=what)

    with psycopg.connect(dsn, autocommit=True) as connection:
        for text in (
            "CREATE TABLE docs (id int, body text)",
            "INSERT INTO docs SELECT i, 'text ' || i FROM range(1, 9) t(i)",
            "CREATE TABLE \"Kinds\" AS SELECT id, 'plain' AS kind FROM docs",
            "CREATE TABLE hidden (id int)",
            "CREATE VIEW shown AS SELECT * FROM docs",
            FOLLOWING,
        ):
            connection.execute(text.encode())
        shown = connection.execute("SELECT refresh_s, state FROM tierkv.ai_tables").fetchone()
        assert shown == (-1.0, "fresh")
        connection.execute("UPDATE docs SET body = body || '!' WHERE id = 2")
        becomes_right(connection, "a changed row")
        connection.execute("DELETE FROM docs WHERE id = 3")
        connection.execute("UPDATE Kinds SET kind = 'other' WHERE id = 4")
        becomes_right(connection, "a row of the joined table, and one that is gone")
        with connection.transaction():
            connection.execute("INSERT INTO hidden VALUES (5)")
        becomes_right(connection, "a row that is hidden by a transaction")
        with connection.cursor() as cursor, cursor.copy("COPY docs FROM STDIN") as copy:
            copy.write_row((7, "copied"))
            copy.write_row((8, "copied"))
        connection.execute("DELETE FROM docs WHERE id IN (7, 8) AND body <> 'copied'")
        becomes_right(connection, "copied rows")
        with psycopg.connect(dsn) as earlier:  # It writes before the table is made.
            connection.execute("DROP AI TABLE made")
            earlier.execute("UPDATE docs SET body = 'an earlier one' WHERE id = 1")
            connection.execute(FOLLOWING.encode())
            earlier.commit()
        becomes_right(connection, "what was written before CREATE and committed afterwards")
        connection.execute("ALTER AI TABLE made SUSPEND")
        connection.execute("UPDATE docs SET body = 'suspended' WHERE id = 1")
        connection.execute(
            "CREATE AI TABLE first AS SELECT id, ai_generate(body) AS said "
            "FROM docs WHERE id = 1 WITH (key = id, refresh = 'on change')"
        )
        before = connection.execute("SELECT answer FROM made WHERE id = 1").fetchone()
        connection.execute("UPDATE docs SET body = 'once more' WHERE id = 1")
        first = "SELECT said = ai_generate('once more') FROM first"
        wait_for(lambda: connection.execute(first).fetchone() == (True,), what="the other table")
        assert connection.execute("SELECT answer FROM made WHERE id = 1").fetchone() == before
        connection.execute("ALTER AI TABLE made RESUME")
        becomes_right(connection, "what was written before RESUME")
        connection.execute("DROP AI TABLE first")
        connection.execute("UPDATE docs SET body = 'by hand' WHERE id = 1")
        connection.execute("REFRESH AI TABLE made")
        becomes_right(connection, "a refresh by hand")
        connection.execute("UPDATE docs SET body = 'at the very end' WHERE id = 6")
    cluster.kill("front")
    with psycopg.connect(dsn, autocommit=True) as connection:
        becomes_right(connection, "what the killed front had heard")
        told: list[str] = []
        connection.add_notice_handler(lambda notice: told.append(str(notice.message_primary)))
        connection.execute(
            "CREATE AI TABLE seen AS SELECT id, ai_generate(body) FROM shown "
            "WITH (key = id, refresh = 'on change')"
        )
        assert told[0].endswith("shown is no table that lasts")
        connection.execute("ALTER AI TABLE made SET (refresh = manual)")
        rows = connection.execute("SELECT name, refresh_s FROM tierkv.ai_tables ORDER BY 1")
        assert rows.fetchall() == [("made", 0.0), ("seen", 0.0)]


def test_a_front_refreshes_its_tables_by_itself(start_cluster: Callable[..., Cluster]) -> None:
    cluster = start_cluster()
    dsn = f"host=127.0.0.1 port={cluster.pg_port} user=tierkv dbname=main"
    with psycopg.connect(dsn, autocommit=True) as connection:

        def is_right() -> bool:
            query = QUERY.replace("'say ' || body", "body, options => '{\"max_tokens\": 3}'")
            rows = [
                sorted(connection.execute(text.encode()).fetchall())
                for text in ("SELECT * FROM made", query)
            ]
            return rows[0] == rows[1]

        connection.execute("CREATE TABLE docs (id int, body text)")
        connection.execute("INSERT INTO docs SELECT i, 'text ' || i FROM range(1, 9) t(i)")
        made = MADE.replace("'say ' || body", "body, options => '{\"max_tokens\": 3}'")
        connection.execute(made.replace("batch = 10", "refresh = '1 second'").encode())
        assert is_right()
        connection.execute("UPDATE docs SET body = body || '!' WHERE id = 2")
        wait_for(is_right, what="a refresh")
        connection.execute("UPDATE docs SET body = body || '?' WHERE id = 4")
    cluster.kill("front")
    with psycopg.connect(dsn, autocommit=True) as connection:
        wait_for(is_right, what="a refresh by the new front")
        connection.execute("ALTER AI TABLE made SUSPEND")
        state = connection.execute("SELECT state, suspended FROM tierkv.ai_tables").fetchone()
        assert state == ("fresh", True)


def test_embeddings_stay_those_of_their_rows(door: Door) -> None:
    with door.session() as connection:
        connection.execute(
            "CREATE AI TABLE memory AS SELECT id, body, ai_embed(body) AS embedding FROM docs "
            "WITH (key = id)"
        )
        connection.execute("UPDATE docs SET body = 'another text' WHERE id = 8")
        door.generator.prompts.clear()
        connection.execute("REFRESH AI TABLE memory")
        assert door.generator.prompts == ["another text"]
        right = "SELECT count(*), min(id) FROM memory WHERE embedding = ai_embed(body)"
        assert connection.execute(right).fetchall() == [(ROWS, 1)]
        answered = connection.execute(
            "SELECT ai_generate('q', documents => (SELECT body FROM memory "
            "WHERE embedding = ai_embed('another text'))) = ai_generate(E'another text\\nq')"
        ).fetchone()
        assert answered == (True,)
        connection.execute("DROP AI TABLE memory")
