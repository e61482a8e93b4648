"""A cluster on a real Ray of three local nodes: SQL goes on while machines come, go, and fail.

The tests are one story of one cluster, in this order (make test-ray).
"""

from __future__ import annotations

import csv
import io
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.fix_cluster import ROOT, free_port, wait_for
from tests.fix_ray import LocalRay

pytestmark = [pytest.mark.integration, pytest.mark.ray, pytest.mark.timeout(300)]
FRONTS = "host=127.0.0.2,127.0.0.3 port={0},{0} user=tierkv dbname=main"
SQL = (
    "SELECT i, ai_generate('Row ' || (i % 7) || ' of a table that is long enough for blocks', "
    "options => '{\"max_tokens\": 4}') FROM range(28) t(i) ORDER BY i"
)


ZONES = {"127.0.0.2": "west", "127.0.0.3": "east"}


class RayCluster:
    """TierKV on a local Ray, used through its command line."""

    def __init__(self, folder: Path) -> None:
        self.ray = LocalRay(cpus=1)
        self._folder = folder
        self._port = free_port()

    def tierkv(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a verb; its output may hold the cause of a failure."""
        return subprocess.run(
            [sys.executable, "-m", "tierkv", *arguments,
             "--set", f"cluster.run_dir={self._folder / 'run'}"],
            cwd=ROOT, capture_output=True, text=True, timeout=200, check=False,
        )  # fmt: skip

    def up(self) -> subprocess.CompletedProcess[str]:
        settings = ("dmp.capacity=64MiB", "compute.threads=1", "compute.block_tokens=16",
                    f"front.pg_port={self._port}", f"front.http_port={free_port()}",
            f"meta.port={free_port()}",
                    "dmp.remove_on_stop=true")  # fmt: skip
        flags = (word for item in settings for word in ("--set", item))
        counts = ("--meta", "3", "--compute", "2", "--front", "2")
        return self.tierkv("up", "--ray", self.ray.address, *counts, *flags)

    def status(self) -> dict[str, dict[str, str]]:
        """Return the rows of ``tierkv status`` by node."""
        shown = self.tierkv("status", "--format", "csv")
        assert shown.returncode == 0, shown.stderr
        return {row["node"]: row for row in csv.DictReader(io.StringIO(shown.stdout))}

    def running(self, *names: str) -> bool:
        """Return whether nodes are alive, and Ray has nothing to say against."""
        rows = self.status()
        found = [rows[name] for name in names if name in rows]
        return len(found) == len(names) and all(
            row["state"] == "alive" and row["restarts"] and not row["why"] for row in found
        )

    def rows(self, sql: str = SQL) -> list[tuple[Any, ...]]:
        """Run SQL at the first front that serves."""
        dsn = FRONTS.format(self._port)
        with psycopg.connect(dsn, autocommit=True, connect_timeout=20) as client:
            return client.execute(sql).fetchall()

    @contextmanager
    def asking(self, expected: Sequence[tuple[Any, ...]]) -> Iterator[None]:
        """Ask again and again until the block ends; every answer must be right."""
        over, wrong, count = threading.Event(), [], [0]

        def ask() -> None:
            while not over.is_set():
                try:
                    if self.rows() != expected:
                        wrong.append("other rows")
                except psycopg.Error as error:
                    wrong.append(repr(error))
                count[0] += 1

        thread = threading.Thread(target=ask)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
        assert not wrong
        assert count[0] > 0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    made = RayCluster(tmp_path_factory.mktemp("ray"))
    try:
        for host in ("127.0.0.2", "127.0.0.3", "127.0.0.4"):
            made.ray.start(host, zone=ZONES.get(host, ""))
        started = made.up()
        assert started.returncode == 0, started.stderr
        assert "TierKV is up on Ray: 10 processes on 3 machines" in started.stdout
        yield made
    finally:
        made.tierkv("down")
        made.ray.stop()


@pytest.fixture(scope="module")
def expected(cluster: RayCluster) -> list[tuple[Any, ...]]:
    rows = cluster.rows()
    assert len(rows) == 28
    return rows


def test_each_machine_has_a_pool_node_and_roles_are_spread(cluster: RayCluster) -> None:
    rows = cluster.status()
    at = {name: row["ray_node"] for name, row in rows.items()}
    for names in (("meta-0", "meta-1", "meta-2"), ("front-0", "front-1")):
        assert len({at[name] for name in names}) == len(names)
    pools = {name for name, row in rows.items() if row["role"] == "dmp"}
    assert pools == {"dmp-127-0-0-2", "dmp-127-0-0-3", "dmp-127-0-0-4"}
    assert len({at[name] for name in pools}) == 3
    zones = cluster.rows("SELECT zone FROM tierkv.nodes WHERE role = 'dmp' ORDER BY node_id")
    assert [zone for (zone,) in zones] == ["west", "east", ""]


def test_a_second_start_finds_the_first(cluster: RayCluster) -> None:
    again = cluster.up()
    assert again.returncode == 0
    assert "runs on this Ray already" in again.stderr


def test_a_process_that_dies_is_started_again(
    cluster: RayCluster, expected: list[tuple[Any, ...]]
) -> None:
    with cluster.asking(expected):
        for name in ("dmp-127-0-0-3", "compute-0", "meta-1"):
            os.kill(_pid_of(name), signal.SIGKILL)
            wait_for(
                lambda at=name: (
                    cluster.status()[at]["restarts"] == "1"  # type: ignore[misc]
                    and cluster.running(at)
                ),
                what=f"{name} is started again",
            )


def test_scaling_beyond_the_machines_says_what_is_missing(
    cluster: RayCluster, expected: list[tuple[Any, ...]]
) -> None:
    with cluster.asking(expected):
        grown = cluster.tierkv("scale", "compute=4")
        assert grown.returncode == 0, grown.stderr
        assert "compute: 3 of 4 run" in grown.stdout
        assert "nothing is free, so it waits for another machine" in grown.stdout
        cluster.ray.start("127.0.0.5")
        wait_for(lambda: cluster.running(*(f"compute-{n}" for n in range(4)), "dmp-127-0-0-5"),
                 what="the new machine is used")  # fmt: skip
        shrunk = cluster.tierkv("scale", "compute=2")
        assert "compute: 2 of 2 run" in shrunk.stdout
    assert len([name for name in cluster.status() if name.startswith("compute")]) >= 2


def test_a_lost_machine_costs_no_answer(
    cluster: RayCluster, expected: list[tuple[Any, ...]]
) -> None:
    assert "of 4 run" in cluster.tierkv("scale", "compute=4").stdout
    before = cluster.status()["meta-2"]["ray_node"]
    with cluster.asking(expected):
        cluster.ray.lose("127.0.0.4")  # One compute node finds no place now; that holds up nothing.
        wait_for(lambda: cluster.running("meta-0", "meta-1", "meta-2", "front-0", "front-1")
                 and cluster.status()["meta-2"]["ray_node"] != before,
                 what="its roles run elsewhere", deadline_s=120.0)  # fmt: skip
        cluster.ray.start("127.0.0.4")
        wait_for(lambda: cluster.running("dmp-127-0-0-4", *(f"compute-{n}" for n in range(4))),
                 what="it is back", deadline_s=120.0)  # fmt: skip


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["dmp=3"], "no role that can be scaled"),
        (["compute=-1"], "from 0 to 1000"),
        (["meta=0"], "needs a meta server"),
        (["compute=1", "--ray", "127.0.0.9:1"], "no Ray answers at 127.0.0.9:1"),
    ],
)
def test_what_can_not_be_is_refused(cluster: RayCluster, words: list[str], said: str) -> None:
    refused = cluster.tierkv("scale", *words)
    assert refused.returncode == 1
    assert said in refused.stderr


def _pid_of(name: str) -> int:
    found = subprocess.run(
        ["pgrep", "-f", f"tierkv serve .*--node-id {name} "],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    return int(found.stdout.split()[0])
