"""Rights follow tables, and users go without their tables: DROP USER, DROP OWNED, REASSIGN OWNED.

Each role comes through psycopg, psql and REST; all three open sessions of the embedded database.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest

from tests.fix_roles import Roles

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]
PASSWORD = "first password"
USERS = ("ann", "bob")
DONE = ""


class ThreeWays(Roles):
    """A front without a compute node; boss is its administrator, and each user has a REST key."""

    def __init__(self, folder: Path) -> None:
        keys = {f"key of {user}": user for user in ("boss", *USERS)}
        environment = {
            "TIERKV_FRONT_USERS": json.dumps({"boss": PASSWORD}),
            "TIERKV_FRONT_API_KEYS": json.dumps(keys),
        }
        super().__init__(folder, {"front": ["front.admins=boss"]}, environment=environment)

    def connect(self, user: str) -> psycopg.Connection:
        """Log in."""
        return psycopg.connect(
            host="127.0.0.1", port=self.pg_port, user=user, password=PASSWORD, dbname="main",
            autocommit=True,
        )  # fmt: skip

    def by_psycopg(self, user: str, statement: str) -> str:
        """Return the SQLSTATE of a statement; empty if it succeeds."""
        try:
            with self.connect(user) as session:
                session.execute(statement)
        except psycopg.Error as error:
            return error.sqlstate or "?"
        return DONE

    def by_psql(self, user: str, statement: str) -> str:
        """Do the same with psql."""
        told = subprocess.run(
            ["psql", "-X", "-w", "-v", "VERBOSITY=verbose", "-c", statement,
             f"host=127.0.0.1 port={self.pg_port} user={user} dbname=main"],
            env={**os.environ, "PGPASSWORD": PASSWORD}, capture_output=True, text=True,
            timeout=60, check=False,
        )  # fmt: skip
        found = re.search(r"ERROR:\s+(\w{5}):", told.stderr)
        return found[1] if found else DONE

    def by_rest(self, user: str, statement: str) -> str:
        """Do the same with POST /v1/sql."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.http_port}/v1/sql",
            json.dumps({"sql": statement}).encode(),
            {"content-type": "application/json", "authorization": f"Bearer key of {user}"},
        )
        try:
            with urllib.request.urlopen(request, timeout=60):
                return DONE
        except urllib.error.HTTPError as error:
            return str(json.load(error)["error"]["sqlstate"])


WAYS: tuple[Callable[[ThreeWays, str, str], str], ...] = (
    ThreeWays.by_psycopg, ThreeWays.by_psql, ThreeWays.by_rest,
)  # fmt: skip


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ThreeWays]:
    roles = ThreeWays(tmp_path_factory.mktemp("owned"))
    try:
        roles.start("meta", "front")
        yield roles
    finally:
        roles.stop()


@pytest.fixture
def notes(cluster: ThreeWays) -> Iterator[ThreeWays]:
    """Two users, and a table of one of them that the other may read."""
    with cluster.connect("boss") as boss:
        for user in USERS:
            boss.execute(f"CREATE USER {user} PASSWORD '{PASSWORD}'")
    with cluster.connect("ann") as ann:
        ann.execute("CREATE TABLE notes (body text)")
        ann.execute("INSERT INTO notes VALUES ('mine')")
        ann.execute("GRANT SELECT ON ann.notes TO bob")
    yield cluster
    with cluster.connect("boss") as boss:
        for user in USERS:
            boss.execute(f"CREATE ROLE IF NOT EXISTS {user}")
            boss.execute(f"DROP OWNED BY {user}")
            boss.execute(f"DROP USER {user}")


READ = "SELECT body FROM ann.notes"


