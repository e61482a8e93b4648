"""Namespaces and the cluster secret survive restarts, and nobody names himself into a namespace."""

from __future__ import annotations

import sqlite3
import stat
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tierkv.kvcore.errors import ConfigError, DirectoryUnavailableError, UserError
from tierkv.kvcore.layout import KvCodec
from tierkv.kvcore.request import BlendSelector, ReusePolicy
from tierkv.metaserver.client import Namespace
from tierkv.metaserver.database_file import DatabaseFile
from tierkv.metaserver.namespaces import NamespaceStore


@contextmanager
def opened(
    database: str | Path = ":memory:", secret: bytes | None = None
) -> Iterator[NamespaceStore]:
    with closing(NamespaceStore(str(database), cluster_secret=secret)) as store:
        yield store


def key(store: NamespaceStore, tenant: str) -> bytes:
    return store.resolve(tenant, model_revision="r", layout_fingerprint=b"l").namespace_key


def test_secret_and_namespaces_survive_a_restart(tmp_path: Path) -> None:
    database = tmp_path / "new" / "meta.db"
    shared = Namespace("team", tenants=("a", "b"), cache_enabled=False)
    with opened(database) as store:
        before = key(store, "a"), key(store, "c")
        assert store.put(shared) == shared
        during = key(store, "a")
        assert during != before[0]
    with opened(database) as store:
        assert store.namespaces() == (shared,)
        assert (key(store, "a"), key(store, "c")) == (during, before[1])
        store.put(Namespace("team", tenants=("b",)))
        assert key(store, "a") == before[0]
    assert stat.S_IMODE(database.stat().st_mode) == 0o600


def damage(database: Path) -> None:
    database.write_bytes(b"garbage" * 1000)


def test_a_damaged_database_is_set_aside_and_its_copy_takes_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    database = tmp_path / "meta.db"
    team = Namespace("team", tenants=("a", "b"))
    with opened(database) as store:
        store.put(team)
        before = key(store, "c")
        assert store.trouble == ""
    damage(database)
    with opened(database) as store:
        assert (store.namespaces(), key(store, "c")) == ((team,), before)
        assert "set aside" in store.trouble and "took its place" in store.trouble
    assert [record.levelname for record in caplog.records] == ["CRITICAL"]
    assert (tmp_path / "meta.db.bad").read_bytes().startswith(b"garbage")
    with opened(database) as store:
        assert store.trouble == ""


def test_without_a_copy_the_secret_is_still_there(tmp_path: Path) -> None:
    database, backup = tmp_path / "meta.db", tmp_path / "meta.db.backup"
    with opened(database) as store:
        before = key(store, "a")
    assert stat.S_IMODE((tmp_path / "meta.db.secret").stat().st_mode) == 0o600
    damage(database)
    damage(backup)
    with opened(database) as store:
        assert key(store, "a") == before
        assert "namespaces must be made again" in store.trouble
    database.unlink()
    backup.unlink()
    with opened(database) as store:
        assert key(store, "a") == before


def test_a_lost_secret_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    database = tmp_path / "meta.db"
    with opened(database):
        pass
    damage(database)
    for name in ("backup", "secret"):
        (tmp_path / f"meta.db.{name}").unlink()
    with opened(database):
        assert "cluster secret may be another one" in caplog.text


def test_each_cluster_makes_its_own_secret() -> None:
    with opened() as one, opened() as other:
        assert key(one, "a") != key(other, "a")


def test_a_configured_secret_gives_equal_keys_on_every_meta_server(tmp_path: Path) -> None:
    secret = b"the same on all of them"
    with opened(secret=secret) as one, opened(tmp_path / "meta.db", secret) as other:
        assert key(one, "a") == key(other, "a")


def test_durability_is_that_of_full_synchronous_wal(tmp_path: Path) -> None:
    with opened(tmp_path / "meta.db") as store:
        assert isinstance(store._database, DatabaseFile)
        connection = store._database._open
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert connection.execute("PRAGMA synchronous").fetchone() == (2,)
        store.put(Namespace("x"))
        with closing(sqlite3.connect(tmp_path / "meta.db")) as other:
            assert other.execute("SELECT name FROM namespaces").fetchall() == [("x",)]


def test_tenants_are_kept_once_and_sorted() -> None:
    with opened() as store:
        assert store.put(Namespace("team", ("b", "a", "b"))).tenants == ("a", "b")


def test_a_tenant_belongs_to_one_namespace_and_can_move() -> None:
    with opened() as store:
        store.put(Namespace("one", ("a",)))
        with pytest.raises(UserError, match="already belongs to namespace one") as caught:
            store.put(Namespace("two", ("a",)))
        assert caught.value.hint == "Remove a from one first."
        store.put(Namespace("one", ("b",)))
        store.put(Namespace("two", ("a",)))
        assert store.resolve("a", model_revision="r", layout_fingerprint=b"l").domain == "two"


