"""A conversation that is due is back in its node's pages before its next turn: a real cluster."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Callable
from typing import Any

import pytest

from tests.fix_cluster import Cluster, wait_for

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

TALK = "Parcel nine was lost in a river near the old mill. " * 14


@pytest.fixture(scope="module")
def cluster(start_cluster: Callable[..., Cluster]) -> Cluster:
    # The usual policy would keep the pages of a conversation that is expected.
    settings = ("compute.l1_capacity=16MiB", "compute.eviction_policy=leaf_lru",
                "compute.load_policy=always", "dmp.capacity=64MiB")  # fmt: skip
    return start_cluster("--compute", "1", *(word for one in settings for word in ("--set", one)))


def ask(cluster: Cluster, text: str, **fields: Any) -> str:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 2, "temperature": 0}
    request = urllib.request.Request(
        f"http://127.0.0.1:{cluster.http_port}/v1/chat/completions",
        json.dumps(body | fields).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return str(json.load(response)["choices"][0]["message"]["content"])


def metric(cluster: Cluster, name: str, label: str = "") -> float:
    with urllib.request.urlopen(f"http://127.0.0.1:{cluster.http_port}/metrics") as response:
        text = response.read().decode()
    found = re.findall(rf"^{name}(?:\{{[^}}]*{label}[^}}]*\}})? (\S+)$", text, re.MULTILINE)
    return sum(map(float, found))


def flood(cluster: Cluster) -> None:
    """Take all pages of the node."""
    for number in range(4):
        ask(cluster, f"{number} " + "A very long text about other things. " * 230)


def hits(cluster: Cluster, tier: str) -> float:
    return metric(cluster, "tierkv_hit_tokens_total", f'tier="{tier}"')


def test_a_turn_that_was_told_finds_its_history_in_the_pages(cluster: Cluster) -> None:
    want = ask(cluster, TALK + "Where?", use_cache=False)
    ask(cluster, TALK)
    flood(cluster)
    before = hits(cluster, "L1"), hits(cluster, "L2")
    assert ask(cluster, TALK + "Where?") == want
    assert hits(cluster, "L2") - before[1] > 150, "without a word, the turn loads for itself"

    loads = metric(cluster, "tierkv_prefetches_total")
    ask(cluster, TALK, session_id="told", reuse={"next_turn_s": 6})
    flood(cluster)
    wait_for(lambda: metric(cluster, "tierkv_prefetches_total") > loads, what="the load ahead")
    before = hits(cluster, "L1"), hits(cluster, "L2")
    assert ask(cluster, TALK + "Where?", session_id="told") == want
    assert hits(cluster, "L1") - before[0] > 150
    assert hits(cluster, "L2") - before[1] < 64, "the part of a block only"