@pytest.mark.parametrize("way", WAYS)
def test_rights_end_with_a_table_and_follow_its_name(
    notes: ThreeWays, way: Callable[[ThreeWays, str, str], str]
) -> None:
    assert way(notes, "bob", READ) == DONE
    assert way(notes, "ann", "ALTER TABLE ann.notes RENAME TO old") == DONE
    assert way(notes, "ann", "CREATE TABLE ann.notes (body text)") == DONE
    assert way(notes, "bob", READ) == "42501"
    assert way(notes, "bob", "SELECT body FROM ann.old") == DONE
    assert way(notes, "boss", "DROP TABLE ann.old") == DONE
    assert way(notes, "ann", "CREATE TABLE ann.old (body text)") == DONE
    assert way(notes, "bob", "SELECT body FROM ann.old") == "42501"
    assert way(notes, "ann", "CREATE VIEW ann.seen AS SELECT 1 AS a") == DONE
    assert way(notes, "ann", "GRANT SELECT ON ann.seen TO bob") == DONE
    assert way(notes, "ann", "CREATE OR REPLACE VIEW ann.seen AS SELECT 2 AS a") == DONE
    assert way(notes, "ann", "ALTER VIEW ann.seen RENAME TO shown") == DONE
    assert way(notes, "bob", "SELECT a FROM ann.shown") == DONE
    assert way(notes, "ann", "DROP VIEW ann.shown") == DONE
    assert way(notes, "ann", "CREATE TABLE ann.shown (a int)") == DONE
    assert way(notes, "bob", "SELECT a FROM ann.shown") == "42501"


@pytest.mark.parametrize(
    ("statements", "may_read"),
    [
        ("BEGIN; ALTER TABLE notes RENAME TO x; ROLLBACK", "notes"),
        ("BEGIN; ALTER TABLE notes RENAME TO x; CREATE TABLE notes (body text); COMMIT", "x"),
        ("BEGIN; ALTER TABLE notes RENAME TO x; ALTER TABLE x RENAME TO y; COMMIT", "y"),
        ("BEGIN; ALTER TABLE notes RENAME TO x; ALTER TABLE x RENAME TO notes; COMMIT", "notes"),
        ("BEGIN; ALTER TABLE notes RENAME TO x; DROP TABLE x; "
         "CREATE TABLE x (body text); CREATE TABLE notes (body text); COMMIT", ""),
        ("BEGIN; SAVEPOINT a; DROP TABLE notes; ROLLBACK TO a; COMMIT", "notes"),
        ("BEGIN; ALTER TABLE notes RENAME TO x; SAVEPOINT a; ALTER TABLE x RENAME TO y; "
         "ROLLBACK TO a; COMMIT", "x"),
        ("BEGIN; DROP TABLE notes; SELECT 1/0 FROM nothing; COMMIT", "notes"),
    ],
)  # fmt: skip
def test_rights_in_a_transaction_are_those_of_its_end(
    notes: ThreeWays, statements: str, may_read: str
) -> None:
    with notes.connect("ann") as ann:
        for statement in statements.split("; "):
            try:
                ann.execute(statement)
            except psycopg.errors.UndefinedTable:
                assert "nothing" in statement
    for table in ("notes", "x", "y"):
        read = f"SELECT body FROM ann.{table}"
        told = notes.by_psycopg("bob", read)
        assert told == DONE if table == may_read else told == "42501", table


@pytest.mark.parametrize("way", WAYS)
def test_a_user_with_tables_is_not_dropped(
    notes: ThreeWays, way: Callable[[ThreeWays, str, str], str]
) -> None:
    assert way(notes, "ann", "DROP USER ann") == "42501"
    assert way(notes, "boss", "DROP USER ann") == "2BP01"
    assert way(notes, "bob", "DROP OWNED BY ann") == "42501"
    assert way(notes, "bob", "REASSIGN OWNED BY ann TO bob") == "42501"
    assert way(notes, "boss", "DROP OWNED BY nobody") == "42704"
    assert way(notes, "boss", "REASSIGN OWNED BY ann") == "42601"
    assert way(notes, "ann", "DROP OWNED BY ann CASCADE") == DONE
    assert way(notes, "boss", "DROP USER ann") == DONE
    assert way(notes, "boss", READ) in ("42P01", "3F000")
    # A later ann has nothing of the earlier one, and bob no right.
    assert way(notes, "boss", f"CREATE USER ann PASSWORD '{PASSWORD}'") == DONE
    with notes.connect("ann") as ann:
        ann.execute("CREATE TABLE notes (body text)")
    assert way(notes, "bob", READ) == "42501"


@pytest.mark.parametrize("way", WAYS)
def test_a_role_may_be_current_user(
    notes: ThreeWays, way: Callable[[ThreeWays, str, str], str]
) -> None:
    assert way(notes, "ann", "REASSIGN OWNED BY CURRENT_USER TO CURRENT_ROLE") == DONE
    assert way(notes, "ann", "REASSIGN OWNED BY SESSION_USER TO bob") == "42501"
    assert way(notes, "ann", "REVOKE SELECT ON ann.notes FROM bob, CURRENT_USER") == DONE
    assert way(notes, "bob", READ) == "42501"
    assert way(notes, "boss", "GRANT ann TO current_user") == DONE
    assert way(notes, "boss", "REVOKE ann FROM current_user") == DONE
    assert way(notes, "ann", "ALTER USER CURRENT_USER PASSWORD '" + PASSWORD + "'") == DONE
    assert way(notes, "ann", "DROP OWNED BY session_user") == DONE
    assert way(notes, "ann", READ) == "42P01"