def test_a_tenants_own_policy_gives_way_to_its_namespace() -> None:
    with opened() as store:
        store.put(Namespace("a", cache_enabled=False))
        alone = key(store, "a")
        store.put(Namespace("team", ("a",)))
        grant = store.resolve("a", model_revision="r", layout_fingerprint=b"l")
        assert (grant.domain, grant.cache_enabled) == ("team", True)
        assert grant.namespace_key != alone


@pytest.mark.parametrize("name", ["", "a b", "shared team", "ä", "-x", "x" * 129, "a\n", "a\0b"])
def test_impossible_names_are_refused(name: str) -> None:
    with opened() as store:
        store.put(Namespace("team", ("t",)))
        for attempt in (Namespace(name), Namespace("ok", (name,))):
            with pytest.raises(UserError, match="is not a"):
                store.put(attempt)
        with pytest.raises(UserError, match="is not a tenant name"):
            key(store, name)
        assert [namespace.name for namespace in store.namespaces()] == ["team"]


def test_too_many_tenants_are_refused() -> None:
    with opened() as store, pytest.raises(UserError, match="at most 10000"):
        store.put(Namespace("team", tuple(f"t{n}" for n in range(10_001))))


def test_a_file_that_is_no_database_is_named_with_the_cure(tmp_path: Path) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("this is not a database, and never was one " * 50)
    for path in (tmp_path, text / "below" / "a.db"):
        with pytest.raises(ConfigError, match=r"meta\.database") as caught:
            NamespaceStore(str(path))
        assert ":memory:" in caught.value.hint


def test_a_closed_store_does_not_take_namespaces() -> None:
    with opened() as store:
        pass
    with pytest.raises(DirectoryUnavailableError, match="could not be stored"):
        store.put(Namespace("x"))


POLICY = ReusePolicy(KvCodec.FP8, True, 0.5, BlendSelector.QUERY, True)


def test_a_policy_survives_a_restart(tmp_path: Path) -> None:
    with opened(tmp_path / "meta.db") as store:
        store.put(Namespace("a", policy=POLICY))
    with opened(tmp_path / "meta.db") as store:
        assert store.namespaces() == (Namespace("a", policy=POLICY),)


def test_a_database_from_before_policies_is_migrated(tmp_path: Path) -> None:
    database = tmp_path / "meta.db"
    with closing(sqlite3.connect(database)) as old, old:
        old.execute("CREATE TABLE cluster (name TEXT PRIMARY KEY, value BLOB NOT NULL)")
        old.execute(
            "CREATE TABLE namespaces (name TEXT PRIMARY KEY, tenants TEXT NOT NULL, "
            "cache_enabled INTEGER NOT NULL)"
        )
        old.execute("INSERT INTO cluster VALUES ('secret', ?)", (b"s" * 32,))
        old.execute("""INSERT INTO namespaces VALUES ('team', '["a", "b"]', 0)""")
    team = Namespace("team", ("a", "b"), cache_enabled=False)
    with opened(database) as store:
        before = key(store, "a")
        assert store.namespaces() == (team,)
        store.put(replace(team, policy=ReusePolicy(blend=True)))
        assert key(store, "a") == before
    with opened(database) as store, opened(secret=b"s" * 32) as same_secret:
        assert store.namespaces()[0].policy.blend
        assert key(store, "c") == key(same_secret, "c")


def test_tenants_without_a_namespace_have_the_default_policy() -> None:
    with closing(NamespaceStore(":memory:", default_policy=POLICY)) as store:
        store.put(Namespace("own"))
        grants = {
            tenant: store.resolve(tenant, model_revision="r", layout_fingerprint=b"l")
            for tenant in ("own", "other")
        }
        assert grants["other"].policy == POLICY
        assert grants["own"].policy == ReusePolicy()


@pytest.mark.parametrize(
    "stored",
    ["{", '{"kv_codec": "fp9"}', '{"selector": "best"}', '{"blend": true, "later": 1}',
     '{"recompute_ratio": 0}'],
)  # fmt: skip
def test_a_policy_this_version_does_not_know_is_named(tmp_path: Path, stored: str) -> None:
    with opened(tmp_path / "meta.db") as store:
        store.put(Namespace("team"))
    with closing(sqlite3.connect(tmp_path / "meta.db")) as database, database:
        database.execute("UPDATE namespaces SET policy = ?", (stored,))
    with pytest.raises(ConfigError, match="policy of namespace team"):
        NamespaceStore(str(tmp_path / "meta.db"))


def test_a_second_owner_of_the_database_is_refused_while_the_first_lives(tmp_path: Path) -> None:
    path = str(tmp_path / "meta.sqlite")
    first = NamespaceStore(path)
    with pytest.raises(ConfigError, match="owned by a running meta server"):
        NamespaceStore(path)
    first.put(Namespace("acme", ("a",)))
    first.close()
    second = NamespaceStore(path)
    assert [namespace.name for namespace in second.namespaces()] == ["acme"]
    second.close()
