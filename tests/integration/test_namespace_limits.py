"""A namespace's limits in a cluster of processes: kept at every look, and nobody else's loss.

The neighbour floods the pool node; the victim's KV stays. After kill -9 the ledger is a recount.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from tests.fix_cluster import ROOT, wait_for
from tests.fix_roles import COMPUTE, Roles

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]
CAPACITY = 4 << 20
FLOOD = (
    "SELECT count(ai_generate('Loud ' || i || repeat(' words about ' || i, 40), "
    "options => '{\"max_tokens\": 1}')) FROM range(%s, %s) t(i)"
)
_LOST = "SELECT * FROM tierkv.cache_errors WHERE kind = 'transport_error'"
ASK = (
    "SELECT i, ai_generate('Quiet ' || i || repeat(' words about ' || i, 40), "
    "options => '{\"max_tokens\": 4}') FROM range(6) t(i) ORDER BY i"
)


class Limited(Roles):
    """Roles, used by several SQL users, each its own tenant."""

    def sql(self, user: str, statement: str) -> list[tuple[Any, ...]]:
        """Run a statement as a user."""
        dsn = f"host=127.0.0.1 port={self.pg_port} user={user} dbname=main"
        with psycopg.connect(dsn, autocommit=True) as connection:
            cursor = connection.execute(statement)
            return cursor.fetchall() if cursor.description else []

    def namespace(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run ``tierkv namespace``."""
        settings = (f"cluster.meta_address=127.0.0.1:{self._ports['meta']}", "cluster.token=roles")
        flags = [word for each in settings for word in ("--set", each)]
        return subprocess.run(
            [sys.executable, "-m", "tierkv", "namespace", *arguments, *flags],
            cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip

    def used(self, column: str = "used_bytes", name: str = "loud") -> int | None:
        """Return a column of the namespace's row."""
        rows = self.query(f"SELECT {column} FROM tierkv.namespaces WHERE name = '{name}'")
        return rows[0][0] if rows else None

    def blocks_of(self, *tenants: str) -> int:
        """Return how many blocks of tenants the directory knows in the pool's memory."""
        names = ", ".join(f"'{tenant}'" for tenant in tenants)
        counted = "SELECT count(*) FROM tierkv.kvcache_blocks WHERE tier = 'L2'"
        return int(self.query(f"{counted} AND cache_scope IN ({names})")[0][0])


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Limited]:
    more = {"compute-0": ["compute.l1_capacity=4MiB"]}
    roles = Limited(tmp_path_factory.mktemp("limits"), more)
    try:
        roles.start("meta", "dmp-0", *COMPUTE, "front")
        yield roles
    finally:
        roles.stop()


def test_a_loud_neighbour_keeps_to_its_memory_and_the_victim_keeps_its_kv(
    cluster: Limited,
) -> None:
    made = cluster.namespace(
        "set", "loud", "--tenant", "lou", "--tenant", "liz", "--capacity", "4MiB"
    )
    assert made.returncode == 0 and "4.0MiB" in made.stdout, made.stderr
    wait_for(lambda: cluster.used() == 0, what="the pool node knows the namespace")

    expected = cluster.sql("vic", ASK)
    wait_for(lambda: cluster.blocks_of("vic") > 0, what="the victim's KV is in the pool")
    kept = cluster.blocks_of("vic")

    most, over = [0], threading.Event()

    def look() -> None:
        while not over.is_set():
            most[0] = max(most[0], cluster.used() or 0)

    looking = threading.Thread(target=look)
    looking.start()
    try:
        cluster.sql("lou", FLOOD % (0, 60))
        cluster.sql("liz", FLOOD % (60, 120))
    finally:
        over.set()
        looking.join()
    assert 0 < most[0] <= CAPACITY
    wait_for(lambda: cluster.used("evicted_for_quota") or 0, what="own blocks went")
    assert cluster.used("evicted_for_memory") == 0
    assert cluster.blocks_of("vic") >= kept
    cluster.drop_caches()
    assert cluster.sql("vic", ASK) == expected

    before = cluster.used("blocks")
    cluster.kill("dmp-0")
    cluster.start("dmp-0")
    wait_for(lambda: cluster.used("blocks") == before, what="the ledger after kill -9")
    assert cluster.blocks_of("lou", "liz") == before
    assert cluster.sql("vic", ASK) == expected

    refusing = cluster.namespace("set", "loud", "--on-full", "refuse", "--capacity", "2MiB")
    assert refusing.returncode == 0, refusing.stderr
    wait_for(lambda: (cluster.used() or 0) <= 2 << 20, what="the smaller capacity holds")
    cluster.sql("lou", FLOOD % (120, 140))
    wait_for(lambda: cluster.used("refused_blocks") or 0, what="blocks are refused")

    assert cluster.namespace("drop", "loud").returncode == 0
    wait_for(lambda: cluster.used() is None, what="the namespace is gone")
    again = cluster.namespace("drop", "loud")
    assert again.returncode == 1 and "no namespace 'loud'" in again.stderr


