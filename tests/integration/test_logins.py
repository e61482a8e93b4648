"""Users made in SQL: they log in, change their passwords, and are let in no more once dropped."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.fix_cluster import wait_for
from tests.fix_roles import Roles
from tierkv.dbfront.pgwire.protocol.auth import make_verifier

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]
BOSS = ("boss", "first password")
REFUSED = "28P01"


class WithLogins(Roles):
    """A front with an administrator in its configuration, and no compute node."""

    def __init__(self, folder: Path) -> None:
        users = '{"boss": "first password"}'
        environment = {"TIERKV_FRONT_USERS": users, "TIERKV_FRONT_API_KEYS": '{"k": "boss"}'}
        super().__init__(folder, {"front": ["front.admins=boss"]}, environment=environment)

    def run(self, login: tuple[str, str], statement: str) -> list[tuple[Any, ...]]:
        """Run a statement as a user; return its rows."""
        user, password = login
        with psycopg.connect(
            host="127.0.0.1", port=self.pg_port, user=user, password=password, dbname="main",
            autocommit=True,
        ) as session:  # fmt: skip
            cursor = session.execute(statement)
            return cursor.fetchall() if cursor.description else []

    def logs(self) -> list[Path]:
        """Return the logs of all processes."""
        return list(self._folder.rglob("*.log"))

    def state(self, login: tuple[str, str], statement: str = "SELECT 1") -> str:
        """Return the SQLSTATE of a statement or login; empty if it succeeds."""
        try:
            self.run(login, statement)
        except psycopg.Error as error:
            if error.sqlstate is None and "password authentication failed" in str(error):
                return REFUSED
            return error.sqlstate or "?"
        return ""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WithLogins]:
    roles = WithLogins(tmp_path_factory.mktemp("logins"))
    try:
        roles.start("meta", "front")
        yield roles
    finally:
        roles.stop()


@pytest.fixture(autouse=True)
def no_users(cluster: WithLogins) -> Iterator[None]:
    yield
    for user in ("eve", "fay"):
        cluster.run(BOSS, f"DROP USER IF EXISTS {user}")


def test_a_user_comes_changes_the_password_and_goes(cluster: WithLogins) -> None:
    cluster.run(BOSS, "CREATE USER eve PASSWORD 'it''s'")
    assert cluster.run(("eve", "it's"), "SELECT current_user") == [("eve",)]
    assert cluster.state(("eve", "its")) == REFUSED
    cluster.run(("eve", "it's"), "ALTER USER eve WITH PASSWORD 'second'")
    assert cluster.state(("eve", "it's")) == REFUSED and not cluster.state(("eve", "second"))
    cluster.run(BOSS, "ALTER ROLE eve PASSWORD NULL")
    assert cluster.state(("eve", "second")) == REFUSED
    cluster.run(BOSS, "ALTER USER eve ENCRYPTED PASSWORD $$third$$")
    assert not cluster.state(("eve", "third"))
    cluster.run(BOSS, "DROP USER eve")
    assert cluster.state(("eve", "third")) == REFUSED
    assert cluster.state(BOSS, "DROP USER eve") == "42704"


def test_a_verifier_is_taken_as_it_is(cluster: WithLogins) -> None:
    """What psql sends for \\password."""
    assert cluster.run(BOSS, "SHOW password_encryption") == [("scram-sha-256",)]
    verifier = make_verifier("made by the client").text
    cluster.run(BOSS, f"CREATE ROLE eve LOGIN PASSWORD '{verifier}'")
    assert not cluster.state(("eve", "made by the client"))
    for bad in ("SCRAM-SHA-256$bad", verifier[:-4], verifier.replace("4096", "0")):
        assert cluster.state(BOSS, f"ALTER USER eve PASSWORD '{bad}'") == "22023"
    assert not cluster.state(("eve", "made by the client"))


def test_who_is_no_administrator_changes_the_own_password_only(cluster: WithLogins) -> None:
    cluster.run(BOSS, "CREATE USER eve PASSWORD 'e'")
    eve = ("eve", "e")
    for statement in (
        "CREATE USER fay PASSWORD 'f'", "ALTER USER boss PASSWORD 'b'", "DROP USER eve",
        "ALTER USER eve PASSWORD NULL", "CREATE ROLE more", "GRANT tierkv_admin TO eve",
    ):  # fmt: skip
        assert cluster.state(eve, statement) == "42501", statement
    cluster.run(BOSS, "GRANT tierkv_admin TO eve")
    cluster.run(eve, "CREATE USER fay PASSWORD 'f'")
    assert not cluster.state(("fay", "f"))


@pytest.mark.parametrize(
    ("statement", "state"),
    [
        ("CREATE USER eve", "22023"),
        ("CREATE USER eve PASSWORD ''", "22023"),
        ("CREATE ROLE eve LOGIN", "42601"),
        ("CREATE USER eve PASSWORD secret", "42601"),
        ("CREATE USER eve PASSWORD 's' VALID", "42601"),
        ("CREATE USER boss PASSWORD 's'", "42710"),
        ("CREATE USER \"Boss\" PASSWORD 's'", "42710"),
        ("ALTER USER boss PASSWORD 's'", "55000"),
        ("ALTER USER nobody PASSWORD 's'", "42704"),
        ("CREATE USER tierkv_admin PASSWORD 's'", "42939"),
    ],
)
def test_what_can_not_be_is_said(cluster: WithLogins, statement: str, state: str) -> None:
    assert cluster.state(BOSS, statement) == state
    assert cluster.state(("eve", "s")) == REFUSED


def test_no_password_is_shown_anywhere(cluster: WithLogins) -> None:
    cluster.run(BOSS, "CREATE USER eve PASSWORD 'Zeitgeist'")
    cluster.run(("eve", "Zeitgeist"), "/* mine */ alter user eve password E'Zeitgeist2'")
    seen = [
        str(cluster.run(BOSS, f"SELECT * FROM tierkv.{view}"))
        for view in ("audit_log", "stat_activity", "query_log", "stat_statements", "settings")
    ]
    assert "'ALTER ROLE', 'eve', 'done', 'password'" in seen[0]
    logs = [path.read_text(errors="replace") for path in cluster.logs()]
    assert logs and not any("Zeitgeist" in text for text in (*seen, *logs))


ANN, BOB = ("ann", "a"), ("bob", "b")


@pytest.fixture
def notes(cluster: WithLogins) -> Iterator[WithLogins]:
    """Two users, and a table of one of them."""
    for user, password in (ANN, BOB):
        cluster.run(BOSS, f"CREATE USER {user} PASSWORD '{password}'")
    cluster.run(ANN, "CREATE TABLE notes (id int PRIMARY KEY, body text)")
    cluster.run(ANN, "INSERT INTO notes VALUES (1, 'mine')")
    yield cluster
    cluster.run(BOSS, "DROP SCHEMA IF EXISTS ann CASCADE")
    cluster.run(BOSS, "DROP SCHEMA IF EXISTS bob CASCADE")
    for user, _ in (ANN, BOB):
        cluster.run(BOSS, f"DROP USER {user}")


@pytest.mark.parametrize(
    "statement",
    [
        "SELECT * FROM ann.notes",
        'SELECT count(*) FROM main."Ann".notes',
        "SELECT ai_generate(body) FROM ann.notes",
        "WITH a AS (SELECT 1), b AS (SELECT * FROM ann.notes) SELECT * FROM a, b",
        "SELECT 1 WHERE EXISTS (SELECT FROM ann.notes)",
        "SELECT * FROM query('SELECT * FROM ann.notes')",
        "SELECT * FROM query('SELECT * FROM a' || 'nn.notes')",
        "SELECT * FROM query_table('ann.notes')",
        "SELECT * FROM pragma_storage_info('ann.notes')",
        "EXPLAIN ANALYZE SELECT * FROM ann.notes",
        "DECLARE c CURSOR WITH HOLD FOR SELECT * FROM ann.notes",
        "PREPARE p AS SELECT * FROM ann.notes",
        "CREATE VIEW mine AS SELECT * FROM ann.notes",
        "CREATE TABLE mine AS SELECT * FROM ann.notes",
        "CREATE MACRO mine() AS TABLE SELECT * FROM ann.notes",
        "INSERT INTO ann.notes VALUES (2, 'x')",
        "UPDATE ann.notes SET body = ''",
        "DELETE FROM ann.notes",
        "TRUNCATE ann.notes",
        "ALTER TABLE ann.notes RENAME TO taken",
        "CREATE INDEX i ON ann.notes (body)",
        "DROP TABLE ann.notes",
        "DROP SCHEMA ann CASCADE",
        "CREATE SCHEMA ann",
        "CREATE SCHEMA somebodys",
        "CREATE TABLE ann.more (a int)",
        "SET search_path = ann, public",
        "SELECT set_config('search_path', 'ann', false)",
        "GRANT SELECT ON ann.notes TO bob",
    ],
)
def test_another_users_table_is_out_of_reach(notes: WithLogins, statement: str) -> None:
    assert notes.state(BOB, statement) == "42501"
    assert notes.run(ANN, "SELECT * FROM notes") == [(1, "mine")]


def test_a_table_is_granted_privilege_by_privilege(notes: WithLogins) -> None:
    notes.run(ANN, "GRANT SELECT, INSERT ON ann.notes TO bob")
    assert notes.run(BOB, "SELECT body FROM ann.notes") == [("mine",)]
    notes.run(BOB, "INSERT INTO ann.notes SELECT id + 1, body FROM ann.notes")
    assert notes.run(BOB, "SELECT ann.x FROM (SELECT 1 AS x) AS ann") == [(1,)]
    for refused in (
        "UPDATE ann.notes SET body = ''", "DELETE FROM ann.notes", "DROP TABLE ann.notes",
        "INSERT INTO ann.notes VALUES (1, '') ON CONFLICT DO UPDATE SET body = ''",
    ):  # fmt: skip
        assert notes.state(BOB, refused) == "42501"
    shown = notes.run(BOB, "SELECT granted FROM tierkv.rights WHERE right_kind = 'table'")
    assert shown == [("SELECT, INSERT on ann.notes",)]
    notes.run(ANN, "REVOKE INSERT ON TABLE ann.notes FROM bob")
    assert notes.state(BOB, "INSERT INTO ann.notes VALUES (9, '')") == "42501"
    notes.run(ANN, "REVOKE ALL PRIVILEGES ON ann.notes FROM bob")
    assert notes.state(BOB, "SELECT * FROM ann.notes") == "42501"
    notes.run(BOSS, "GRANT SELECT ON ALL TABLES IN SCHEMA ann TO PUBLIC")
    assert len(notes.run(BOB, "SELECT * FROM ann.notes")) == 2
    notes.run(BOSS, "REVOKE SELECT ON ALL TABLES IN SCHEMA ann FROM PUBLIC")


def test_rows_are_copied_only_where_they_may(notes: WithLogins) -> None:
    def copy_in(login: tuple[str, str]) -> str:
        user, password = login
        try:
            with (
                psycopg.connect(
                    host="127.0.0.1", port=notes.pg_port, user=user, password=password,
                    dbname="main",
                ) as session,
                session.cursor().copy("COPY ann.notes FROM STDIN") as copy,
            ):  # fmt: skip
                copy.write_row((5, "copied"))
        except psycopg.Error as error:
            return error.sqlstate or "?"
        return ""

    assert copy_in(BOB) == "42501"
    assert copy_in(ANN) == ""
    notes.run(ANN, "DELETE FROM notes WHERE id = 5")
    notes.run(ANN, "GRANT INSERT ON ann.notes TO bob")
    assert copy_in(BOB) == ""


def test_names_mean_the_own_schema_first_also_after_a_reset(notes: WithLogins) -> None:
    notes.run(BOSS, "CREATE TABLE everybodys AS SELECT 7 AS a")
    notes.run(BOB, "CREATE TABLE notes AS SELECT 'bobs' AS body")
    with psycopg.connect(
        host="127.0.0.1", port=notes.pg_port, user="bob", password="b", dbname="main",
        autocommit=True,
    ) as session:  # fmt: skip
        for before in ("SELECT 1", "RESET search_path", "DISCARD ALL", "SET search_path = DEFAULT"):
            session.execute(before)
            assert session.execute("SELECT body FROM notes").fetchall() == [("bobs",)], before
            assert session.execute("SELECT a FROM everybodys").fetchall() == [(7,)]
    assert notes.run(ANN, "SELECT body FROM notes") == [("mine",)]
    notes.run(BOSS, "DROP TABLE everybodys")


def test_no_macro_or_view_made_by_others_reaches_a_table(notes: WithLogins) -> None:
    notes.run(BOSS, "CREATE MACRO rows_of(name) AS TABLE SELECT * FROM query_table(name)")
    for statement in (
        "SELECT * FROM rows_of('ann.notes')",
        "SELECT * FROM rows_of('ann.' || 'notes')",
        "CREATE TEMP MACRO mine(name) AS TABLE SELECT * FROM rows_of(name)",
        "CREATE TEMP MACRO mine(name) AS TABLE SELECT * FROM query_table(name)",
    ):
        assert notes.state(BOB, statement) == "42501", statement
    notes.run(BOSS, "DROP MACRO TABLE rows_of")


def test_ai_calls_stream_from_a_table_of_the_own_schema(notes: WithLogins) -> None:
    explained = notes.run(ANN, "EXPLAIN SELECT ai_generate(body) FROM notes")
    assert any("stream" in line.lower() for (line,) in explained), explained


def test_a_roles_schema_is_its_members(notes: WithLogins) -> None:
    notes.run(BOSS, "CREATE ROLE team")
    notes.run(BOSS, "CREATE SCHEMA team")
    assert notes.state(BOB, "CREATE TABLE team.plans (a int)") == "42501"
    notes.run(BOSS, "GRANT team TO bob")
    notes.run(BOB, "CREATE TABLE team.plans (a int)")
    assert notes.state(ANN, "SELECT * FROM team.plans") == "42501"
    notes.run(BOB, "GRANT SELECT ON team.plans TO ann")
    assert notes.run(ANN, "SELECT * FROM team.plans") == []
    notes.run(BOSS, "DROP SCHEMA team CASCADE")
    notes.run(BOSS, "DROP ROLE team")


@pytest.mark.parametrize(
    "statements",
    [
        ["DROP TABLE notes", "CREATE TABLE notes (id int, body text)"],
        ["DROP TABLE ann.notes; CREATE TABLE ann.notes (id int, body text)"],
        ["BEGIN; DROP TABLE notes; CREATE TABLE notes (id int, body text); COMMIT"],
        ["CREATE OR REPLACE TABLE notes AS SELECT 2 AS id, 'new' AS body"],
        ["ALTER TABLE notes RENAME TO old", "CREATE TABLE notes (id int, body text)"],
        ["EXPLAIN ANALYZE DROP TABLE notes", "CREATE TABLE notes (id int, body text)"],
        ["DROP SCHEMA ann CASCADE; CREATE SCHEMA ann", "CREATE TABLE ann.notes (body text)"],
    ],
)
@pytest.mark.parametrize("by", [ANN, BOSS])
def test_rights_on_a_dropped_table_are_none_on_a_later_one(
    notes: WithLogins, statements: list[str], by: tuple[str, str]
) -> None:
    for name in ("ann.notes", "ALL TABLES IN SCHEMA ann"):
        notes.run(ANN, f"GRANT SELECT ON {name} TO bob")
    if "SCHEMA" not in statements[0]:
        notes.run(ANN, "REVOKE SELECT ON ALL TABLES IN SCHEMA ann FROM bob")
    assert notes.run(BOB, "SELECT body FROM ann.notes") == [("mine",)]
    for text in statements:
        notes.run(by, text if by == ANN else f"SET search_path = ann; {text}")
    assert notes.state(BOB, "SELECT body FROM ann.notes") == "42501"


def test_rights_stay_while_their_table_does(notes: WithLogins) -> None:
    notes.run(ANN, "GRANT SELECT ON ann.notes TO bob")
    for text in (
        "BEGIN; DROP TABLE notes; ROLLBACK",
        "ALTER TABLE notes ADD COLUMN more int",
        "ALTER TABLE notes RENAME COLUMN id TO number",
        "CREATE TABLE other (a int)",
        "DROP TABLE other",
        "DROP TABLE IF EXISTS nothing",
    ):
        notes.run(ANN, text)
        assert notes.run(BOB, "SELECT body FROM ann.notes") == [("mine",)]


def test_jobs_are_their_owners(notes: WithLogins) -> None:
    notes.run(ANN, "CREATE TABLE IF NOT EXISTS copied (id int)")
    notes.run(ANN, "CREATE TABLE IF NOT EXISTS numbers AS SELECT 1 AS id UNION ALL SELECT 2")
    made = "CREATE AI JOB work AS INSERT INTO copied SELECT id FROM numbers WITH (key = id)"
    notes.run(ANN, made)
    assert notes.run(ANN, "SELECT job, owner, done FROM tierkv.jobs") == [("work", "ann", 2)]
    assert notes.run(BOSS, "SELECT job, owner, done FROM tierkv.jobs") == [("work", "ann", 2)]
    assert notes.run(BOB, "SELECT * FROM tierkv.jobs") == []
    for text, state in (
        ("RESUME JOB work", "42704"),
        ("CALL tierkv.cancel_job('work')", "42704"),
        ("DROP AI JOB work", "42704"),
        ("SELECT * FROM tierkv_jobs.jobs", "42501"),
        ("UPDATE tierkv_jobs.parts SET state = 'done'", "42501"),
        ("CREATE AI JOB x AS CREATE TABLE y AS SELECT id FROM ann.numbers WITH (key = id)",
         "42501"),
        ("CREATE AI JOB x AS INSERT INTO ann.copied SELECT 1 FROM (SELECT 1 AS id) WITH (key = id)",
         "42501"),
    ):  # fmt: skip
        assert notes.state(BOB, text) == state, text
    assert notes.state(BOSS, "CREATE USER tierkv_jobs PASSWORD 'x'") == "42939"
    notes.run(ANN, "DROP AI JOB work")


@pytest.mark.parametrize(
    ("statement", "state"),
    [
        ("GRANT SELECT ON notes TO bob", "0A000"),
        ("GRANT SELECT ON main.notes TO bob", "0A000"),
        ("GRANT FLY ON ann.notes TO bob", "42601"),
        ("GRANT SELECT ON ALL TABLES ann TO bob", "42601"),
        ("GRANT SELECT ON ann.notes bob", "42601"),
    ],
)
def test_what_can_not_be_granted_is_said(notes: WithLogins, statement: str, state: str) -> None:
    assert notes.state(ANN, statement) == state


def test_failed_logins_are_in_the_audit_log(cluster: WithLogins) -> None:
    assert cluster.state(("boss", "guess")) == cluster.state(("mallory", "guess")) == REFUSED
    logged = "SELECT DISTINCT who FROM tierkv.audit_log WHERE action = 'login'"

    def names() -> set[str]:
        return {who for (who,) in cluster.run(BOSS, logged)}

    # Other tests may have failed to log in as others.
    wait_for(lambda: names() >= {"boss", "unknown user"}, what="both lines")
    assert "mallory" not in names()


def test_logins_outlive_a_restart_of_the_front(cluster: WithLogins) -> None:
    cluster.run(BOSS, "CREATE USER eve PASSWORD 'e'")
    cluster.kill("front")
    cluster.start("front")
    wait_for(lambda: not cluster.state(("eve", "e")), what="the front knows its users")
