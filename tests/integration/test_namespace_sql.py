"""KV namespaces in SQL, through psql and psycopg, on both doors of one cluster."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.fix_cluster import free_port
from tests.fix_postgres import PASSWORD, USER, PostgresServer
from tests.fix_roles import Roles

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]
DOORS = ("front-duck", "front-post")
ROWS = (
    "SELECT tenants, capacity_bytes, ttl_s, on_full, blend FROM tierkv.namespaces "
    "WHERE name = 'red'"
)


class TwoDoors(Roles):
    """A meta server, and a front over DuckDB beside one over PostgreSQL."""

    def __init__(self, folder: Path, postgres: PostgresServer) -> None:
        admins = f"front.admins={USER}"
        more = {"front-post": [f"front.postgres={postgres.dsn}", admins], "front-duck": [admins]}
        super().__init__(folder, more)
        self.ports = {name: free_port() for name in DOORS}

    def _settings(self, name: str) -> Iterator[str]:
        yield from super()._settings(name)
        if name in DOORS:
            yield from (f"front.pg_port={self.ports[name]}", "front.http_port=0")

    def dsn(self, door: str, user: str = USER) -> str:
        """Return how to reach a door."""
        return f"host=127.0.0.1 port={self.ports[door]} user={user} dbname=app"

    def psql(self, door: str, *commands: str, user: str = USER) -> subprocess.CompletedProcess[str]:
        """Run commands with psql."""
        flags = [word for command in commands for word in ("-c", command)]
        return subprocess.run(
            ["psql", "-X", "-w", "-v", "VERBOSITY=verbose", *flags, self.dsn(door, user)],
            env={**os.environ, "PGPASSWORD": PASSWORD}, capture_output=True, text=True,
            timeout=60, check=False,
        )  # fmt: skip

    def rows(self, door: str) -> list[tuple[Any, ...]]:
        """Return the row of namespace red."""
        with psycopg.connect(self.dsn(door), password=PASSWORD, autocommit=True) as connection:
            return connection.execute(ROWS).fetchall()


@pytest.fixture(scope="module")
def cluster(
    tmp_path_factory: pytest.TempPathFactory, postgres: PostgresServer
) -> Iterator[TwoDoors]:
    roles = TwoDoors(tmp_path_factory.mktemp("doors"), postgres)
    try:
        roles.start("meta")
        roles.start(*DOORS)
        yield roles
    finally:
        roles.stop()


@pytest.mark.parametrize("door", DOORS)
def test_a_namespace_is_made_changed_and_dropped_in_psql(cluster: TwoDoors, door: str) -> None:
    made = cluster.psql(
        door, "CREATE KV NAMESPACE red WITH (tenants = 'ann, bob', capacity = '4GiB', blend = on);"
    )
    assert (made.stdout.strip(), made.stderr) == ("CREATE KV NAMESPACE", "")
    for seen_at in DOORS:
        assert cluster.rows(seen_at) == [("ann, bob", 4 << 30, None, "evict", True)]
    changed = cluster.psql(door, "alter kv namespace red set (ttl = '12h', on_full = refuse)")
    assert changed.stdout.strip() == "ALTER KV NAMESPACE", changed.stderr
    assert cluster.rows(door) == [("ann, bob", 4 << 30, 43_200.0, "refuse", True)]
    again = cluster.psql(door, "CREATE KV NAMESPACE red", "CREATE KV NAMESPACE IF NOT EXISTS red")
    assert "42710" in again.stderr and "CREATE KV NAMESPACE" in again.stdout
    dropped = cluster.psql(door, "DROP KV NAMESPACE red", "DROP KV NAMESPACE IF EXISTS red")
    assert dropped.stdout.split("\n")[:2] == ["DROP KV NAMESPACE"] * 2, dropped.stderr
    assert cluster.rows(door) == []


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(
    ("statement", "code", "says"),
    [
        ("CREATE KV NAMESPACE x WITH (capacty = '1GiB')", "42601", "Did you mean capacity?"),
        ("CREATE KV NAMESPACE x WITH (capacity = 'much')", "22023", "Write 512MiB or 4GiB"),
        ("CREATE KV NAMESPACE", "42601", "at end of input"),
        ("DROP KV NAMESPACE nobody", "42704", "does not exist"),
        ("ALTER KV NAMESPACE nobody SET (ttl = 1)", "42704", "does not exist"),
    ],
)
def test_what_can_not_be_is_refused_and_the_session_lives(
    cluster: TwoDoors, door: str, statement: str, code: str, says: str
) -> None:
    done = cluster.psql(door, statement, "SELECT 'alive'")
    assert code in done.stderr and says in done.stderr, done.stderr
    assert "alive" in done.stdout


@pytest.mark.parametrize("door", DOORS)
def test_inside_a_transaction_it_is_refused_and_the_transaction_fails(
    cluster: TwoDoors, door: str
) -> None:
    done = cluster.psql(
        door, "BEGIN", "CREATE KV NAMESPACE red", "SELECT 1", "ROLLBACK", "SELECT 2"
    )
    assert "25001" in done.stderr and "25P02" in done.stderr, done.stderr
    assert cluster.rows(door) == []


def test_who_is_no_admin_may_not(cluster: TwoDoors) -> None:
    done = cluster.psql("front-duck", "DROP KV NAMESPACE IF EXISTS red", user="mallory")
    assert "42501" in done.stderr and "front.admins" in done.stderr


@pytest.mark.parametrize("door", DOORS)
def test_psycopg_sends_it_as_it_comes(cluster: TwoDoors, door: str) -> None:
    with psycopg.connect(cluster.dsn(door), password=PASSWORD, autocommit=True) as connection:
        assert connection.execute("CREATE KV NAMESPACE red").statusmessage == "CREATE KV NAMESPACE"
        assert connection.execute("DROP KV NAMESPACE red").statusmessage == "DROP KV NAMESPACE"
        if door == "front-post":
            with pytest.raises(psycopg.errors.FeatureNotSupported, match="can't be prepared"):
                connection.execute("CREATE KV NAMESPACE red", prepare=True)
        assert connection.execute("SELECT 1").fetchone() == (1,)
