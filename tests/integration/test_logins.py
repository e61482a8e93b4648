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


def test_logins_outlive_a_restart_of_the_front(cluster: WithLogins) -> None:
    cluster.run(BOSS, "CREATE USER eve PASSWORD 'e'")
    cluster.kill("front")
    cluster.start("front")
    wait_for(lambda: not cluster.state(("eve", "e")), what="the front knows its users")
