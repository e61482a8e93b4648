"""Network and process faults on a real cluster: answers stay those of the cluster without a cache.

Rows of docs/faults.md. A proxy stands between the front and the others; nothing restarts what a
test kills.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.fix_chaos import HOLE, Fault
from tests.fix_cluster import wait_for
from tests.fix_roles import Roles
from tests.integration.test_cluster import make_prompts

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]
PROMPTS = make_prompts(71)
SMALLEST_REQUEST = 200
"""Bytes; pings are smaller."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Roles]:
    roles = Roles(tmp_path_factory.mktemp("roles"))
    try:
        roles.start("meta")
        roles.start("dmp-0", "compute-0", "compute-1", "front")
        roles.wait_whole()
        yield roles
    finally:
        roles.stop()


@pytest.fixture(scope="module")
def expected(cluster: Roles) -> list[str]:
    return [cluster.complete(prompt, use_cache=False) for prompt in PROMPTS]


def answers(cluster: Roles, **options: bool) -> list[str]:
    """Ask all at once, so that both compute nodes are asked where the cache does not decide."""
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        return list(pool.map(lambda prompt: cluster.complete(prompt, **options), PROMPTS))


def test_a_hole_between_front_and_one_compute_node(cluster: Roles, expected: list[str]) -> None:
    """Its heartbeats go on, so the meta server calls it alive; only the front can tell.

    Both ways are cut until a request has left, and then the other one is healed: so one crosses.
    """
    links = list(cluster.to_compute.values())
    before = {link: link.dropped for link in links}
    for link in links:
        link.both(HOLE)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(answers, cluster, use_cache=False)
        wait_for(
            lambda: any(link.dropped - before[link] > SMALLEST_REQUEST for link in links),
            what="a request is in the hole",
        )
        cut = max(links, key=lambda link: link.dropped - before[link])
        for link in links:
            if link is not cut:
                link.heal()
                link.reset_all()
        assert asked.result() == expected
    assert cluster.readiness()[0] == 200
    cut.heal()
    cut.reset_all()


def test_bits_flipped_between_front_and_compute(cluster: Roles, expected: list[str]) -> None:
    """Neither a wrong answer nor an error that blames the caller: the request is sent again."""
    links = cluster.to_compute.values()
    for link in links:
        link.to_server = Fault(flip_share=0.5, flip_from=400)
    while sum(link.flipped for link in links) < 10:
        assert answers(cluster, use_cache=False) == expected
    for link in links:
        link.heal()
    cluster.wait_whole()


def test_a_hole_between_front_and_meta(cluster: Roles, expected: list[str]) -> None:
    cluster.to_meta.both(HOLE)
    assert answers(cluster) == expected
    status, body = cluster.readiness()
    assert (status, body["status"]) == (200, "degraded") and "directory" in body["degraded"]
    cluster.to_meta.heal()
    cluster.wait_whole()


def test_a_meta_server_that_pauses_and_resumes(cluster: Roles, expected: list[str]) -> None:
    with cluster.frozen("meta"):
        assert answers(cluster) == expected
        assert cluster.readiness()[0] == 200
    cluster.wait_whole()
    assert answers(cluster) == expected


def test_no_meta_server_and_a_front_that_restarts(cluster: Roles, expected: list[str]) -> None:
    cluster.kill("meta")
    assert answers(cluster) == expected
    cluster.kill("front")
    cluster.start("front")
    assert answers(cluster) == expected
    status, body = cluster.readiness()
    assert (status, body["status"]) == (200, "degraded") and "directory" in body["degraded"]
    cluster.start("meta")
    cluster.wait_whole()
    assert answers(cluster) == expected
