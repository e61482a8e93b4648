"""A tenant with many waiting calls does not keep another tenant's call from its turn."""

from __future__ import annotations

import threading
from collections.abc import Callable

import psycopg
import pytest

from tests.fix_cluster import Cluster, wait_for

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]
MANY = (
    "SELECT ai_generate('{}: tell of ' || i, options => '{{\"max_tokens\": 16}}') "
    "FROM range(30) t(i)"
)
"""Fewer calls than a bulk statement has: all have the same priority."""


@pytest.fixture(scope="module")
def cluster(start_cluster: Callable[..., Cluster]) -> Cluster:
    return start_cluster("--dmp", "1", "--compute", "1", "--set", "front.max_in_flight_per_node=1")


def run(cluster: Cluster, user: str, statement: str) -> int:
    dsn = f"host=127.0.0.1 port={cluster.pg_port} user={user} dbname=main"
    with psycopg.connect(dsn, autocommit=True) as session:
        return len(session.execute(statement).fetchall())


def waiting(cluster: Cluster, tenant: str) -> int:
    ((count,),) = cluster.query(f"SELECT count(*) FROM tierkv.queue WHERE tenant = '{tenant}'")
    assert isinstance(count, int)
    return count


def test_a_quiet_tenant_is_answered_amid_a_loud_one(cluster: Cluster) -> None:
    assert run(cluster, "loud", MANY.format("Warm")) == 30  # The time between turns is known.
    loud = [
        threading.Thread(target=run, args=(cluster, "loud", MANY.format(f"Session {number}")))
        for number in range(3)
    ]
    for thread in loud:
        thread.start()
    wait_for(lambda: waiting(cluster, "loud") > 60, what="the loud tenant's calls wait")
    assert (
        run(cluster, "quiet", "SELECT ai_generate('A word', options => '{\"max_tokens\": 2}')") == 1
    )
    left = waiting(cluster, "loud")
    for thread in loud:
        thread.join()
    assert left > 30, "the quiet tenant's call was answered long before the loud tenant's last one"
