"""Several prefill and decode nodes as processes: equal tokens, whoever dies or does not answer."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from tests.fix_cluster import Cluster, wait_for
from tests.integration.test_cluster import ask, make_prompts, oracle, text_of

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def split(start_cluster: Callable[..., Cluster]) -> Cluster:
    """Two hosts, each with a pool node, a prefill and a decode node; prompts take many steps."""
    return start_cluster(
        "--dmp", "2", "--prefill", "2", "--decode", "2", "--set", "compute.max_batch_tokens=64",
    )  # fmt: skip


@contextmanager
def frozen(cluster: Cluster, node: str) -> Iterator[None]:
    """Stop a process without ending it: it neither answers nor hangs up."""
    pid = cluster.pid_of(node)
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def busy_roles(cluster: Cluster) -> set[str]:
    rows = cluster.query("SELECT role FROM tierkv.stat_kvcache_node WHERE query_tokens > 0")
    return {str(row[0]) for row in rows}


def scrape(cluster: Cluster) -> dict[str, float]:
    """Return the counters without labels."""
    with urllib.request.urlopen(f"http://127.0.0.1:{cluster.http_port}/metrics") as response:
        lines = response.read().decode().splitlines()
    pairs = (line.split(" ") for line in lines if not line.startswith("#") and "{" not in line)
    return {name: float(value) for name, value in pairs}


def test_views_and_status_show_the_roles(split: Cluster) -> None:
    roles = [row[0] for row in split.query("SELECT role FROM tierkv.nodes")]
    assert sorted(roles) == sorted(["front", "meta", *["dmp", "prefill", "decode"] * 2])
    status = subprocess.run(
        [sys.executable, "-m", "tierkv", "status", "--format", "json",
         "--set", f"cluster.run_dir={split.run_dir}"],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    shown = {row["node"]: row["role"] for row in json.loads(status.stdout)}
    assert shown["prefill-1"] == "prefill" and shown["decode-1"] == "decode"


def test_many_at_once_equal_one_node_and_both_roles_work(split: Cluster) -> None:
    prompts = make_prompts(21, count=6)
    expected = oracle(split, prompts)
    answers = ask_together(split, prompts, "many")
    assert answers == expected
    wait_for(lambda: busy_roles(split) >= {"prefill", "decode"}, what="both roles answered")
    assert scrape(split)["tierkv_handoffs_total"] > 0
    # A decode node loads ahead only what is published before the prefill ends: not in every round.
    for seed in range(40, 60):
        if scrape(split)["tierkv_prefetches_total"] > 0:
            break
        prompts = make_prompts(seed, count=6)
        assert ask_together(split, prompts, f"more{seed}") == oracle(split, prompts)
    else:
        pytest.fail("no decode node loaded anything ahead in twenty rounds")


def test_a_second_turn_equals_one_node(split: Cluster) -> None:
    """The history is where it was decoded; the short new part needs no prefill node."""
    (prompt,) = make_prompts(22, count=1)
    first = split.complete(prompt, cache_salt="turn", max_tokens=40)
    assert text_of(first) == oracle(split, [prompt], max_tokens=40)[0]
    longer = prompt + list(range(50, 80))
    assert [text_of(b) for b in ask(split, [longer], "turn")] == oracle(split, [longer])


def ask_together(
    cluster: Cluster, prompts: list[list[int]], salt: str, **options: int
) -> list[str]:
    answers: dict[int, str] = {}

    def one(index: int) -> None:
        body = cluster.complete(prompts[index], cache_salt=salt, **options)
        answers[index] = text_of(body)

    threads = [threading.Thread(target=one, args=(i,)) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=150)
    return [answers.get(i, "") for i in range(len(prompts))]


@pytest.mark.parametrize("victim", ["prefill-0", "decode-0"])
def test_a_process_killed_mid_request_changes_no_token(split: Cluster, victim: str) -> None:
    prompts = make_prompts(sum(victim.encode()), count=3)
    expected = oracle(split, prompts, max_tokens=100)
    answers: list[str] = []
    asking = threading.Thread(
        target=lambda: answers.extend(ask_together(split, prompts, victim, max_tokens=100))
    )
    asking.start()
    split.kill(victim)
    asking.join(timeout=150)
    assert answers == expected
    assert [text_of(body) for body in ask(split, prompts, victim)] == oracle(split, prompts)


def test_a_meta_server_that_does_not_answer_changes_no_token(split: Cluster) -> None:
    prompts = make_prompts(24, count=3)
    expected = oracle(split, prompts)
    wait_for(lambda: len(split.nodes()) == 8, what="all nodes known")
    with frozen(split, "meta"):
        assert [text_of(body) for body in ask(split, prompts, "headless")] == expected
        assert [text_of(body) for body in ask(split, prompts, "headless")] == expected
