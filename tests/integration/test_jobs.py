"""AI jobs through psycopg, over the embedded database and over a real PostgreSQL."""

from __future__ import annotations

import socket

import psycopg
import pytest

from tests.fix_cluster import wait_for
from tests.fix_jobs import ROWS, Door, Running
from tierkv.kvcore.errors import NoNodeError, RowLevelError, TierKVError

pytestmark = pytest.mark.integration

JOB = (
    "CREATE AI JOB work AS INSERT INTO answers SELECT id, ai_generate('say ' || body) FROM docs "
    "WHERE id % 2 = 0 WITH (key = id, batch = 7{more})"
)


def ids(door: Door, table: str = "answers") -> list[int]:
    return [row[0] for row in door.rows(f"SELECT id FROM {table} ORDER BY id")]


def even() -> list[int]:
    return list(range(2, ROWS + 1, 2))


def test_a_job_writes_what_its_statement_writes(door: Door) -> None:
    with door.session() as connection:
        told: list[str] = []
        connection.add_notice_handler(lambda notice: told.append(str(notice.message_primary)))
        done = connection.execute(JOB.format(more=""))
        assert done.statusmessage == "CREATE AI JOB"
        assert told[-1] == "job work is done: 30 rows read, 30 written"
        connection.execute(
            "CREATE AI JOB other AS CREATE TABLE made AS SELECT id, ai_generate('say ' || body) "
            "AS answer FROM docs WHERE id % 2 = 0 WITH (key = docs.id, batch = 100)"
        )
    expected = door.rows(
        "SELECT id, ai_generate('say ' || body) FROM docs WHERE id % 2 = 0 ORDER BY id"
    )
    assert door.rows("SELECT * FROM answers ORDER BY id") == expected
    assert door.rows("SELECT * FROM made ORDER BY id") == expected
    assert door.state() == ("done", 30, 30, 30, 0)
    # Rows that come later are read by a job that is resumed.
    with door.session() as connection:
        connection.execute("INSERT INTO docs VALUES (100, 'late'), (102, 'later')")
        assert connection.execute("RESUME JOB work").statusmessage == "RESUME AI JOB"
    assert ids(door) == [*even(), 100, 102]


def test_rows_that_fail_alone_are_set_aside_and_asked_again(door: Door) -> None:
    failing: dict[str, TierKVError | list[TierKVError]] = {
        "text 8": RowLevelError("this text can't be answered"),
        "text 40": RowLevelError("nor this"),
    }
    door.generator.failing.update(failing)
    with door.session() as connection:
        connection.execute(JOB.format(more=""))
    assert ids(door) == [each for each in even() if each not in (8, 40)]
    assert door.rows("SELECT key, sqlstate, message FROM tierkv.job_failures ORDER BY 1") == [
        ("40", "22000", "nor this"),
        ("8", "22000", "this text can't be answered"),
    ]
    assert door.state() == ("done", 30, 30, 28, 2)
    del door.generator.failing["text 8"]
    with door.session() as connection:
        connection.execute("RESUME AI JOB work WITH (retry_failed = true)")
    assert ids(door) == [each for each in even() if each != 40]
    assert door.state() == ("done", 30, 30, 29, 1)


def test_a_node_that_is_away_for_a_while_costs_no_row(door: Door) -> None:
    door.generator.failing["text 20"] = [NoNodeError("no node"), NoNodeError("no node")]
    with door.session() as connection:
        connection.execute(JOB.format(more=""))
    assert ids(door) == even()
    assert door.state() == ("done", 30, 30, 30, 0)


