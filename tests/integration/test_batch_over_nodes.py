"""A statement's batch over three equal nodes of real processes: who gets which rows.

What a share is depends on how fast the machine lets each node run, so bounds are wide; what they
were written against is 0, 0 and all.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from tests.fix_cluster import Cluster
from tierkv.compute.demo_model.data import INSTRUCTION, make_records

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]
ROWS = 120
NODES = 3
QUESTIONS = ["What did the customer buy?", "Where does the customer live?", "Who is it?"]


@pytest.fixture(scope="module")
def cluster(start_cluster: Callable[..., Cluster]) -> Cluster:
    cluster = start_cluster("--dmp", "1", "--compute", str(NODES))
    with connect(cluster) as session:
        session.execute("CREATE TABLE notes (id INTEGER, note VARCHAR)")
        with session.cursor() as cursor:
            cursor.executemany(
                "INSERT INTO notes VALUES (%s, %s)",
                [(record.record_id, record.text) for record in make_records(ROWS, 7)],
            )
    return cluster


def connect(cluster: Cluster) -> psycopg.Connection[tuple[Any, ...]]:
    dsn = f"host=127.0.0.1 port={cluster.pg_port} user=tierkv dbname=main"
    return psycopg.connect(dsn, autocommit=True)


def ask(cluster: Cluster, question: str, *settings: str) -> list[tuple[Any, ...]]:
    with connect(cluster) as session:
        for setting in settings:
            session.execute(setting)
        return session.execute(
            "SELECT id, ai_generate(%s || note || %s, options => '{\"max_tokens\": 8}')"
            " FROM notes ORDER BY id",
            (INSTRUCTION + "\n", "\nQuestion: " + question),
        ).fetchall()


def decisions(cluster: Cluster) -> list[tuple[str, list[dict[str, Any]]]]:
    """Where the last statement's calls went, and what was weighed for each."""
    rows = cluster.query(
        f"SELECT node_id, candidates FROM tierkv.routing_log ORDER BY decided_at DESC LIMIT {ROWS}"
    )
    return [(node, json.loads(text) if isinstance(text, str) else text) for node, text in rows]


def in_pages(candidate: dict[str, Any]) -> int:
    return int(candidate["reused_blocks"].get("L1", 0))


def test_equal_nodes_share_a_batch_and_later_questions_follow_the_kv(cluster: Cluster) -> None:
    for number, question in enumerate(QUESTIONS):
        rows = ask(cluster, question)
        decided = decisions(cluster)
        shares = Counter(node for node, _ in decided)
        print(question, dict(shares))
        assert len(shares) == NODES, shares
        assert min(shares.values()) >= ROWS / NODES / 2, shares
        assert max(shares.values()) <= ROWS / NODES * 1.5, shares
        if number:
            assert all(any(map(in_pages, weighed)) for _, weighed in decided), "decided blind"
            there = [in_pages(weighed[0]) == max(map(in_pages, weighed)) for _, weighed in decided]
            print("rows sent to their KV:", sum(there))
            assert sum(there) >= 0.6 * ROWS
        if number == len(QUESTIONS) - 1:
            assert rows == ask(cluster, question, "SET tierkv.cache = off")
