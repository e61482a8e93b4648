"""Network and process faults on a real cluster: answers stay those of the cluster without a cache.

Rows of docs/faults.md. A proxy stands between the front and the others; nothing restarts what a
test kills.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.fix_chaos import HOLE
from tests.fix_roles import Roles
from tests.integration.test_cluster import make_prompts

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]
PROMPTS = make_prompts(71)


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
    """Its heartbeats go on, so the meta server calls it alive; only the front can tell."""
    links = cluster.to_compute.values()
    carried = {link: link.chunks for link in links}
    assert answers(cluster, use_cache=False) == expected
    link = max(links, key=lambda link: link.chunks - carried[link])
    swallowed = link.dropped
    link.both(HOLE)
    while link.dropped == swallowed:
        assert answers(cluster, use_cache=False) == expected
    assert cluster.readiness()[0] == 200
    link.heal()


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