@pytest.mark.parametrize("how", ["client", "session", "call"])
def test_a_cancelled_job_goes_on_where_it_stopped(door: Door, how: str) -> None:
    door.hold()
    running = Running(door, JOB.format(more=""))
    wait_for(door.generator.started.is_set, what="the first call")
    assert door.state()[0] == "running"
    with pytest.raises(psycopg.errors.ObjectInUse, match="running in another session"):
        door.rows("RESUME JOB work")
    with pytest.raises(psycopg.errors.ObjectInUse), door.session() as connection:
        connection.execute("DROP AI JOB work")
    if how == "client":
        running.connection.cancel_safe()
    else:
        with door.session() as connection:
            connection.execute(
                "CANCEL AI JOB work" if how == "session" else "CALL tierkv.cancel_job('work')"
            )
    running.join()
    assert isinstance(running.error, psycopg.errors.QueryCanceled)
    assert door.state()[0] == "cancelled"
    door.release()
    with door.session() as connection:
        connection.execute("RESUME JOB work")
    assert ids(door) == even()


def test_a_job_whose_client_is_gone_can_be_resumed(door: Door) -> None:
    door.hold()
    running = Running(door, JOB.format(more=""))
    wait_for(door.generator.started.is_set, what="the first call")
    client = socket.socket(fileno=running.connection.fileno())
    client.shutdown(socket.SHUT_RDWR)
    client.detach()
    running.join()
    door.release()
    stopped = ("interrupted", "cancelled")  # by the front, if it notices in time
    wait_for(lambda: door.state()[0] in stopped, what="the end of the session")
    with door.session() as connection:
        connection.execute("RESUME JOB work")
    assert ids(door) == even()


def test_a_job_stops_at_its_own_limits(door: Door) -> None:
    with pytest.raises(psycopg.errors.ConfigurationLimitExceeded, match="max_cost_tokens"):
        door.rows(JOB.format(more=", max_cost_tokens = 10"))
    assert door.state()[0] == "stopped" and ids(door) == even()[:7]
    with door.session() as connection:
        connection.execute("RESUME JOB work WITH (max_cost_tokens = 0)")
    assert ids(door) == even()


def test_partitions_are_run_by_several_sessions(door: Door) -> None:
    with pytest.raises(psycopg.errors.ConfigurationLimitExceeded):
        door.rows(JOB.format(more=", max_cost_tokens = 1, partitions = 3"))
    with door.session() as connection:
        connection.execute("RESUME JOB work WITH (max_cost_tokens = 0)")
        connection.execute("DROP AI JOB work")
        connection.execute("DELETE FROM answers")
    door.hold()
    first = Running(door, JOB.format(more=", partitions = 3"))
    wait_for(door.generator.started.is_set, what="the first call")
    with door.session() as connection:
        connection.execute("CANCEL JOB work")
    first.join()
    door.release()
    runners = [Running(door, f"RUN AI JOB work PARTITION {number}") for number in (1, 2, 3)]
    for runner in runners:
        runner.join()
        assert runner.error is None
    assert ids(door) == even()
    assert door.state()[0] == "done"
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="has 3 partitions"):
        door.rows("RUN AI JOB work PARTITION 4")