def test_a_variable_has_no_value_of_anothers_table(notes: ThreeWays) -> None:
    take = "SET VARIABLE taken = (SELECT max(body) FROM ann.notes)"
    with notes.connect("bob") as bob:
        bob.execute(take)
        assert bob.execute("SELECT getvariable('taken')").fetchall() == [("mine",)]
    with notes.connect("ann") as ann:
        ann.execute("REVOKE ALL ON ann.notes FROM bob")
    assert notes.by_psycopg("bob", take) == "42501"


def test_a_path_in_pieces_reaches_no_other_schema(notes: ThreeWays) -> None:
    with notes.connect("bob") as bob:
        for path in ('"an""n"', "'an\"\"n'", "an n", "'a' 'nn'", "E'\\x61nn'"):
            with pytest.raises(psycopg.Error):
                bob.execute(f"SET search_path = {path}")
            with pytest.raises(psycopg.errors.UndefinedTable):
                bob.execute("SELECT * FROM notes")
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            bob.execute("SELECT * FROM query_table('a\"n\"n.other')")


@pytest.mark.parametrize("way", WAYS)
def test_an_update_shows_no_value_without_select(
    notes: ThreeWays, way: Callable[[ThreeWays, str, str], str]
) -> None:
    with notes.connect("ann") as ann:
        ann.execute("REVOKE SELECT ON ann.notes FROM bob")
        ann.execute("GRANT UPDATE ON ann.notes TO bob")
    for value in ("CAST(CAST(body AS int) AS text)", "error(body)", "error(COLUMNS(*))"):
        assert way(notes, "bob", f"UPDATE ann.notes SET body = {value}") == "42501"
    assert way(notes, "bob", "UPDATE ann.notes SET body = 'changed'") == DONE


READERS = (
    "SELECT * FROM {}seen", "SELECT * FROM {}seen_again", "SELECT * FROM {}by_name",
    "SELECT * FROM {}seen_by_macro()", "SELECT * FROM query('FROM {}seen')", "SUMMARIZE {}seen",
    "INSERT INTO bob.own SELECT * FROM {}seen", "SELECT ai_generate(body) FROM {}seen",
)  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_a_view_reads_what_its_owner_may_read(
    notes: ThreeWays, way: Callable[[ThreeWays, str, str], str]
) -> None:
    for made in (
        "CREATE TABLE bob.own (body text)",
        "CREATE VIEW bob.seen AS SELECT * FROM ann.notes",
        "CREATE VIEW bob.seen_again AS SELECT * FROM bob.seen",
        "CREATE VIEW bob.by_name AS SELECT * FROM query_table('bob.seen')",
        "CREATE MACRO bob.seen_by_macro() AS TABLE SELECT * FROM bob.seen",
        "SELECT * FROM seen_again",
    ):
        assert way(notes, "bob", made) == DONE, made
    for nobodys in ("main.seen", "TEMP seen"):
        kind = "TEMP VIEW seen" if nobodys.startswith("TEMP") else f"VIEW {nobodys}"
        assert way(notes, "bob", f"CREATE {kind} AS SELECT * FROM ann.notes") == "42501"
    assert way(notes, "ann", "REVOKE SELECT ON ann.notes FROM bob") == DONE
    for reader in READERS:
        for schema in ("", "bob."):
            assert way(notes, "bob", reader.format(schema)) == "42501", reader
    assert way(notes, "bob", "SELECT seen FROM (SELECT 1 AS seen)") == DONE
    assert way(notes, "ann", "GRANT SELECT ON ann.notes TO bob") == DONE
    assert way(notes, "bob", "SELECT * FROM bob.seen_again") == DONE
    # Another table of the name is another table.
    assert way(notes, "ann", "DROP TABLE ann.notes") == DONE
    assert way(notes, "ann", "CREATE TABLE ann.notes (body text)") == DONE
    assert way(notes, "bob", "SELECT * FROM bob.seen_again") == "42501"
    assert way(notes, "bob", "DROP VIEW bob.seen") == DONE


