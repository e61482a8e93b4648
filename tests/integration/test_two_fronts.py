"""Two fronts of one cluster, which share Valkey: any serves any client, and one may leave.

A front that drains ends what runs and sends the rest elsewhere. Clients are libpq's list of hosts,
and HTTP as a balancer sees it.
"""

from __future__ import annotations

import json
import os
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from valkey import Valkey

from tests.fix_cluster import free_port, wait_for
from tests.fix_roles import COMPUTE, Roles
from tests.fix_valkey import valkey_server

pytestmark = [pytest.mark.integration, pytest.mark.faults, pytest.mark.timeout(240)]
FRONTS = ("front-a", "front-b")
SQL = (
    "SELECT i, ai_generate('Row ' || (i % 7) || ' of a table that is long enough for blocks', "
    "options => '{\"max_tokens\": 4}') FROM range(28) t(i) ORDER BY i"
)
LONG = (
    "SELECT i, ai_generate('Tell ' || i || repeat(' and then a story about ' || i, 60), "
    'options => \'{"max_tokens": 8, "cache": false}\') FROM range(160) t(i) ORDER BY i'
)


class TwoFronts(Roles):
    """Roles with two fronts over one Valkey."""

    def __init__(self, folder: Path, valkey: str) -> None:
        super().__init__(folder)
        self._valkey = valkey
        self.ports = {name: (free_port(), free_port()) for name in FRONTS}

    def _settings(self, name: str) -> Iterator[str]:
        yield from super()._settings(name)
        if name in FRONTS:
            pg_port, http_port = self.ports[name]
            yield from (f"front.pg_port={pg_port}", f"front.http_port={http_port}")
            yield from (f"front.shared_state={self._valkey}", "front.drain_s=60")

    def dsn(self, *fronts: str) -> str:
        """Return libpq's list of these fronts."""
        ports = ",".join(str(self.ports[name][0]) for name in fronts)
        hosts = ",".join("127.0.0.1" for _ in fronts)
        return f"host={hosts} port={ports} user=tierkv dbname=main"

    def rows(self, sql: str, *fronts: str) -> list[tuple[Any, ...]]:
        """Run SQL at the first front that serves."""
        with psycopg.connect(self.dsn(*fronts), autocommit=True) as connection:
            return connection.execute(sql).fetchall()

    def get(self, front: str, path: str, body: Any = None) -> tuple[int, dict[str, Any], Any]:
        """Ask a front over HTTP; return status, body and headers."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.ports[front][1]}{path}",
            json.dumps(body).encode() if body is not None else None,
            {"content-type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return response.status, json.load(response), response.headers
        except urllib.error.HTTPError as error:
            return error.code, json.load(error), error.headers

    def of_others(self, front: str) -> int:
        """Return how many requests at the nodes a front knows to be other fronts'."""
        _, scale, _ = self.get(front, "/v1/scale")
        return int(scale["models"][0]["of_other_fronts"])

    def is_degraded(self, front: str) -> bool:
        """Return whether a front misses the shared state."""
        status, body, _ = self.get(front, "/readyz?verbose")
        assert status == 200
        return "shared state" in body["degraded"]

    @contextmanager
    def silent_valkey(self) -> Iterator[None]:
        """Stop Valkey without ending it."""
        with Valkey.from_url(self._valkey) as client:
            pid = int(client.info("server")["process_id"])
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(pid, signal.SIGCONT)

    def tell_to_end(self, name: str) -> None:
        """Send SIGTERM."""
        self._processes[name].send_signal(signal.SIGTERM)

    def start_again(self, name: str) -> None:
        """Start a front that has ended."""
        process = self._processes.pop(name)
        assert process.wait(60) == 0
        assert process.stdout is not None
        process.stdout.close()
        self.start(name)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoFronts]:
    folder = tmp_path_factory.mktemp("fronts")
    with valkey_server(folder / "valkey") as valkey:
        roles = TwoFronts(folder, valkey)
        try:
            roles.start("meta", "dmp-0", *COMPUTE, *FRONTS)
            yield roles
        finally:
            roles.stop()


@pytest.fixture(scope="module")
def expected(cluster: TwoFronts) -> list[tuple[Any, ...]]:
    """Return the rows of ``LONG``."""
    return cluster.rows(LONG, "front-b")


