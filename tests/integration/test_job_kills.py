"""A job keeps each row once while every process of a real cluster is killed under it."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Callable

import psycopg
import pytest

from tests.fix_cluster import Cluster, wait_for
from tests.fix_postgres import PostgresServer, attendants, running_postgres, running_relay
from tests.fix_sql import InstantGenerator
from tierkv.dbfront.contracts import PreparedCall, TextEvent
from tierkv.dbfront.postgres.install import install

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

ROWS = 400
JOB = (
    "CREATE AI JOB work AS INSERT INTO answers SELECT id, ai_generate('Note ' || id || ': ' || "
    "body, options => '{\"max_tokens\": 4}') FROM docs WITH (key = id, batch = 20)"
)


class ResumedJob(threading.Thread):
    """A client that resumes its job until the job is done."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__()
        self.errors: list[str] = []
        self._cluster = cluster
        self.start()

    def run(self) -> None:
        text = JOB
        while True:
            try:
                self._say(text)
                return
            except psycopg.Error as error:
                self.errors.append(str(error))
                if len(self.errors) > 200:
                    return
                text = "RESUME JOB work"
                wait_for(self._answers, what="the front is back")

    def _say(self, text: str) -> None:
        dsn = f"host=127.0.0.1 port={self._cluster.pg_port} user=tierkv dbname=main"
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute(text.encode())

    def _answers(self) -> bool:
        try:
            return bool(self._cluster.query("SELECT 1"))
        except psycopg.Error:
            return False


def test_every_process_is_killed_under_a_job(start_cluster: Callable[..., Cluster]) -> None:
    cluster = start_cluster()
    dsn = f"host=127.0.0.1 port={cluster.pg_port} user=tierkv dbname=main"
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("CREATE TABLE docs (id int, body text)")
        connection.execute(
            f"INSERT INTO docs SELECT i, 'it rains' FROM generate_series(1, {ROWS}) t(i)"
        )
        connection.execute("CREATE TABLE answers (id int, answer text)")
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    job = ResumedJob(cluster)

    def done() -> int:
        try:
            rows = cluster.query("SELECT done FROM tierkv.jobs")
        except psycopg.Error:
            return 0
        return int(rows[0][0]) if rows else 0

    nodes = ["front", "compute-0", "meta", "dmp-0", "front"]
    rng.shuffle(nodes)
    for number, node in enumerate(nodes):
        least = ROWS * number // 8
        wait_for(lambda least=least: done() >= max(least, 1), what="more rows")  # type: ignore[misc]
        cluster.kill(node)
    job.join(300)
    assert not job.is_alive(), job.errors[-1:]
    rows = cluster.query("SELECT id, answer FROM answers ORDER BY id")
    assert [row[0] for row in rows] == list(range(1, ROWS + 1)), job.errors[-3:]
    assert cluster.query("SELECT state, done, written, failed FROM tierkv.jobs") == [
        ("done", ROWS, ROWS, 0)
    ]
    calls = cluster.query("SELECT calls FROM tierkv.jobs")[0][0]
    assert ROWS <= calls <= ROWS + len(nodes) * 20, "at most a batch is asked again"


def test_a_background_job_outlives_its_client_and_its_front(
    start_cluster: Callable[..., Cluster],
) -> None:
    cluster = start_cluster()
    dsn = f"host=127.0.0.1 port={cluster.pg_port} user=tierkv dbname=main"
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("CREATE TABLE docs (id int, body text)")
        connection.execute(
            f"INSERT INTO docs SELECT i, 'it rains' FROM generate_series(1, {ROWS}) t(i)"
        )
        connection.execute("CREATE TABLE answers (id int, answer text)")
        told: list[str] = []
        connection.add_notice_handler(lambda notice: told.append(str(notice.message_primary)))
        connection.execute(JOB.replace("batch = 20", "batch = 20, background = on").encode())
        assert told == ["job work runs in the background; tierkv.jobs shows how far it is"]

    def state() -> tuple[str, int]:
        try:
            return cluster.query("SELECT state, done FROM tierkv.jobs")[0]  # type: ignore[return-value]
        except psycopg.OperationalError:
            return "", 0

    wait_for(lambda: state()[1] > 0, what="the first batch")
    with pytest.raises(psycopg.errors.ObjectInUse):
        cluster.query("RESUME JOB work")
    cluster.kill("front")
    wait_for(lambda: state()[0] == "done", what="the end of the job")
    rows = cluster.query("SELECT id FROM answers ORDER BY id")
    assert [row[0] for row in rows] == list(range(1, ROWS + 1))
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("INSERT INTO docs VALUES (1000, 'late')")
        connection.execute("RESUME JOB work")
    wait_for(lambda: state() == ("done", ROWS + 1), what="the late row")
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("DELETE FROM answers")
        connection.execute("DROP AI JOB work")
        connection.execute(JOB.replace("batch = 20", "batch = 2, background = on").encode())
        connection.execute("CANCEL JOB work")
    wait_for(lambda: state()[0] == "cancelled", what="the cancel")


class HoldingGenerator(InstantGenerator):
    """Answers until it was asked ``most`` times; later calls wait."""

    most = 1 << 60

    async def stream(self, prepared: PreparedCall) -> AsyncIterator[TextEvent]:
        if len(self.prompts) >= self.most and self.gate is None:
            self.gate = asyncio.Event()
        async for event in super().stream(prepared):
            yield event


def test_postgresql_is_killed_under_a_job() -> None:
    generator = HoldingGenerator()
    with running_postgres() as server:
        asyncio.run(install(server.dsn))
        with psycopg.connect(server.dsn, autocommit=True) as direct:
            direct.execute("CREATE TABLE docs (id int, body text)")
            direct.execute(
                f"INSERT INTO docs SELECT i, 'row ' || i FROM generate_series(1, {ROWS}) i"
            )
            direct.execute("CREATE TABLE answers (id int, answer text)")
        with running_relay(server.dsn, attendants(generator)) as relay:
            for text in (JOB, "RESUME JOB work", "RESUME JOB work"):
                generator.gate, generator.most = None, len(generator.prompts) + 100
                killer = threading.Thread(target=_kill_after, args=(server, generator))
                killer.start()
                with pytest.raises(psycopg.OperationalError), psycopg.connect(relay.dsn) as client:
                    client.autocommit = True
                    client.execute(text.encode())
                killer.join(60)
                server.start()
            generator.gate, generator.most = None, HoldingGenerator.most
            with psycopg.connect(relay.dsn, autocommit=True) as client:
                client.execute("RESUME JOB work")
                rows = client.execute("SELECT id FROM answers ORDER BY id").fetchall()
                state = client.execute("SELECT state, done, written FROM tierkv.jobs").fetchone()
    assert [row[0] for row in rows] == list(range(1, ROWS + 1))
    assert state == ("done", ROWS, ROWS)
    assert len(generator.prompts) <= ROWS + 3 * 20, "at most a batch is asked again"


def _kill_after(server: PostgresServer, generator: HoldingGenerator) -> None:
    wait_for(lambda: generator.gate is not None, what="some answers")
    server.stop("immediate")
