"""Queued jobs while fronts and Redis are killed: no row twice, none lost."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import openai
import psycopg
import pytest

from tests.fix_cluster import Cluster, free_port, wait_for
from tests.fix_postgres import PASSWORD, USER, PostgresServer
from tests.fix_roles import Roles
from tests.fix_valkey import RedisProcess

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

ROWS, BATCH = 200, 10
JOB = (
    "CREATE AI JOB {name} AS INSERT INTO answers SELECT id, ai_generate('Note ' || id || ': ' || "
    "body, options => '{{\"max_tokens\": 8}}') FROM docs WITH (key = id, batch = {batch}, "
    "queued = on)"
)
FRONTS = ("front-a", "front-b")
DATABASE = "queued_jobs"  # of its own: other tests leave tables in theirs


def make_tables(connection: psycopg.Connection[Any]) -> None:
    connection.execute("CREATE TABLE docs (id int, body text)")
    connection.execute(
        f"INSERT INTO docs SELECT i, 'it rains' FROM generate_series(1, {ROWS}) t(i)".encode()
    )
    connection.execute("CREATE TABLE answers (id int, answer text)")


class QueuedFronts(Roles):
    """Two fronts over one PostgreSQL and one Redis; each worker logs in at its own front."""

    def __init__(self, folder: Path, postgres: PostgresServer, redis: RedisProcess) -> None:
        super().__init__(folder, environment={"PGPASSWORD": PASSWORD})
        self.redis = redis
        self.url = f"postgresql://{USER}:{quote(PASSWORD)}@127.0.0.1:{postgres.port}/{DATABASE}"
        self.dsn = postgres.dsn.replace("dbname=app", f"dbname={DATABASE}")
        self.ports = {name: free_port() for name in FRONTS}
        self.rest_ports = {name: free_port() for name in FRONTS}

    def _settings(self, name: str) -> Iterator[str]:
        yield from super()._settings(name)
        if name in FRONTS:
            yield from (
                f"front.pg_port={self.ports[name]}",
                f"front.http_port={self.rest_ports[name]}",
            )
            yield f"front.sessions={self.url}"
            yield f"front.postgres={self.dsn}"
            yield f"front.shared_state={self.redis.url}"
            yield f"front.queue_door=host=127.0.0.1 port={self.ports[name]}"
            yield "front.queue_claim_s=1"

    def rows(self, sql: str, front: str = "") -> list[tuple[Any, ...]]:
        """Run SQL at a front, or at the first that lives."""
        ports = [self.ports[name] for name in ([front] if front else FRONTS)]
        hosts = ",".join(["127.0.0.1"] * len(ports))
        dsn = f"host={hosts} port={','.join(map(str, ports))} user={USER} dbname={DATABASE}"
        with psycopg.connect(dsn, password=PASSWORD, autocommit=True) as connection:
            cursor = connection.execute(sql.encode())
            return cursor.fetchall() if cursor.description else []

    def state(self, job: str) -> tuple[str, int]:
        try:
            rows = self.rows(f"SELECT state, done FROM tierkv.jobs WHERE job = '{job}'")
        except psycopg.OperationalError:
            return "", 0
        return rows[0] if rows else ("", 0)  # type: ignore[return-value]

    def worker_of(self, job: str) -> str:
        """Return the front whose worker has a job; empty if none has it."""
        rows = self.rows(f"SELECT consumer FROM tierkv.queue_pending WHERE job = '{job}'")
        pids = {name: str(self._processes[name].pid) for name in FRONTS if name in self._processes}
        named = [n for n, pid in pids.items() for (who,) in rows if f":{pid}/" in (who or "")]
        return named[0] if named else ""

    def check_done(self, *jobs: str) -> None:
        for job in jobs:
            wait_for(lambda job=job: self.state(job)[0] == "done", what=f"end of {job}")  # type: ignore[misc]
        rows = self.rows("SELECT id FROM answers ORDER BY id")
        expected = [number for number in range(1, ROWS + 1) for _ in jobs]
        assert [row[0] for row in rows] == expected
        left = "SELECT * FROM tierkv.queue_pending WHERE state <> 'dead'"
        wait_for(lambda: not self.rows(left), what="the last ack")

    def clear(self, *jobs: str) -> None:
        for job in jobs:
            self.rows(f"DROP AI JOB {job}")
        self.rows("DELETE FROM answers")


@pytest.fixture(scope="module")
def fronts(
    tmp_path_factory: pytest.TempPathFactory, postgres: PostgresServer
) -> Iterator[QueuedFronts]:
    folder = tmp_path_factory.mktemp("queued")
    with RedisProcess(folder / "redis", "--appendonly", "yes") as redis:
        roles = QueuedFronts(folder, postgres, redis)
        try:
            with psycopg.connect(postgres.dsn, autocommit=True) as direct:
                direct.execute(f"CREATE DATABASE {DATABASE}".encode())
            roles.start("meta", "dmp-0", "compute-0", *FRONTS)
            with psycopg.connect(roles.dsn, autocommit=True) as direct:
                make_tables(direct)
            yield roles
        finally:
            roles.stop()


def test_another_front_goes_on_with_the_batch_of_a_killed_one(fronts: QueuedFronts) -> None:
    fronts.rows(JOB.format(name="work", batch=BATCH))
    wait_for(lambda: fronts.state("work")[1] > 0, what="the first batch")
    dead = fronts.worker_of("work")
    fronts.kill(dead)
    (other,) = {*FRONTS} - {dead}
    wait_for(lambda: fronts.worker_of("work") == other, what="the claim")
    fronts.check_done("work")
    ((calls, written),) = fronts.rows("SELECT calls, written FROM tierkv.jobs")
    assert written == ROWS and ROWS <= calls <= ROWS + BATCH, "at most a batch is asked again"
    assert fronts.rows("SELECT waiting FROM tierkv.queues WHERE queue = 'jobs'") == [(0,)]
    assert not fronts.rows("SELECT * FROM tierkv.queue_pending WHERE job = 'work'")
    fronts.start(dead)
    fronts.clear("work")


def test_both_fronts_take_jobs_and_each_job_runs_once(fronts: QueuedFronts) -> None:
    names = [f"job_{number}" for number in range(4)]
    for number, name in enumerate(names):
        fronts.rows(JOB.format(name=name, batch=50), FRONTS[number % 2])
    fronts.check_done(*names)
    calls = fronts.rows("SELECT calls FROM tierkv.jobs")
    assert calls == [(ROWS,)] * 4
    fronts.clear(*names)


@pytest.mark.parametrize("durable", [True, False])
def test_a_job_runs_on_while_redis_is_killed(fronts: QueuedFronts, durable: bool) -> None:
    fronts.rows(JOB.format(name="work", batch=BATCH))
    wait_for(lambda: fronts.state("work")[1] > 0, what="the first batch")
    fronts.redis.kill()
    with pytest.raises(psycopg.Error, match="is there, but not in the queue"):
        fronts.rows(JOB.format(name="later", batch=BATCH))
    if not durable:
        fronts.redis.forget()
    fronts.redis.start()
    wait_for(lambda: fronts.state("work")[0] == "done", what="the end of the job")
    assert fronts.state("later") == ("waiting", 0)
    fronts.rows("RESUME JOB later")
    fronts.check_done("work", "later")
    fronts.clear("work", "later")


def test_a_stopped_front_gives_its_job_back_at_once(fronts: QueuedFronts) -> None:
    fronts.rows(JOB.format(name="work", batch=BATCH))
    wait_for(lambda: fronts.state("work")[1] > 0, what="the first batch")
    stopped = fronts.worker_of("work")
    fronts.end(stopped)
    fronts.check_done("work")
    fronts.start(stopped)
    fronts.clear("work")


def test_a_refused_login_is_a_dead_letter_and_the_job_has_failed(fronts: QueuedFronts) -> None:
    with psycopg.connect(fronts.dsn, autocommit=True) as direct:
        direct.execute("CREATE ROLE eve LOGIN PASSWORD 'another'")
        direct.execute("GRANT ALL ON docs, answers TO eve")
    port = fronts.ports[FRONTS[0]]
    dsn = f"host=127.0.0.1 port={port} user=eve password=another dbname={DATABASE}"
    with psycopg.connect(dsn, autocommit=True) as eve:
        eve.execute(JOB.format(name="hers", batch=BATCH).encode())

        def letters() -> list[Any]:
            return eve.execute(
                "SELECT job, owner, deliveries, reason FROM tierkv.queue_pending "
                "WHERE state = 'dead'"
            ).fetchall()

        ((job, owner, deliveries, reason),) = wait_for(letters, what="the dead letter")
        assert (job, owner, deliveries) == ("hers", "eve", 5)
        assert "password authentication failed" in reason
        eve.execute("RESUME JOB hers WITH (queued = off)")
        assert eve.execute("SELECT state, done FROM tierkv.jobs").fetchall() == [("done", ROWS)]
        eve.execute("DROP AI JOB hers")
    fronts.rows("DELETE FROM answers")
    with psycopg.connect(fronts.dsn, autocommit=True) as direct:
        direct.execute("DROP OWNED BY eve")
        direct.execute("DROP ROLE eve")


def test_background_responses_outlive_fronts(fronts: QueuedFronts) -> None:
    clients = {
        name: openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="any", max_retries=2)
        for name, port in fronts.rest_ports.items()
    }
    asked = {"temperature": 0, "max_output_tokens": 200, "extra_body": {"ignore_eos": True}}
    first, second = (clients[name] for name in FRONTS)
    expected = second.responses.create(input="A kettle.", **asked)  # type: ignore[call-overload]
    told = [
        first.responses.create(input="A kettle.", background=True, **asked)  # type: ignore[call-overload]
        for _ in range(20)
    ]
    killed = wait_for(lambda: fronts.worker_of(told[-1].id), what="a front that has taken the last")
    fronts.kill(killed)
    (other,) = {*FRONTS} - {killed}
    try:
        for each in told:
            ended = wait_for(lambda each=each: _ended(clients[other], each.id), what="an answer")  # type: ignore[misc]
            assert ended.status == "incomplete"
            assert ended.output_text == expected.output_text
        left = "SELECT * FROM tierkv.queue_pending WHERE queue = 'responses'"
        wait_for(lambda: not fronts.rows(left, other), what="the last ack")
    finally:
        fronts.start(killed)
        for client in clients.values():
            client.close()


def test_a_front_alone_goes_on_with_its_responses(start_cluster: Callable[..., Cluster]) -> None:
    cluster = start_cluster()
    address = f"http://127.0.0.1:{cluster.http_port}/v1"
    with openai.OpenAI(base_url=address, api_key="any", max_retries=8) as client:
        told = client.responses.create(
            input="A kettle.", background=True, max_output_tokens=1_000, temperature=0,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        view = "SELECT job FROM tierkv.queue_pending"
        wait_for(lambda: cluster.query(view) == [(told.id,)], what="the begin")
        cluster.kill("front")
        ended = wait_for(lambda: _ended(client, told.id), what="the answer")
    assert ended.status == "incomplete" and ended.output_text


def _ended(client: openai.OpenAI, response_id: str) -> Any:
    told = client.responses.retrieve(response_id)
    return None if told.status in ("queued", "in_progress") else told


def test_over_duckdb_a_job_waits_for_its_own_front(start_cluster: Callable[..., Cluster]) -> None:
    cluster = start_cluster("--set", "front.queue_claim_s=1")
    dsn = f"host=127.0.0.1 port={cluster.pg_port} user=tierkv dbname=main"

    def rows(sql: str) -> list[tuple[Any, ...]]:
        try:
            return cluster.query(sql)
        except psycopg.OperationalError:
            return []

    with psycopg.connect(dsn, autocommit=True) as connection:
        make_tables(connection)
        told: list[str] = []
        connection.add_notice_handler(lambda notice: told.append(str(notice.message_primary)))
        for name in ("first", "second"):
            connection.execute(JOB.format(name=name, batch=BATCH).encode())
        assert told[0] == "job first waits in the queue: see tierkv.jobs"
    first = "SELECT done FROM tierkv.jobs WHERE job = 'first'"
    wait_for(lambda: [d for (d,) in rows(first) if d > 0], what="the first batch")
    waits = "SELECT state FROM tierkv.jobs WHERE job = 'second'"
    assert rows(waits) == [("waiting",)]
    with pytest.raises(psycopg.errors.ObjectInUse):
        cluster.query("RESUME JOB first")
    cluster.kill("front")
    states = "SELECT state, written FROM tierkv.jobs"
    wait_for(lambda: rows(states) == [("done", ROWS)] * 2, what="the end of both jobs")
    found = cluster.query("SELECT id FROM answers ORDER BY id")
    assert [row[0] for row in found] == [n for n in range(1, ROWS + 1) for _ in "ab"]
    files = [name for name in os.listdir(cluster.run_dir) if name.endswith(".queue")]
    assert len(files) <= 1
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(JOB.format(name="third", batch=2).encode())
        connection.execute("CANCEL JOB third")
        third = "SELECT state FROM tierkv.jobs WHERE job = 'third'"
        wait_for(lambda: rows(third) == [("cancelled",)], what="the cancel")
        wait_for(lambda: not rows("SELECT * FROM tierkv.queue_pending"), what="the last ack")
