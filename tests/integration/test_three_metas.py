"""A cluster with three meta servers on one PostgreSQL: any may die, be frozen, or come back.

Answers stay those of the cluster without a cache, no statement fails, and blocks are still found.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import quote

import psycopg
import pytest

from tests.fix_cluster import ROOT, free_port, wait_for
from tests.fix_postgres import PASSWORD, USER, PostgresServer
from tests.fix_roles import BLOCK_TOKENS, COMPUTE, Roles
from tests.integration.test_cluster import make_prompts

pytestmark = [pytest.mark.integration, pytest.mark.faults, pytest.mark.timeout(300)]
METAS = ("meta-0", "meta-1", "meta-2")
PROMPTS = make_prompts(73)
SQL = (
    "SELECT i, ai_generate('Row ' || (i % 7) || ' of a table that is long enough for blocks', "
    "options => '{\"max_tokens\": 4}') FROM range(28) t(i) ORDER BY i"
)


class ThreeMetas(Roles):
    """Roles whose directory is three servers."""

    def __init__(self, folder: Path, database: str) -> None:
        super().__init__(folder)
        self._database = database
        self._meta_ports = {name: free_port() for name in METAS}

    @property
    def meta_address(self) -> str:
        """What every process is told."""
        return ",".join(f"127.0.0.1:{port}" for port in self._meta_ports.values())

    def _settings(self, name: str) -> Iterator[str]:
        for item in super()._settings(name):
            if not item.startswith("cluster.meta_address="):
                yield item
        yield f"cluster.meta_address={self.meta_address}"
        if name in METAS:
            yield from (f"meta.port={self._meta_ports[name]}", f"meta.database={self._database}")

    def cached_blocks(self, prompt: Sequence[int]) -> int:
        """Ask again; return how many whole blocks of the prompt were not computed.

        A part of a block more may come from the memory of the node that computed the prompt, which
        is not always asked again.
        """
        with self._post(prompt, {}) as response:
            usage = json.load(response)["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"]) // BLOCK_TOKENS


@pytest.fixture(scope="module")
def database(postgres: PostgresServer) -> Iterator[str]:
    yield f"postgresql://{USER}:{quote(PASSWORD)}@127.0.0.1:{postgres.port}/app"
    with psycopg.connect(postgres.dsn, autocommit=True) as connection:
        connection.execute("DROP SCHEMA IF EXISTS tierkv_meta CASCADE")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, database: str) -> Iterator[ThreeMetas]:
    roles = ThreeMetas(tmp_path_factory.mktemp("metas"), database)
    try:
        roles.start(*METAS)
        roles.start("dmp-0", *COMPUTE, "front")
        wait_for(lambda: alive(roles) == 7, what="all nodes are alive")
        yield roles
    finally:
        roles.stop()


@pytest.fixture(scope="module")
def expected(cluster: ThreeMetas) -> list[str]:
    return [cluster.complete(prompt, use_cache=False) for prompt in PROMPTS]


def alive(roles: Roles) -> int:
    try:
        return [state for (state,) in roles.nodes("state").values()].count("alive")
    except psycopg.OperationalError:
        return 0


def answers(cluster: Roles) -> list[str]:
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        return list(pool.map(cluster.complete, PROMPTS))


def found_again(cluster: ThreeMetas) -> int:
    """Forget L1 and ask all prompts; how many blocks were loaded from the pool."""
    cluster.drop_caches()
    return sum(cluster.cached_blocks(prompt) for prompt in PROMPTS)


def test_they_are_one_directory(cluster: ThreeMetas, expected: list[str]) -> None:
    assert set(cluster.nodes("role")) == {*METAS, "dmp-0", *COMPUTE, "front"}
    assert answers(cluster) == answers(cluster) == expected
    wait_for(lambda: found_again(cluster) > 0, what="the pool's blocks are located")
    assert cluster.in_pool() > 0


@pytest.mark.parametrize("lost", METAS)
def test_a_server_that_dies_costs_no_answer_and_no_block(
    cluster: ThreeMetas, expected: list[str], lost: str
) -> None:
    answers(cluster)
    wait_for(lambda: found_again(cluster) > 0, what="the pool's blocks are located")
    before = found_again(cluster)
    rows = cluster.query(SQL)
    ended, wrong = threading.Event(), []

    def keep_asking() -> None:
        while not ended.is_set():
            try:
                if cluster.query(SQL) != rows:
                    wrong.append("other rows")
            except psycopg.Error as error:
                wrong.append(str(error))

    asking = threading.Thread(target=keep_asking)
    asking.start()
    try:
        cluster.kill(lost)
        assert answers(cluster) == expected
        assert found_again(cluster) >= before
        assert answers(cluster) == expected
        cluster.start(lost)
        wait_for(lambda: alive(cluster) == 7, what="the server is back")
        assert answers(cluster) == expected
    finally:
        ended.set()
        asking.join()
    assert wrong == []


def test_a_frozen_server_costs_no_answer(cluster: ThreeMetas, expected: list[str]) -> None:
    with cluster.frozen("meta-1"):
        for _ in range(3):
            assert answers(cluster) == expected
        assert found_again(cluster) > 0
    wait_for(lambda: alive(cluster) == 7, what="the server is back")
    assert answers(cluster) == expected


def test_namespaces_outlive_the_server_that_stored_them(cluster: ThreeMetas) -> None:
    def tierkv(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "tierkv", "namespace", *words,
             "--set", f"cluster.meta_address={cluster.meta_address}",
             "--set", "cluster.token=roles"],
            cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    tierkv("set", "team", "--tenant", "ann", "--tenant", "bob")
    cluster.kill("meta-0")
    assert "team" in tierkv("list")
    tierkv("set", "other", "--tenant", "eve")
    cluster.start("meta-0")
    wait_for(lambda: alive(cluster) == 7, what="the server is back")
    cluster.kill("meta-1")
    cluster.kill("meta-2")
    assert "other" in tierkv("list")
    cluster.start("meta-1", "meta-2")
    wait_for(lambda: alive(cluster) == 7, what="the servers are back")


def test_without_any_server_answers_go_on(cluster: ThreeMetas, expected: list[str]) -> None:
    for name in METAS:
        cluster.kill(name)
    assert answers(cluster) == expected
    cluster.start(*METAS)
    wait_for(lambda: alive(cluster) == 7, what="the servers are back")
    wait_for(lambda: found_again(cluster) > 0, what="the nodes told everything again")
    assert answers(cluster) == expected
