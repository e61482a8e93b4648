"""Connections follow nodes' lives."""

from __future__ import annotations

import pytest

from kvcore.errors import DirectoryUnavailableError, TransportError
from kvcore.ids import Incarnation, NodeId
from kvcore.node import NodeInfo, NodeRole
from scheduler.cluster_view import FORGET_AFTER_LOOKS, ClusterView
from tests.fix_scheduler import FakeCompute, FakeMeta, make_info

C1 = NodeId("c1")


class Connections:
    """Makes fakes and remembers them."""

    def __init__(self) -> None:
        self.made: list[FakeCompute] = []

    def __call__(self, info: NodeInfo) -> FakeCompute:
        self.made.append(FakeCompute(info))
        return self.made[-1]


async def test_only_compute_nodes_are_for_routing_but_all_are_seen() -> None:
    meta = FakeMeta(make_info("c1"), make_info("d", role=NodeRole.DMP))
    view = ClusterView(meta=meta, connect=Connections())
    assert [seen.info.node_id for seen in await view.refresh()] == ["c1"]
    assert len(view.nodes) == 2


async def test_one_connection_per_life_and_the_old_one_outlives_its_requests() -> None:
    connect = Connections()
    meta = FakeMeta(make_info("c1"))
    view = ClusterView(meta=meta, connect=connect)
    await view.refresh()
    first = view.client(C1, Incarnation(1))
    assert view.client(C1, Incarnation(1)) is first
    meta.put(make_info("c1", incarnation=Incarnation(2)))
    await view.refresh()
    assert not connect.made[0].closed
    with pytest.raises(TransportError):
        view.client(C1, Incarnation(1))
    view.client(C1, Incarnation(2))
    await view.refresh()
    assert connect.made[0].closed
    await view.close()
    assert connect.made[1].closed


async def test_nodes_that_stay_away_are_forgotten() -> None:
    connect = Connections()
    meta = FakeMeta(make_info("c1"))
    view = ClusterView(meta=meta, connect=connect)
    await view.refresh()
    view.client(C1, Incarnation(1))
    meta.nodes.clear()
    for _ in range(FORGET_AFTER_LOOKS):
        await view.refresh()
    with pytest.raises(TransportError):
        view.client(C1, Incarnation(1))
    await view.close()
    assert connect.made[0].closed


async def test_a_silent_directory_is_the_callers_to_judge() -> None:
    meta = FakeMeta()
    meta.down = True
    with pytest.raises(DirectoryUnavailableError):
        await ClusterView(meta=meta, connect=Connections()).refresh()