def test_what_a_session_made_reads_no_more_than_its_views(notes: ThreeWays) -> None:
    with notes.connect("bob") as bob:
        for made in (
            "CREATE VIEW bob.plain AS SELECT 'mine' AS body",
            "CREATE TEMP VIEW short AS SELECT * FROM bob.plain",
            "CREATE TEMP MACRO shorter() AS TABLE SELECT * FROM short",
            "PREPARE kept AS SELECT * FROM bob.plain",
            "CREATE OR REPLACE VIEW bob.plain AS SELECT * FROM ann.notes",
            "SELECT * FROM shorter()",
        ):
            bob.execute(made)
        with notes.connect("ann") as ann:
            ann.execute("REVOKE SELECT ON ann.notes FROM bob")
        for read in ("FROM short", "FROM temp.short", "FROM shorter()", "EXECUTE kept"):
            with pytest.raises(psycopg.errors.InsufficientPrivilege, match="of view"):
                bob.execute(read)


def test_the_error_names_what_is_owned(notes: ThreeWays) -> None:
    with notes.connect("ann") as ann:
        ann.execute("CREATE MACRO twice(a) AS 2 * a")
        ann.execute("CREATE TABLE made (body text)")
        ann.execute("CREATE AI JOB work AS INSERT INTO made SELECT body FROM notes WITH (key=body)")
    with notes.connect("boss") as boss, pytest.raises(psycopg.errors.Error) as refused:
        boss.execute("DROP ROLE ann")
    told = refused.value.diag
    assert (told.sqlstate, told.message_detail) == (
        "2BP01",
        "owner of function ann.twice\nowner of table ann.made\nowner of table ann.notes\n"
        "owner of AI job work",
    )
    assert told.message_hint is not None and 'REASSIGN OWNED BY "ann"' in told.message_hint


@pytest.mark.parametrize("way", WAYS)
def test_what_a_user_owned_is_anothers(
    notes: ThreeWays, way: Callable[[ThreeWays, str, str], str]
) -> None:
    with notes.connect("ann") as open_session:
        open_session.execute("SELECT body FROM notes")
        assert way(notes, "boss", "REASSIGN OWNED BY ann TO bob") == DONE
        # An open session loses the schema too, under whatever name the session knew it.
        for read in (READ, "SELECT body FROM notes"):
            with pytest.raises(psycopg.errors.Error) as refused:
                open_session.execute(read)
            assert refused.value.sqlstate in ("42501", "42P01")
    assert way(notes, "boss", "DROP USER ann") == DONE
    assert way(notes, "bob", "INSERT INTO ann.notes VALUES ('more')") == DONE
    assert way(notes, "boss", "DROP USER bob") == "2BP01"
    assert way(notes, "boss", f"CREATE USER ann PASSWORD '{PASSWORD}'") == DONE
    assert way(notes, "ann", READ) == "42501"
    assert way(notes, "ann", "CREATE TABLE ann.more (a int)") == "42501"
    assert way(notes, "bob", "GRANT SELECT ON ann.notes TO ann") == DONE
    assert way(notes, "ann", READ) == DONE
    # The schema is ann's again once it was dropped.
    assert way(notes, "bob", "DROP SCHEMA ann CASCADE") == DONE
    with notes.connect("ann") as ann:
        ann.execute("CREATE TABLE notes (body text)")
    assert way(notes, "bob", READ) == "42501"


def test_jobs_go_to_the_new_owner(notes: ThreeWays) -> None:
    with notes.connect("ann") as ann:
        ann.execute("CREATE TABLE made (body text)")
        ann.execute("CREATE AI JOB work AS INSERT INTO made SELECT body FROM notes WITH (key=body)")
        with notes.connect("boss") as boss:
            boss.execute("GRANT bob TO ann")
        ann.execute("REASSIGN OWNED BY ann TO bob")
    with notes.connect("bob") as bob:
        assert bob.execute("SELECT job, owner FROM tierkv.jobs").fetchall() == [("work", "bob")]
        assert bob.execute("SELECT body FROM ann.made").fetchall() == [("mine",)]
        bob.execute("DROP OWNED BY bob")
        assert bob.execute("SELECT job FROM tierkv.jobs").fetchall() == []
        bob.execute("CREATE TABLE after (a int)")
        assert bob.execute("SELECT a FROM bob.after").fetchall() == []
    with notes.connect("boss") as boss:
        boss.execute("REVOKE bob FROM ann")
