"""A cluster whose only node takes one call at a time: who is refused, who waits, and that it ends.

Real processes and real clients: openai and psycopg see what they understand, and recover.
"""

from __future__ import annotations

import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager

import openai
import psycopg
import pytest

from tests.fix_cluster import Cluster, wait_for

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

PROMPT = "What did Jonas Ortiz buy?"


@pytest.fixture(scope="module")
def cluster(start_cluster: Callable[..., Cluster]) -> Cluster:
    bounds = ("front.max_in_flight_per_node=1", "front.max_waiting=1", "front.max_requests=50")
    return start_cluster(
        "--dmp", "1", "--compute", "1", *(word for bound in bounds for word in ("--set", bound))
    )


def client(cluster: Cluster, *, retries: int = 0) -> openai.OpenAI:
    url = f"http://127.0.0.1:{cluster.http_port}/v1"
    return openai.OpenAI(base_url=url, api_key="none", max_retries=retries, timeout=90.0)


def connect(cluster: Cluster) -> psycopg.Connection[tuple[object, ...]]:
    dsn = f"host=127.0.0.1 port={cluster.pg_port} user=tierkv dbname=main"
    return psycopg.connect(dsn, autocommit=True)


def waiting(cluster: Cluster) -> list[tuple[object, ...]]:
    return cluster.query("SELECT model_name, priority, waited_s, node_id FROM tierkv.queue")


def ask(asker: openai.OpenAI, max_tokens: int = 2) -> str:
    answer = asker.completions.create(
        model="tierkv-demo", prompt=PROMPT, max_tokens=max_tokens, temperature=0.0
    )
    return answer.choices[0].text


@contextmanager
def busy_place(cluster: Cluster) -> Iterator[None]:
    """Somebody reads a long answer, which takes the only place."""
    stream = client(cluster).completions.create(
        model="tierkv-demo",
        prompt=PROMPT,
        max_tokens=4_000,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    with closing(stream):
        next(iter(stream))
        yield


@contextmanager
def busy(cluster: Cluster) -> Iterator[None]:
    """Somebody reads a long answer, which takes the only place, and another one waits for it."""
    with ThreadPoolExecutor(1) as pool:
        with busy_place(cluster):
            second = pool.submit(ask, client(cluster))
            wait_for(lambda: len(waiting(cluster)) == 1, what="the second call waits")
            yield
        assert second.result(timeout=60)


def test_rest_and_sql_are_refused_with_a_time_to_come_back_and_recover(cluster: Cluster) -> None:
    expected = ask(client(cluster))
    with busy(cluster), connect(cluster) as connection:
        ((model, priority, waited_s, node_id),) = waiting(cluster)
        assert (model, priority, node_id) == ("tierkv-demo", 0, "compute-0")
        assert isinstance(waited_s, float) and waited_s >= 0.0
        with pytest.raises(openai.RateLimitError) as limited:
            ask(client(cluster))
        assert limited.value.code == "overloaded"
        headers = limited.value.response.headers
        retry_s, retry_ms = int(headers["retry-after"]), int(headers["retry-after-ms"])
        assert 0 < retry_ms <= 60_000 and (retry_s - 1) * 1_000 < retry_ms <= retry_s * 1_000
        with pytest.raises(psycopg.Error) as refused:
            connection.execute("SELECT ai_generate('hello', options => '{\"max_tokens\": 2}')")
        assert refused.value.sqlstate == "53000"
        assert (refused.value.diag.message_detail or "").startswith("retry after ")
        assert connection.execute("SELECT 1").fetchone() == (1,)
    assert ask(client(cluster, retries=5)) == expected
    assert metric(cluster, "tierkv_rejected_total") >= 2
    assert metric(cluster, "tierkv_waits_total") >= 1
    wait_for(lambda: metric(cluster, "tierkv_requests_queued") == 0, what="nobody waits")


def test_a_client_that_retries_gets_its_answer_once_there_is_room(cluster: Cluster) -> None:
    expected = ask(client(cluster))
    with ThreadPoolExecutor(1) as pool:
        with busy(cluster):
            rejected = metric(cluster, "tierkv_rejected_total")
            answer = pool.submit(ask, client(cluster, retries=20))
            wait_for(
                lambda: metric(cluster, "tierkv_rejected_total") > rejected, what="it was refused"
            )
        assert answer.result(timeout=60) == expected


def test_a_statement_does_not_fail_because_its_own_calls_fill_the_queue(cluster: Cluster) -> None:
    sql = (
        "SELECT count(DISTINCT i), count(ai_generate('Say ' || i || '.', "
        "options => '{\"max_tokens\": 2}')) FROM range(40) t(i)"
    )
    began = time.monotonic()
    assert cluster.query(sql) == [(40, 40)]
    assert time.monotonic() - began < 60.0


def test_a_cancelled_statement_leaves_the_queue_at_once(cluster: Cluster) -> None:
    with busy_place(cluster), connect(cluster) as connection:
        errors: list[BaseException] = []

        def run() -> None:
            try:
                connection.execute("SELECT ai_generate('wait', options => '{\"max_tokens\": 2}')")
            except psycopg.errors.QueryCanceled as error:
                errors.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        wait_for(lambda: len(waiting(cluster)) == 1, what="the statement's call waits")
        connection.cancel_safe()
        thread.join(timeout=30)
        assert len(errors) == 1
        wait_for(lambda: not waiting(cluster), what="its place in the queue is free")


def metric(cluster: Cluster, name: str) -> float:
    with urllib.request.urlopen(f"http://127.0.0.1:{cluster.http_port}/metrics") as response:
        lines = response.read().decode().splitlines()
    return float(next(line.split()[1] for line in lines if line.startswith(f"{name} ")))
