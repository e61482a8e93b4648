"""Statistics of a real front process: exact, over both protocols, after kill -9 and a stop."""

from __future__ import annotations

import json
import signal
import sqlite3
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.rows import dict_row

from tests.fix_cluster import Cluster, wait_for

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

ASK = (
    "SELECT ai_generate('Note ' || i || ': Mia Brandt came from Porto and bought a kettle, Jonas "
    "Ortiz a blender. Who came from Porto?', options => '{\"max_tokens\": 2}')"
)
"""A prompt of several blocks for each row."""


@pytest.fixture(scope="module")
def cluster(start_cluster: Callable[..., Cluster]) -> Cluster:
    return start_cluster("--set", "front.stats_interval_s=0.2")


def connect(cluster: Cluster, user: str = "tierkv") -> psycopg.Connection[dict[str, Any]]:
    dsn = f"host=127.0.0.1 port={cluster.pg_port} user={user} dbname=main"
    return psycopg.connect(dsn, autocommit=True, row_factory=dict_row)


def read(cluster: Cluster, sql: str) -> list[dict[str, Any]]:
    with connect(cluster) as connection:
        rows = connection.execute(sql).fetchall()
    for row in rows:
        row.pop("as_of", None)
    return rows


def stored(cluster: Cluster, sql: str) -> list[tuple[Any, ...]]:
    """Look into the file, as a front that starts would."""
    with closing(sqlite3.connect(cluster.run_dir / "statistics.sqlite", timeout=10)) as file:
        return file.execute(sql).fetchall()


def test_every_counter_is_exact_with_many_sessions(cluster: Cluster) -> None:
    read(cluster, "SELECT tierkv.stat_reset()")
    read(cluster, "SELECT tierkv.stat_reset('query_log')")

    def run(user: str) -> None:
        with connect(cluster, user) as connection:
            for _ in range(3):
                connection.execute(f"{ASK} AS a FROM range(4) r(i), range(2) s(j)")  # type: ignore[arg-type]  # no literal

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(run, ["ann", "bob", "ann", "cid"]))
    statements = read(cluster, "SELECT * FROM tierkv.stat_statements ORDER BY userid")
    assert [(row["userid"], row["calls"], row["failures"]) for row in statements] == [
        ("ann", 6, 0),
        ("bob", 3, 0),
        ("cid", 3, 0),
    ]
    assert len({row["queryid"] for row in statements}) == 1
    for row in statements:
        runs = row["calls"]
        assert (row["ai_calls"], row["ai_calls_deduped"]) == (8 * runs, 4 * runs)
        assert (row["rounds"], row["errors"]) == (2 * runs, 0)
        assert 0 < row["llm_wait_time"] <= row["total_time"]
    (function,) = read(cluster, "SELECT * FROM tierkv.stat_functions")
    usage = read(cluster, "SELECT * FROM tierkv.usage_history")
    log = read(cluster, "SELECT * FROM tierkv.query_log WHERE type = 'QueryFinish'")
    assert (function["calls"], function["rows"]) == (48, 96)
    assert function["model_name"] == "tierkv-demo"
    assert 0 < function["mean_ttft"] < function["total_time"]
    assert function["p95_ttft"] > 0
    assert (len(usage), len(log)) == (12, 12)
    assert {row["query_id"] for row in usage} == {row["query_id"] for row in log}
    for name in ("prompt_tokens", "cached_tokens", "completion_tokens", "errors"):
        sums = {sum(row[name] for row in rows) for rows in (statements, usage, log, [function])}
        assert len(sums) == 1, name
    # Greedy answers to the same prompts are the same; two sessions of ann ran what bob's one did.
    ann, bob, cid = ((row["prompt_tokens"], row["completion_tokens"]) for row in statements)
    assert ann == (2 * bob[0], 2 * bob[1])
    assert bob == cid
    assert sum(row["cached_tokens"] for row in statements) > 0