REFUSED = {
    "CREATE AI JOB w AS SELECT 1 FROM docs WITH (key = id)": "42601",
    "CREATE AI JOB w AS INSERT INTO answers SELECT id, body FROM docs": "42601",
    "CREATE AI JOB w AS INSERT INTO answers SELECT id, body FROM docs WITH (key = id, x = 1)":
        "42601",
    "CREATE AI JOB w AS INSERT INTO answers SELECT id, body FROM docs WITH (key = id, batch = 0)":
        "22023",
    "CREATE AI JOB w AS INSERT INTO answers SELECT id, body FROM docs WITH (key = 'id % 2')":
        "23505",
    "CREATE AI JOB w AS INSERT INTO answers SELECT id, body FROM docs "
    "WITH (key = 'CASE WHEN id > 3 THEN id END')": "23502",
    "CREATE AI JOB w AS INSERT INTO answers SELECT id, body FROM docs "
    "WITH (key = 'CAST(id AS double precision)')": "0A000",
    "CREATE AI JOB w AS INSERT INTO answers SELECT DISTINCT id, body FROM docs WITH (key = id)":
        "0A000",
    "CREATE AI JOB w AS INSERT INTO answers SELECT id, body FROM docs LIMIT 3 WITH (key = id)":
        "0A000",
    "CREATE AI JOB w AS INSERT INTO answers SELECT count(*), 'a' FROM docs WITH (key = id)":
        "42803",
    "CREATE AI JOB w AS INSERT INTO nowhere SELECT id, body FROM docs WITH (key = id)": "42P01",
    "CREATE AI JOB w AS INSERT INTO answers SELECT id, body FROM docs WITH (key = nix)": "42703",
    "CREATE AI JOB w AS INSERT INTO answers SELECT id, body FROM docs "
    "WITH (key = id, background = on)": "0A000",
    "CREATE AI JOB w AS INSERT INTO answers SELECT id, body FROM docs "
    "WITH (key = id, queued = on)": "0A000",
    "CREATE AI JOB w AS INSERT INTO answers SELECT id, body FROM docs "
    "WITH (key = id, queued = perhaps)": "22023",
    "CREATE AI JOB w AS INSERT INTO answers SELECT id, body FROM docs "
    "WITH (key = id, queue = on)": "42601",
    "CREATE AI JOB w AS INSERT INTO answers SELECT id, body FROM docs "
    "WITH (key = id, ticket = x)": "42601",
    "RESUME JOB nobody": "42704",
    "CALL tierkv.cancel_job('nobody')": "42704",
    "DROP AI JOB nobody": "42704",
    "RUN AI JOB nobody": "42601",
}  # fmt: skip


def test_bad_jobs_are_refused_and_nothing_is_left(door: Door) -> None:
    with door.session() as connection:
        for text, sqlstate in REFUSED.items():
            with pytest.raises(psycopg.Error) as refused:
                connection.execute(text)
            assert refused.value.sqlstate == sqlstate, text
        connection.execute("DROP AI JOB IF EXISTS nobody")
        assert connection.execute("SELECT count(*) FROM tierkv.jobs").fetchone() == (0,)
        connection.execute(JOB.format(more=""))
        connection.execute(JOB.format(more="").replace("JOB work", "JOB IF NOT EXISTS work"))
        with pytest.raises(psycopg.errors.DuplicateObject):
            connection.execute(JOB.format(more=""))
        with connection.transaction(), pytest.raises(psycopg.errors.ActiveSqlTransaction):
            connection.execute("RESUME JOB work")
        connection.execute("DROP AI JOB work")
    assert ids(door) == even() and door.state() == ()


def test_a_job_whose_target_is_gone_fails_and_says_so(door: Door) -> None:
    with door.session() as connection:
        connection.execute(JOB.format(more=""))
        connection.execute("INSERT INTO docs VALUES (100, 'late')")
        connection.execute("DROP TABLE answers")
        with pytest.raises(psycopg.errors.UndefinedTable):
            connection.execute("RESUME JOB work")
        assert (
            connection.execute("SELECT state, last_error FROM tierkv.jobs").fetchone() is not None
        )
    state, error = door.rows("SELECT state, last_error FROM tierkv.jobs")[0]
    assert state == "failed" and error.startswith("42P01: ") and "answers" in error


def test_names_of_a_job_never_mean_other_tables(door: Door) -> None:
    with door.session() as connection:
        connection.execute(JOB.format(more=""))
        connection.execute("CREATE SCHEMA IF NOT EXISTS elsewhere")
        connection.execute("SET search_path = elsewhere")
        with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match="search_path"):
            connection.execute("RESUME JOB work")


def test_a_job_that_reads_what_it_writes_ends(door: Door) -> None:
    with door.session() as connection:
        connection.execute(
            "CREATE AI JOB grow AS INSERT INTO docs SELECT id + 1000, ai_generate(body) FROM docs "
            "WITH (key = id, batch = 7)"
        )
        assert connection.execute("SELECT count(*) FROM docs").fetchone() == (2 * ROWS,)