def test_unused_kv_of_a_namespace_ends(cluster: Limited) -> None:
    assert cluster.namespace("set", "tim", "--ttl", "2s").returncode == 0
    wait_for(lambda: cluster.used(name="tim") == 0, what="the pool node knows the namespace")
    cluster.sql("tim", FLOOD % (0, 3))
    wait_for(lambda: cluster.used("evicted_for_ttl", "tim") or 0, what="old blocks go")
    wait_for(lambda: cluster.blocks_of("tim") == 0, what="the directory knows")
    wait_for(lambda: cluster.used("used_bytes", "tim") == 0, what="the next heartbeat")


def test_a_new_version_frees_the_old_ones_kv_and_answers_stay_the_same(cluster: Limited) -> None:
    cluster.sql("ver", "CREATE KV NAMESPACE ver WITH (version = 'r1', eviction = lfu)")
    wait_for(lambda: cluster.used(name="ver") == 0, what="the pool node knows the namespace")
    expected = cluster.sql("ver", ASK)
    old = wait_for(lambda: cluster.used("blocks", "ver"), what="KV of r1 is in the pool")
    cluster.sql("ver", "ALTER KV NAMESPACE ver SET VERSION 'r2'")
    wait_for(lambda: cluster.used("blocks", "ver") == 0, what="r1 is freed")
    # More may have arrived since the look; what arrives late is refused.
    assert (cluster.used("evicted_for_version", "ver") or 0) >= old
    assert cluster.sql("ver", ASK) == expected
    wait_for(lambda: (cluster.used("blocks", "ver") or 0) >= old, what="KV of r2 is in the pool")
    assert cluster.sql("ver", ASK) == expected
    shown = cluster.query(
        "SELECT version, eviction, disk_blocks FROM tierkv.namespaces WHERE name = 'ver'"
    )
    assert shown == [("r2", "lfu", 0)]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--capacity", "lots"], "'lots' is no size"),
        (["--ttl", "soon"], "'soon' is no duration"),
        (["--on-full", "explode"], "explode"),
        (["--eviction", "clock"], "no eviction policy 'clock'"),
        (["--version", "r 2"], "is not a version name"),
        (["--read-bandwidth", "fast"], "'fast' is no bandwidth"),
        (["--media", "tape"], "no medium 'tape'"),
        (["--model", "a model"], "'a model' is no name of a model"),
    ],
)
def test_bad_limits_are_refused(cluster: Limited, arguments: list[str], says: str) -> None:
    refused = cluster.namespace("set", "x", *arguments)
    assert refused.returncode != 0 and says in refused.stderr


def test_a_namespace_of_one_model_applies_to_no_other(cluster: Limited) -> None:
    made = "CREATE KV NAMESPACE {} WITH (tenants = 'mia', capacity = '1GiB', model = '{}')"
    with pytest.raises(psycopg.Error, match="no model 'tierkv-dema' is served") as caught:
        cluster.sql("mia", made.format("mine", "tierkv-dema"))
    assert "tierkv-demo" in str(caught.value)
    other = cluster.namespace(
        "set", "other", "--tenant", "mia", "--model", "large", "--capacity", "1GiB"
    )
    assert other.returncode == 0, other.stderr
    wait_for(lambda: cluster.used(name="other") == 0, what="the pool node knows the namespace")
    expected = cluster.sql("mia", ASK)
    wait_for(lambda: cluster.blocks_of("mia") > 0, what="KV is in the pool")
    cluster.sql("mia", made.format("mine", "tierkv-demo"))
    assert cluster.sql("mia", ASK) == expected
    wait_for(lambda: cluster.used(name="mine") or 0, what="blocks of the model are counted")
    assert cluster.used(name="other") == 0
    shown = cluster.query(
        "SELECT name, model_name FROM tierkv.namespaces WHERE tenants = 'mia' ORDER BY name"
    )
    assert shown == [("mine", "tierkv-demo"), ("other", "large")]


def test_who_is_over_a_rate_computes_and_answers_stay_the_same(cluster: Limited) -> None:
    cluster.sql("tom", "CREATE KV NAMESPACE tom WITH (weight = 2, iops = 100000)")
    wait_for(lambda: cluster.used(name="tom") == 0, what="the pool node knows the namespace")
    expected = cluster.sql("tom", ASK)
    wait_for(lambda: cluster.used("write_bytes", "tom") or 0, what="KV is in the pool")
    cluster.drop_caches()
    assert cluster.sql("tom", ASK) == expected
    wait_for(lambda: cluster.used("read_bytes", "tom") or 0, what="KV was read")
    assert cluster.used("throttled", "tom") == 0

    cluster.sql(
        "tom", "ALTER KV NAMESPACE tom SET (read_bandwidth = '1KB/s', write_bandwidth = '1KB/s')"
    )
    told = "SELECT read_bytes_per_s FROM tierkv.namespaces WHERE name = 'tom'"
    assert cluster.query(told) == [(1000,)]

    def throttled() -> int:
        cluster.drop_caches()
        assert cluster.sql("tom", ASK) == expected
        return cluster.used("throttled", "tom") or 0

    lost = cluster.query(_LOST)
    wait_for(throttled, what="reads are refused")
    quiet = cluster.sql("vic", ASK)
    cluster.drop_caches()
    assert cluster.sql("vic", ASK) == quiet
    assert cluster.query(_LOST) == lost, "no node is left alone for a rate"
