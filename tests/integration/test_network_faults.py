"""Network and process faults on a real cluster: answers stay those of the cluster without a cache.

Rows of docs/faults.md. A proxy stands between the front and the others; nothing restarts what a
test kills.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from tests.fix_chaos import HOLE, Fault
from tests.fix_cluster import wait_for
from tests.fix_roles import Roles
from tests.fix_wall_clock import WallClock
from tests.integration.test_cluster import make_prompts

pytestmark = [pytest.mark.integration, pytest.mark.faults, pytest.mark.timeout(300)]
PROMPTS = make_prompts(71)
SMALLEST_REQUEST = 200
"""Bytes; pings are smaller."""
POOL_READ = 10_000
"""Bytes; questions are smaller."""
LONG = 600
DAY_S = 86400
POOL_MIB = 64
"""The pool's capacity (tests/fix_roles.py)."""


@pytest.fixture(scope="module")
def wall_clock(tmp_path_factory: pytest.TempPathFactory) -> WallClock:
    return WallClock(tmp_path_factory.mktemp("clock"))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, wall_clock: WallClock) -> Iterator[Roles]:
    roles = Roles(tmp_path_factory.mktemp("roles"), environment=wall_clock.environment)
    try:
        roles.start("meta")
        roles.start("dmp-0", "compute-0", "compute-1", "front")
        roles.wait_whole()
        yield roles
    finally:
        roles.stop()


@pytest.fixture(autouse=True)
def healed(cluster: Roles) -> Iterator[None]:
    yield
    cluster.heal()


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
    """Neither a wrong answer nor an error that blames the caller: the request is sent again.

    Each link damages one chunk in a round, so no request can lose every node that it may.
    """
    links = cluster.to_compute.values()
    while sum(link.flipped for link in links) < 10:
        for link in links:
            link.to_server = Fault(flip_share=0.5, flip_from=400, flip_until=link.flipped + 1)
        assert answers(cluster, use_cache=False) == expected
    for link in links:
        link.heal()
    cluster.wait_whole()


def test_a_one_way_hole_to_the_pool_costs_one_timeout(cluster: Roles, expected: list[str]) -> None:
    """A node waits for the silent pool node once, then leaves it alone until it answers."""
    wait_for(lambda: reads_the_pool(cluster), what="the pool has the prompts")
    swallowed, alone = cluster.to_pool.dropped, len(cluster.said("left alone"))
    cluster.to_pool.to_server = HOLE
    for _ in range(4):
        cluster.drop_caches()
        assert answers(cluster) == expected
    assert cluster.to_pool.dropped > swallowed
    assert 1 <= len(cluster.said("left alone")) - alone <= len(cluster.to_compute)
    cluster.to_pool.heal()
    wait_for(lambda: reads_the_pool(cluster), what="the pool is read again")
    assert answers(cluster) == expected


def reads_the_pool(cluster: Roles) -> bool:
    """Ask for what only the pool has; True: it came from there."""
    cluster.drop_caches()
    carried = cluster.to_pool.carried
    assert answers(cluster)
    return cluster.to_pool.carried - carried > POOL_READ


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(Fault(delay_s=0.1, jitter_s=0.05), id="delay"),
        pytest.param(Fault(bytes_per_s=10e6 / 8), id="10Mbit"),
        pytest.param(Fault(reset_share=0.2), id="resets"),
    ],
)
def test_a_bad_way_to_the_pool(cluster: Roles, expected: list[str], fault: Fault) -> None:
    wait_for(lambda: reads_the_pool(cluster), what="the pool has the prompts")
    resets = cluster.to_pool.resets
    cluster.to_pool.both(fault)
    cluster.drop_caches()
    assert answers(cluster) == expected
    assert cluster.to_pool.resets > resets or not fault.reset_share
    cluster.to_pool.heal()


def test_a_compute_node_killed_under_a_stream(cluster: Roles) -> None:
    whole = cluster.complete(PROMPTS[0], max_tokens=LONG, use_cache=False)
    text, node = disturbed(cluster, cluster.kill)
    assert text == whole
    cluster.start(node)
    cluster.wait_whole()


def test_a_compute_node_frozen_under_a_stream(cluster: Roles) -> None:
    whole = cluster.complete(PROMPTS[0], max_tokens=LONG, use_cache=False)
    with ExitStack() as stack:
        text, _ = disturbed(cluster, lambda node: stack.enter_context(cluster.frozen(node)))
        assert text == whole
    cluster.wait_whole()


def disturbed(cluster: Roles, disturb: Callable[[str], None]) -> tuple[str, str]:
    """Do something to the node that answers once it has begun; return the text and the node."""
    links = cluster.to_compute
    before = {name: link.carried for name, link in links.items()}
    pieces = cluster.stream(PROMPTS[0], max_tokens=LONG)
    begun = [next(pieces) for _ in range(3)]
    node = max(links, key=lambda name: links[name].carried - before[name])
    disturb(node)
    return "".join([*begun, *pieces]), node