def test_both_protocols_reset_and_count_parameters_apart_from_literals(cluster: Cluster) -> None:
    with connect(cluster) as connection:
        connection.execute("SELECT tierkv.stat_reset()")
        for prompt in ("Secret one", "Secret two"):
            connection.execute("SELECT ai_generate(%s, options => '{\"max_tokens\": 1}')", [prompt])
        shown = connection.execute("SELECT query, calls FROM tierkv.stat_statements").fetchall()
        assert shown == [{"query": "SELECT ai_generate($1, options => $2)", "calls": 2}]
        # Parameters make it the extended protocol.
        done = connection.execute("SELECT tierkv.stat_reset(%s) AS at", ["statements"]).fetchone()
        assert done is not None
        assert connection.execute("SELECT * FROM tierkv.stat_statements").fetchall() == []
        kept = connection.execute("SELECT calls, stats_reset FROM tierkv.stat_functions").fetchone()
        assert kept is not None
        assert kept["calls"] == 2
        assert kept["stats_reset"] < done["at"]
        with pytest.raises(psycopg.errors.InvalidParameterValue, match="no statistics 'all'"):
            connection.execute("SELECT tierkv.stat_reset(%s)", ["all"])
        with pytest.raises(psycopg.errors.InvalidParameterValue, match="no statistics 'all'"):
            connection.execute("SELECT tierkv.stat_reset('all')")
        assert len(connection.execute("SELECT * FROM tierkv.stat_functions").fetchall()) == 1


def test_a_statement_is_in_the_views_as_soon_as_it_has_ended(cluster: Cluster) -> None:
    counted = (
        "SELECT sum(query_tokens) AS asked, sum(hit_tokens) AS hit, min(as_of) AS as_of "
        "FROM tierkv.stat_kvcache WHERE tier = 'L1'"
    )
    spent = "SELECT sum(prompt_tokens) AS prompt FROM tierkv.usage_history"
    with connect(cluster) as connection:
        for _ in range(5):
            before = connection.execute(counted).fetchone()
            used = connection.execute(spent).fetchone()
            connection.execute(f"{ASK} AS a FROM range(3) r(i), range(1) s(j)")  # type: ignore[arg-type]  # no literal
            after = connection.execute(counted).fetchone()
            now_used = connection.execute(spent).fetchone()
            assert before is not None and after is not None and used is not None
            assert now_used is not None
            asked = after["asked"] - (before["asked"] or 0)
            assert asked == now_used["prompt"] - (used["prompt"] or 0) > 0
            assert before["as_of"] < after["as_of"]
        by_kind = "SELECT kind, sum(errors) AS errors FROM tierkv.cache_errors GROUP BY 1"
        kinds = connection.execute(by_kind).fetchall()
        totals = "SELECT DISTINCT node_id, cache_errors FROM tierkv.stat_kvcache_node"
        by_node = connection.execute(totals).fetchall()
        assert sum(row["errors"] for row in kinds) <= sum(
            row["cache_errors"] or 0 for row in by_node
        )


def test_every_view_reads_over_the_wire_and_shows_no_prompt(cluster: Cluster) -> None:
    with connect(cluster, "eve") as connection:
        connection.execute(f"{ASK.replace('Note', 'Classified')} FROM range(2) r(i)")  # type: ignore[arg-type]  # no literal
    views = read(
        cluster, "SELECT view_name FROM duckdb_views() WHERE schema_name = 'tierkv' ORDER BY 1"
    )
    assert len(views) >= 20
    for view in views:
        rows = read(cluster, f"SELECT * FROM tierkv.{view['view_name']}")
        assert "Classified" not in json.dumps(rows, default=str), view
    assert read(cluster, "SELECT max(depth_tokens) AS n FROM tierkv.kvcache_prefixes")[0]["n"] > 0
    scheduler = read(cluster, "SELECT * FROM tierkv.stat_scheduler")
    assert [row["model_name"] for row in scheduler] == ["tierkv-demo"]
    assert scheduler[0]["decisions"] >= 2


def test_calls_that_come_by_rest_are_counted(cluster: Cluster) -> None:
    read(cluster, "SELECT tierkv.stat_reset()")
    answers = [cluster.complete(range(200, 260)) for _ in range(2)]
    usage = read(cluster, "SELECT * FROM tierkv.usage_history")
    assert [row["function_name"] for row in usage] == ["completions"] * 2
    for name in ("prompt_tokens", "completion_tokens"):
        assert sum(row[name] for row in usage) == sum(one["usage"][name] for one in answers)
    (function,) = read(cluster, "SELECT * FROM tierkv.stat_functions")
    assert (function["calls"], function["errors"]) == (2, 0)
    assert function["cached_tokens"] == sum(row["cached_tokens"] for row in usage) > 0