def test_both_give_equal_rows(cluster: TwoFronts) -> None:
    with ThreadPoolExecutor(2) as pool:
        one, two = pool.map(lambda front: cluster.rows(SQL, front), FRONTS)
    assert one == two
    assert len(one) == 28


def test_each_knows_what_the_other_has_at_the_nodes(cluster: TwoFronts) -> None:
    cluster.rows(SQL, "front-b")
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(cluster.rows, LONG, "front-a")
        wait_for(lambda: cluster.of_others("front-b") > 8, what="front-b knows of front-a's work")
        assert cluster.of_others("front-a") == 0
        assert len(running.result()) == 160
    wait_for(lambda: cluster.of_others("front-b") == 0, what="front-b knows that it ended")


def test_a_front_that_drains_ends_its_work_and_sends_clients_on(
    cluster: TwoFronts, expected: list[tuple[Any, ...]]
) -> None:
    idle = psycopg.connect(cluster.dsn("front-a"), autocommit=True)
    inside = psycopg.connect(cluster.dsn("front-a"))
    inside.execute("CREATE TABLE drained AS SELECT 1 AS one")
    with idle, inside, ThreadPoolExecutor(1) as pool:
        running = pool.submit(cluster.rows, LONG, "front-a")
        wait_for(lambda: cluster.of_others("front-b") > 8, what="the statement runs")
        cluster.tell_to_end("front-a")
        wait_for(lambda: cluster.get("front-a", "/readyz")[0] == 503, what="front-a drains")
        assert cluster.get("front-a", "/livez")[0] == 200

        status, body, headers = cluster.get("front-a", "/v1/sql", {"sql": "SELECT 1"})
        assert (status, body["error"]["code"]) == (503, "draining")
        assert "another front" in body["error"]["message"]
        assert (headers["connection"], headers["retry-after"]) == ("close", "1")
        with pytest.raises(psycopg.OperationalError, match="another front"):
            cluster.rows("SELECT 1", "front-a")
        assert cluster.rows("SELECT 1", *FRONTS) == [(1,)]

        with pytest.raises(psycopg.OperationalError):
            idle.execute("SELECT 1")
        assert inside.execute("SELECT one FROM drained").fetchall() == [(1,)]
        inside.commit()
        with pytest.raises(psycopg.OperationalError):
            inside.execute("SELECT 1")
        assert running.result() == expected
    cluster.start_again("front-a")
    assert cluster.rows(SQL, "front-a") == cluster.rows(SQL, "front-b")


def test_a_killed_front_is_forgotten_and_another_answers(
    cluster: TwoFronts, expected: list[tuple[Any, ...]]
) -> None:
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(cluster.rows, LONG, "front-a")
        wait_for(lambda: cluster.of_others("front-b") > 8, what="the statement runs")
        cluster.kill("front-a")
        with pytest.raises(psycopg.OperationalError):
            running.result()
        assert cluster.rows(LONG, *FRONTS) == expected
    wait_for(lambda: cluster.of_others("front-b") == 0, what="front-b forgets the killed front")
    cluster.start("front-a")


def test_a_frozen_front_holds_up_nobody_else_and_goes_on(
    cluster: TwoFronts, expected: list[tuple[Any, ...]]
) -> None:
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(cluster.rows, LONG, "front-a")
        wait_for(lambda: cluster.of_others("front-b") > 8, what="the statement runs")
        with cluster.frozen("front-a"):
            assert cluster.rows(LONG, "front-b") == expected
            # A client that may wait two seconds for a front asks the next one.
            dsn = f"{cluster.dsn(*FRONTS)} connect_timeout=2"
            with psycopg.connect(dsn, autocommit=True) as connection:
                assert connection.execute(SQL).fetchall() == cluster.rows(SQL, "front-b")
            wait_for(lambda: cluster.of_others("front-b") == 0, what="front-b forgets it")
        assert running.result() == expected


def test_without_the_shared_state_fronts_serve_on(cluster: TwoFronts) -> None:
    expected = cluster.rows(SQL, "front-b")
    with cluster.silent_valkey():
        for front in FRONTS:
            wait_for(lambda at=front: cluster.is_degraded(at), what=f"{front} misses Valkey")
            assert cluster.rows(SQL, front) == expected
    for front in FRONTS:
        wait_for(lambda at=front: not cluster.is_degraded(at), what=f"{front} finds Valkey again")