@pytest.mark.parametrize("name", ["dmp-0", "compute-0"])
def test_a_second_process_of_a_node_is_refused_while_the_first_lives(
    cluster: Roles, name: str
) -> None:
    before = cluster.nodes("incarnation", "address", "data_address")[name]
    with cluster.rival(name) as log:
        wait_for(lambda: "already running at 127.0.0.2" in log.read_text(), what="a refusal")
        assert "--node-id" in log.read_text()
        told = "wants this node id and is refused"
        wait_for(lambda: told in cluster.nodes("notes")[name][0], what="a note in the view")
        assert cluster.nodes("incarnation", "address", "data_address")[name] == before


@pytest.mark.parametrize("name", ["dmp-0", "compute-0"])
def test_a_restart_after_a_kill_is_the_same_node_at_once(cluster: Roles, name: str) -> None:
    (before,) = cluster.nodes("incarnation")[name]
    cluster.kill(name)
    cluster.start(name)
    wait_for(lambda: cluster.nodes("incarnation")[name][0] != before, what="the new life")
    assert not cluster.said("already running")


def test_a_pool_node_lost_with_its_memory(cluster: Roles, expected: list[str]) -> None:
    """What is computed without it is saved when it is there again, though nothing is asked then."""
    wait_for(lambda: reads_the_pool(cluster), what="the pool has the prompts")
    cluster.lose_machine("dmp-0")
    wait_for(lambda: not cluster.in_pool(), what="its blocks leave the directory")
    cluster.drop_caches()
    assert answers(cluster) == expected
    cluster.start("dmp-0")
    wait_for(cluster.in_pool, what="what L1 has is saved")
    cluster.wait_whole()
    assert answers(cluster) == expected


def test_a_full_pool_gives_up_old_blocks(cluster: Roles, expected: list[str]) -> None:
    wait_for(lambda: reads_the_pool(cluster), what="the pool has the prompts")
    cluster.fill_pool(POOL_MIB)
    wait_for(lambda: evicted(cluster) > 0, what="something was evicted")
    cluster.drop_caches()
    assert answers(cluster) == expected


def evicted(cluster: Roles) -> int:
    view = "tierkv.stat_kvcache_node WHERE node_id = 'dmp-0'"
    return int(cluster.query(f"SELECT sum(evicted_blocks) FROM {view}")[0][0])


def test_a_damaged_state_of_the_meta_server(cluster: Roles, expected: list[str]) -> None:
    """The copy of the last change and the nodes' inventories make it whole: the names hold."""
    wait_for(lambda: reads_the_pool(cluster), what="the pool has the prompts")
    before = cluster.in_pool()
    cluster.damage_meta()
    cluster.start("meta")
    cluster.wait_whole()
    wait_for(lambda: "set aside" in cluster.nodes("notes")["meta"][0], what="a note")
    wait_for(lambda: cluster.in_pool() >= before, what="the directory is whole")
    # A compute node that registered before the pool node hears of it with its next heartbeat.
    wait_for(lambda: reads_the_pool(cluster), what="the pool is read again")
    assert answers(cluster) == expected
    # Under other names all would have been saved anew; some were on their way when counted.
    assert cluster.in_pool() < 2 * before, "blocks have the names of before"


def test_a_hole_between_front_and_meta(cluster: Roles, expected: list[str]) -> None:
    cluster.to_meta.both(HOLE)
    cluster.to_stream.both(HOLE)
    assert answers(cluster) == expected
    status, body = cluster.readiness()
    assert (status, body["status"]) == (200, "degraded") and "directory" in body["degraded"]
    cluster.to_meta.heal()
    cluster.to_stream.heal()
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


def test_the_wall_clock_jumps_under_all_processes(
    cluster: Roles, expected: list[str], wall_clock: WallClock
) -> None:
    """A day on, then two back: nothing is late, old or dead for it, and a stream goes on."""
    if not wall_clock.can_jump:
        pytest.skip("no C compiler here: apt-get install gcc")
    whole = cluster.complete(PROMPTS[0], max_tokens=LONG, use_cache=False)
    wait_for(lambda: reads_the_pool(cluster), what="the pool has the prompts")
    before = cluster.nodes("state", "incarnation")
    carried = cluster.to_pool.carried
    try:
        for days in (1, -1):
            pieces = cluster.stream(PROMPTS[0], max_tokens=LONG)
            begun = next(pieces)
            wall_clock.jump(days * DAY_S)
            assert begun + "".join(pieces) == whole
            ((told,),) = cluster.query("SELECT epoch(now())")
            assert abs(told - time.time() - days * DAY_S) < DAY_S / 2
            cluster.drop_caches()
            assert answers(cluster) == expected
            assert cluster.readiness()[1]["status"] == "ready"
            assert cluster.nodes("state", "incarnation") == before
    finally:
        wall_clock.jump(0)
    assert cluster.to_pool.carried - carried > POOL_READ, "the pool is read all along"
    assert answers(cluster) == expected
    cluster.wait_whole()