def test_a_killed_front_goes_on_counting_and_its_statement_has_no_end(cluster: Cluster) -> None:
    read(cluster, "SELECT tierkv.stat_reset()")
    read(cluster, "SELECT tierkv.stat_reset('query_log')")
    read(cluster, f"{ASK} FROM range(3) r(i)")
    wait_for(lambda: stored(cluster, "SELECT calls FROM statements") == [(1,)], what="a write")
    before = read(cluster, "SELECT * FROM tierkv.stat_statements")
    functions = read(cluster, "SELECT * FROM tierkv.stat_functions")
    usage = read(cluster, "SELECT * FROM tierkv.usage_history")

    def run() -> None:
        long = ASK.replace('"max_tokens": 2', '"max_tokens": 400, "temperature": 1.9')
        with pytest.raises(psycopg.OperationalError):
            read(cluster, f"SET tierkv.max_calls = 0; {long} AS died FROM range(2000) r(i)")

    client = threading.Thread(target=run)
    client.start()
    begun = "SELECT query_id FROM query_log WHERE query LIKE '%died%'"
    (died,) = wait_for(lambda: stored(cluster, begun), what="a start in the log")
    cluster.kill("front")
    client.join()
    assert read(cluster, "SELECT * FROM tierkv.stat_statements") == before
    log = read(
        cluster,
        "SELECT query_id, list(type ORDER BY event_time) AS types FROM tierkv.query_log "
        "GROUP BY query_id ORDER BY query_id",
    )
    assert [row["types"] for row in log] == [["QueryStart", "QueryFinish"], ["QueryStart"]]
    assert log[1]["query_id"] == died[0]
    # What the lost statement had already cost may be there, as of a statement that has not ended.
    mine = [row for row in read(cluster, "SELECT * FROM tierkv.usage_history") if row in usage]
    assert mine == usage
    (function,) = read(cluster, "SELECT * FROM tierkv.stat_functions")
    assert function["calls"] >= functions[0]["calls"] == 3
    assert function["rows"] == 3
    read(cluster, f"{ASK} FROM range(3) r(i)")
    ((calls,),) = {(row["calls"],) for row in read(cluster, "SELECT * FROM tierkv.stat_statements")}
    assert calls == 2


def test_a_front_that_is_stopped_writes_everything(
    start_cluster: Callable[..., Cluster], tmp_path: Path
) -> None:
    late = ("--set", "front.stats_interval_s=3600", "--set", "front.query_log=all")
    first = start_cluster(*late)
    read(first, f"{ASK} FROM range(3) r(i)")
    before = read(first, "SELECT * FROM tierkv.stat_functions")
    read(first, f"{ASK} FROM range(3) r(i)")
    read(first, "SELECT 1 AS last")
    assert stored(first, "SELECT calls FROM statements") == [(1,)]
    assert first.stop() == 0
    assert stored(first, "SELECT calls FROM statements") == [(2,)]
    path = first.run_dir / "statistics.sqlite"
    path.rename(tmp_path / "moved.sqlite")
    second = start_cluster(*late, "--set", f"front.stats_path={tmp_path / 'moved.sqlite'}")
    assert not (second.run_dir / "statistics.sqlite").exists()
    (function,) = read(second, "SELECT * FROM tierkv.stat_functions")
    assert function["stats_reset"] == before[0]["stats_reset"]
    for name in ("calls", "rows", "prompt_tokens", "completion_tokens"):
        assert function[name] == 2 * before[0][name]
    log = read(second, "SELECT type, query_kind, query FROM tierkv.query_log WHERE query <> ''")
    assert {"type": "QueryFinish", "query_kind": "query", "query": "SELECT $1 AS last"} in log
    second.process.send_signal(signal.SIGTERM)
    assert second.process.wait(60) == 0
