"""An AI job on a real Ray of three local nodes, over a real cluster of TierKV; a node is lost."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest

from tests.fix_cluster import Cluster, free_port, wait_for
from tests.fix_ray import LocalRay

pytestmark = [pytest.mark.integration, pytest.mark.ray, pytest.mark.timeout(300)]

ROWS = 240
JOB = (
    "CREATE AI JOB work AS INSERT INTO answers SELECT id, ai_generate(body, options => "
    "'{\"max_tokens\": 4}') FROM docs WITH (key = id, batch = 10, runner = 'ray', partitions = 6)"
)


@pytest.fixture
def ray() -> Iterator[LocalRay]:
    found = LocalRay(cpus=1)
    try:
        for number in (2, 3, 4):
            found.start(f"127.0.0.{number}")
        yield found
    finally:
        found.stop()


def test_a_job_on_ray_loses_a_node_and_no_row(
    start_cluster: Callable[..., Cluster], ray: LocalRay
) -> None:
    port = free_port()
    door = f"host=127.0.0.1 port={port} user=tierkv dbname=main"
    start_cluster(
        "--pg-port", str(port), "--set", f"front.ray_address={ray.address}",
        "--set", f"front.ray_door={door}",
    )  # fmt: skip
    with psycopg.connect(door, autocommit=True) as connection:
        connection.execute("CREATE TABLE docs (id int, body text)")
        connection.execute(
            f"INSERT INTO docs SELECT i, 'Note ' || i FROM generate_series(1, {ROWS}) t(i)"
        )
        connection.execute("CREATE TABLE answers (id int, answer text)")
        failures: list[BaseException] = []

        def run() -> None:
            try:
                with psycopg.connect(door, autocommit=True) as other:
                    other.execute(JOB)
            except BaseException as error:  # noqa: BLE001 - shown by the test
                failures.append(error)

        job = threading.Thread(target=run)
        job.start()

        def done() -> int:
            row = connection.execute("SELECT done FROM tierkv.jobs").fetchone()
            return 0 if row is None else int(row[0])

        wait_for(lambda: done() > 0, what="the first batch")
        ray.lose("127.0.0.3")
        job.join(200)
        assert not failures and not job.is_alive()
        rows = connection.execute("SELECT id FROM answers ORDER BY id").fetchall()
        assert [row[0] for row in rows] == list(range(1, ROWS + 1))
        state = connection.execute(
            "SELECT state, done, written, failed, partitions FROM tierkv.jobs"
        ).fetchone()
        assert state == ("done", ROWS, ROWS, 0, 6)


def test_without_ray_a_job_says_where_to_look(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tierkv", "sql", "-c",
         "CREATE TABLE docs AS SELECT 1 AS id; CREATE AI JOB w AS CREATE TABLE t AS "
         "SELECT id FROM docs WITH (key = id, runner = ray)"],
        cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode and "front.ray_address" in done.stderr
