"""Documents through every door of a real cluster: refused, exact and blended.

The oracle is the same call with the cache off. With a recompute ratio of 1 everything is computed
again, so answers must be equal; with less, usage must say what was reused out of place.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import openai
import psycopg
import pytest

import tierkv
from tests.fix_cluster import ROOT, Cluster, wait_for

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

NAMES = ["Mia Brandt", "Jonas Ortiz", "Ana Ruiz", "Tom Weber"]
DOCUMENTS = [
    f"Customer: {name}. Product: {product}. Order: {order}. City: {city}. The customer said that "
    f"the {product} came {days} days late and wants an answer by mail."
    for name, product, order, city, days in zip(
        NAMES,
        ["kettle", "blender", "lamp", "heater"],
        [2207, 9313, 1055, 4821],
        ["Porto", "Vienna", "Rome", "Oslo"],
        [3, 9, 4, 12],
        strict=True,
    )
]
ORDERS = list(itertools.permutations(DOCUMENTS))
QUESTION = "Question: Where does {} live?"


@pytest.fixture(scope="module")
def cluster(start_cluster: Callable[..., Cluster]) -> Cluster:
    return start_cluster("--set", "compute.load_policy=always")


def namespace(cluster: Cluster, *arguments: str) -> list[dict[str, Any]]:
    """Run ``tierkv namespace`` as an administrator does."""
    done = subprocess.run(
        [sys.executable, "-m", "tierkv", "namespace", *arguments, "--format", "json",
         "--set", f"cluster.run_dir={cluster.run_dir}"],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    rows: list[dict[str, Any]] = json.loads(done.stdout)
    return rows


@pytest.fixture(scope="module")
def client(cluster: Cluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{cluster.http_port}/v1", api_key="x") as client:
        yield client


def ask(
    client: openai.OpenAI, documents: tuple[str, ...], question: str, **fields: Any
) -> tuple[str, dict[str, Any]]:
    """Ask over REST; return the answer and the details of its usage."""
    answer = client.chat.completions.create(
        model="tierkv-demo",
        temperature=0,
        max_tokens=8,
        messages=[{"role": "user", "content": question}],
        extra_body={"documents": list(documents), **fields},
    )
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    return answer.choices[0].message.content or "", answer.usage.prompt_tokens_details.model_dump()


def moved(number: int) -> tuple[str, ...]:
    """Documents behind one that is new, so that no prefix was met before.

    The first time a document is met it is computed on its own, behind the answer; from then on it
    can be blended.
    """
    return (f"Note {number}.", *DOCUMENTS)


def connect(cluster: Cluster, user: str) -> psycopg.Connection[Any]:
    dsn = f"host=127.0.0.1 port={cluster.pg_port} user={user} dbname=main"
    return psycopg.connect(dsn, autocommit=True)


def refusal(cluster: Cluster, user: str) -> str:
    """Ask for blending in SQL; return the notices: a front trusts a policy for some seconds."""
    with connect(cluster, user) as db:
        notices: list[str] = []
        db.add_notice_handler(lambda notice: notices.append(notice.message_primary or ""))
        sql = "SELECT ai_generate(%s, documents => %s, options => %s)"
        db.execute(sql, (QUESTION.format("Mia"), DOCUMENTS[:1], '{"recompute_ratio": 0.5}'))
        return "\n".join(notices)


def test_where_nothing_was_allowed_answers_are_exact(
    cluster: Cluster, client: openai.OpenAI
) -> None:
    namespace(cluster, "set", "default", "--blend", "off")
    wait_for(
        lambda: "namespace default does not allow" in refusal(cluster, "default"),
        what="the front knows the new policy",
    )
    for documents, name in zip(ORDERS[:4], NAMES, strict=True):
        question = QUESTION.format(name)
        text, details = ask(client, documents, question, blend=True, cache_salt="exact")
        assert text == ask(client, documents, question, use_cache=False)[0]
        assert (details["blended_tokens"], details["recomputed_tokens"]) == (0, 0)
        assert "selector" not in details
    said = refusal(cluster, "nobody")
    assert said == "documents were not blended: namespace nobody does not allow blending"


def test_a_ratio_of_one_is_exact_over_rest_and_sql(cluster: Cluster, client: openai.OpenAI) -> None:
    namespace(cluster, "set", "whole", "--blend", "on", "--recompute-ratio", "1")
    sql = "SELECT ai_generate(%s, documents => %s, options => {'max_tokens': 8, 'cache': %s})"
    with connect(cluster, "whole") as db:
        for documents, name in zip(ORDERS[:8], NAMES * 2, strict=True):
            question = QUESTION.format(name)
            answers = [
                db.execute(sql, (question, list(documents), cache)).fetchone()
                for cache in (True, True, False)
            ]
            assert answers[0] == answers[1] == answers[2]
            assert answers[0] == (ask(client, documents, question, use_cache=False)[0],)


def test_usage_and_views_tell_what_was_blended(cluster: Cluster, client: openai.OpenAI) -> None:
    (row,) = namespace(cluster, "set", "default", "--blend", "on", "--recompute-ratio", "0.2")
    assert (row["blend"], row["recompute_ratio"]) == (True, 0.2)
    assert cluster.query("SELECT name, blend FROM tierkv.namespaces WHERE name = 'default'") == [
        ("default", True)
    ]
    assert cluster.query("SELECT blend_refusal FROM tierkv.models") == [("",)]
    numbers = itertools.count()

    def blended() -> dict[str, Any] | None:
        documents = moved(next(numbers))
        details = ask(client, documents, QUESTION.format("Mia Brandt"), selector="boundary")[1]
        return details if details["blended_tokens"] else None

    details = wait_for(blended, what="a blended answer")
    assert 0 < details["blended_tokens"] <= details["cached_tokens"]
    assert details["recomputed_tokens"] > 0
    assert details["selector"] == "boundary"
    metrics = client._client.get(f"http://127.0.0.1:{cluster.http_port}/metrics").text
    line = next(x for x in metrics.splitlines() if x.startswith("tierkv_blended_tokens_total"))
    assert float(line.split()[-1]) >= details["blended_tokens"]


def test_documents_are_located_at_any_position(cluster: Cluster) -> None:
    namespace(cluster, "set", "default", "--blend", "on")
    told = "SELECT ai_locate(%s, documents => %s)"

    def located(documents: tuple[str, ...]) -> dict[str, Any]:
        with connect(cluster, "default") as db:
            row = db.execute(told, (QUESTION, list(documents))).fetchone()
            assert row is not None
            return dict(row[0] if isinstance(row[0], dict) else json.loads(row[0]))

    def is_pooled() -> bool:
        return located(ORDERS[5])["outcome"] == "accepted"

    with connect(cluster, "default") as db:
        warm = "SELECT ai_generate(%s, documents => %s, options => {'max_tokens': 1})"
        db.execute(warm, (QUESTION, list(moved(77))))
        wait_for(is_pooled, what="each document has KV of its own")
    first, second = located(ORDERS[5]), located(ORDERS[9])
    assert first["memory_tokens"] == second["memory_tokens"] > 100 and first["memory_bytes"] > 0
    fresh = located(("A text that nobody has sent yet, about ships and other things.",))
    assert fresh["outcome"] == "missing" and fresh["memory_tokens"] == 0


def test_a_call_can_stay_exact_where_blending_is_allowed(
    cluster: Cluster, client: openai.OpenAI
) -> None:
    namespace(cluster, "set", "default", "--blend", "on")
    for documents in ORDERS[-3:]:
        question = QUESTION.format("Ana Ruiz")
        text, details = ask(client, documents, question, blend=False)
        assert details["blended_tokens"] == 0
        assert text == ask(client, documents, question, use_cache=False)[0]


def test_bad_fields_are_named(client: openai.OpenAI) -> None:
    for fields, param in (
        ({"recompute_ratio": 2}, "recompute_ratio"),
        ({"selector": "best"}, "selector"),
        ({"documents": [{"title": "x"}]}, "documents.0.text"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(
                model="tierkv-demo",
                messages=[{"role": "user", "content": "x"}],
                extra_body=fields,
            )
        assert caught.value.param == param


def test_in_one_process_a_setting_allows_it() -> None:
    settings = {
        "dmp__capacity": "64MiB",
        "compute__threads": 1,
        "compute__block_tokens": 16,
        "compute__load_policy": "always",
        "namespace__blend": True,
        "namespace__recompute_ratio": 0.2,
    }
    with tierkv.connect(**settings) as db:
        sql = "EXPLAIN ANALYZE SELECT ai_generate(?, documents => ?)"
        numbers = itertools.count()

        def blended() -> bool:
            documents = list(moved(next(numbers)))
            rows = db.execute(sql, [QUESTION.format("Tom Weber"), documents]).fetchall()
            return any("tokens reused out of place" in line for (line,) in rows)

        wait_for(blended, what="a blended answer")
