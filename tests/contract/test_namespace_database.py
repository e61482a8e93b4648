"""The NamespaceDatabase contract: in memory, in a SQLite file, and in a real PostgreSQL."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psycopg
import pytest

from tests.fix_postgres import PASSWORD, PostgresServer
from tierkv.kvcore.errors import ConfigError, DirectoryUnavailableError, UserError
from tierkv.metaserver.client import Namespace
from tierkv.metaserver.database_file import MEMORY, SCHEMA_VERSION, DatabaseFile
from tierkv.metaserver.database_postgres import MIGRATIONS, PostgresDatabase
from tierkv.metaserver.namespace_database import (
    NamespaceDatabase,
    NamespaceRow,
    Stored,
    StoredRecord,
)
from tierkv.metaserver.namespaces import NamespaceStore

Opens = Callable[[], NamespaceDatabase]


@pytest.fixture
def url(postgres: PostgresServer) -> Iterator[str]:
    yield postgres.url
    with psycopg.connect(postgres.dsn, autocommit=True) as connection:
        connection.execute("DROP SCHEMA IF EXISTS tierkv_meta CASCADE")


@pytest.fixture(params=["memory", "file", "postgres"])
def opens(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Opens]:
    """Opens one database, again and again where it lasts."""
    made: list[NamespaceDatabase] = []

    def open_one() -> NamespaceDatabase:
        if request.param == "postgres":
            database: NamespaceDatabase = PostgresDatabase(request.getfixturevalue("url"))
        else:
            file = MEMORY if request.param == "memory" else str(tmp_path / "meta.db")
            database = DatabaseFile(file)
        database.open()
        made.append(database)
        return database

    if request.param == "postgres":
        request.getfixturevalue("url")
    yield open_one
    for database in made:
        database.close()


def row(name: str, tenants: str = "[]") -> NamespaceRow:
    return NamespaceRow(name, tenants, True, "{}")


def put(database: NamespaceDatabase, new: NamespaceRow) -> Sequence[NamespaceRow]:
    return database.write(lambda stored: new).namespaces


def test_what_was_written_is_read(opens: Opens) -> None:
    database = opens()
    assert list(database.stored().namespaces) == []
    assert list(put(database, row("b"))) == [row("b")]
    assert list(put(database, row("a", '["x"]'))) == [row("a", '["x"]'), row("b")]
    changed = NamespaceRow("b", '["y", "é"]', False, '{"blend": true}')
    put(database, changed)
    assert list(database.stored().namespaces) == [row("a", '["x"]'), changed]
    assert database.trouble == ""


def test_records_are_kept_beside_namespaces(opens: Opens) -> None:
    database = opens()
    put(database, row("a"))
    limit, key = StoredRecord("limit", "tenant:ann", "{}"), StoredRecord("key", "k1", '{"é": 1}')
    database.write_record(limit)
    assert database.write_record(key) == Stored([row("a")], [key, limit])
    changed = limit._replace(body='{"requests": 1}')
    assert list(database.write_record(changed).records) == [key, changed]
    assert list(database.remove_record("key", "none").records) == [key, changed]
    assert database.remove_record("key", "k1") == database.stored() == Stored([row("a")], [changed])


def test_the_first_secret_stays(opens: Opens) -> None:
    database = opens()
    assert database.secret(b"1" * 32) == b"1" * 32
    assert database.secret(b"2" * 32) == b"1" * 32


def test_a_check_that_refuses_changes_nothing(opens: Opens) -> None:
    database = opens()
    put(database, row("a"))

    def refuse(stored: Stored) -> NamespaceRow:
        assert [each.name for each in stored.namespaces] == ["a"]
        raise UserError("no")

    with pytest.raises(UserError, match="no"):
        database.write(refuse)
    assert list(database.stored().namespaces) == [row("a")]
    put(database, row("b"))


@pytest.mark.parametrize("opens", ["file", "postgres"], indirect=True)
def test_it_lasts(opens: Opens) -> None:
    database = opens()
    secret = database.secret(b"1" * 32)
    put(database, row("a"))
    database.close()
    again = opens()
    assert (again.secret(b"2" * 32), list(again.stored().namespaces)) == (secret, [row("a")])


@pytest.mark.parametrize("opens", ["postgres"], indirect=True)
class TestShared:
    """Several servers write to one PostgreSQL."""

    def test_writes_of_others_are_told(self, opens: Opens) -> None:
        one, other = opens(), opens()
        told: list[Stored] = []
        heard = threading.Condition()

        def changed(stored: Stored) -> None:
            with heard:
                told.append(stored)
                heard.notify()

        one.follow(changed)
        put(other, row("a"))
        with heard:
            assert heard.wait_for(
                lambda: told and list(told[-1].namespaces) == [row("a")], timeout=30
            )

    def test_no_write_is_lost_between_writers(self, opens: Opens) -> None:
        """Each adds a tenant to what it read in its transaction."""
        databases = [opens() for _ in range(4)]
        put(databases[0], row("n"))

        def add(database: NamespaceDatabase) -> None:
            for _ in range(10):
                database.write(lambda stored: row("n", stored.namespaces[0].tenants + "x"))

        threads = [threading.Thread(target=add, args=(each,)) for each in databases]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert databases[1].stored().namespaces[0].tenants == "[]" + 40 * "x"

    def test_first_starts_at_once_make_one_schema_and_one_secret(
        self, opens: Opens, url: str
    ) -> None:
        found: list[bytes] = []

        def start(number: int) -> None:
            database = PostgresDatabase(url)
            database.open()
            found.append(database.secret(bytes([number]) * 32))
            database.close()

        threads = [threading.Thread(target=start, args=(n,)) for n in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 6 and len(set(found)) == 1

    def test_a_schema_of_the_next_release_is_used_a_later_one_refused(
        self, opens: Opens, url: str
    ) -> None:
        database = opens()
        put(database, row("a"))
        with psycopg.connect(url, autocommit=True) as connection:
            version = "UPDATE tierkv_meta.schema_version SET version = %s"
            connection.execute("ALTER TABLE tierkv_meta.namespaces ADD COLUMN quota bigint")
            connection.execute(version, (len(MIGRATIONS) + 1,))
            newer = opens()
            put(newer, row("b"))
            assert [each.name for each in newer.stored().namespaces] == ["a", "b"]
            connection.execute(version, (len(MIGRATIONS) + 2,))
        with pytest.raises(ConfigError, match="has version"):
            opens()


def test_a_file_of_the_next_release_is_used_a_later_one_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "meta.db")

    def opened() -> DatabaseFile:
        database = DatabaseFile(path)
        database.open()
        return database

    def change(*statements: str) -> None:
        with contextlib.closing(sqlite3.connect(path)) as connection, connection:
            for statement in statements:
                connection.execute(statement)

    database = opened()
    put(database, row("a"))
    database.close()
    change(
        "ALTER TABLE namespaces ADD COLUMN quota INTEGER",
        "UPDATE namespaces SET quota = 7",
        f"PRAGMA user_version = {SCHEMA_VERSION + 1}",
    )
    newer = opened()
    put(newer, row("a", '["t"]'))
    put(newer, row("b"))
    assert newer.stored().namespaces == [row("a", '["t"]'), row("b")]
    newer.close()
    with contextlib.closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT name, quota FROM namespaces ORDER BY 1").fetchall() == [
            ("a", 7), ("b", None)
        ]  # fmt: skip
    change(f"PRAGMA user_version = {SCHEMA_VERSION + 2}")
    with pytest.raises(ConfigError, match="has version"):
        opened()


def test_stores_of_two_servers_agree(url: str) -> None:
    one, other = NamespaceStore(url), NamespaceStore(url)

    def key(store: NamespaceStore, tenant: str) -> bytes:
        return store.resolve(tenant, model_revision="m", layout_fingerprint=b"l").namespace_key

    assert key(one, "ann") == key(other, "ann") != key(one, "bob")
    one.put(Namespace("team", ("ann", "bob")))
    with pytest.raises(UserError, match="already belongs to namespace team"):
        other.put(Namespace("rivals", ("ann",)))
    wanted = key(one, "ann")
    deadline = threading.Event()
    for _ in range(300):
        if key(other, "ann") == key(other, "bob") == wanted:
            break
        deadline.wait(0.1)
    assert key(other, "bob") == wanted
    one.close()
    other.close()


def test_a_malformed_url_is_told_without_its_password() -> None:
    with pytest.raises(ConfigError, match="malformed") as refused:
        NamespaceStore("postgresql://alice:correct horse@127.0.0.1/app")
    assert "horse" not in str(refused.value)


def test_reads_outlive_postgres_and_writes_say_what_is_wrong(postgres: PostgresServer) -> None:
    store = NamespaceStore(postgres.url)
    store.put(Namespace("before"))
    postgres.stop("immediate")
    try:
        assert store.resolve("before", model_revision="m", layout_fingerprint=b"l").cache_enabled
        with pytest.raises(DirectoryUnavailableError) as refused:
            store.put(Namespace("after"))
        assert "meta.database" in refused.value.hint and PASSWORD not in str(refused.value)
        with pytest.raises(ConfigError, match="PostgreSQL can't be used") as unusable:
            NamespaceStore(postgres.url)
        assert PASSWORD not in str(unusable.value)
    finally:
        postgres.start()
    store.put(Namespace("after"))
    assert [each.name for each in store.namespaces()] == ["after", "before"]
    store.close()
    with psycopg.connect(postgres.dsn, autocommit=True) as connection:
        connection.execute("DROP SCHEMA tierkv_meta CASCADE")


def test_what_was_read_before_a_write_is_not_told_after_it(url: str) -> None:
    database = PostgresDatabase(url)
    database.open()
    before = database.stored()
    told: list[Stored] = []
    database._tell(0, before, told.append)
    put(database, row("a"))
    database._tell(0, before, told.append)
    database._tell(1, database.stored(), told.append)
    database.close()
    assert [len(stored.namespaces) for stored in told] == [0, 1]
