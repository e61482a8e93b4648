"""Which path bytes take, case by case."""

from __future__ import annotations

import pytest

from tierkv.dmp.pool_node import PathInfo
from tierkv.dmp.transport.select import Ends, Transport, plan_transfer, settle
from tierkv.kvcore.ids import HostId

NONE = "no RDMA device here"


def ends(here: str = "a", there: str = "a", segment: str = "/s", no_rdma: str = NONE) -> Ends:
    return Ends(HostId(here), HostId(there), segment, no_rdma)


@pytest.mark.parametrize(
    ("wish", "given", "steps", "ruled_out"),
    [
        ("auto", ends(), ["shm", "tcp"], [NONE]),
        ("auto", ends(here=""), ["shm", "tcp"], [NONE]),
        ("auto", ends(segment=""), ["tcp"], ["the node shares no segment file", NONE]),
        ("auto", ends(there="b"), ["tcp"], ["another host (b)", NONE]),
        ("auto", ends(there="b", no_rdma=""), ["rdma", "tcp"], ["another host (b)"]),
        ("auto", ends(no_rdma=""), ["shm", "rdma", "tcp"], []),
        ("shm", ends(no_rdma=""), ["shm", "tcp"], []),
        ("shm", ends(there="b", no_rdma=""), ["tcp"], ["another host (b)"]),
        ("rdma", ends(no_rdma=""), ["rdma", "tcp"], []),
        ("rdma", ends(), ["tcp"], [NONE]),
        ("tcp", ends(no_rdma=""), ["tcp"], []),
    ],
)
def test_paths_are_tried_in_this_order(
    wish: str, given: Ends, steps: list[str], ruled_out: list[str]
) -> None:
    plan = plan_transfer(Transport(wish), given)
    assert [step.transport for step in plan.steps] == steps
    assert [path.reason for path in plan.ruled_out] == ruled_out


def test_tcp_tells_what_was_wrong_with_the_others() -> None:
    plan = plan_transfer(Transport.AUTO, ends(there="b", no_rdma=""))
    failed = [PathInfo("rdma", "the node has no RDMA door")]
    used = settle(plan.steps[-1], plan.ruled_out, failed)
    assert used == PathInfo("tcp", "another host (b); the node has no RDMA door")


def test_a_better_path_keeps_its_own_reason() -> None:
    plan = plan_transfer(Transport.AUTO, ends())
    assert settle(plan.steps[0], plan.ruled_out, []) == PathInfo("shm", "same host")


def test_tcp_by_wish_says_so() -> None:
    (step,) = plan_transfer(Transport.TCP, ends()).steps
    assert settle(step, [], []) == PathInfo("tcp", "pool.transport is tcp")
