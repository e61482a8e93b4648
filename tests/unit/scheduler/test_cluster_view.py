"""Connections follow nodes' lives."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.fix_meta import BreakableMeta, join, leave
from tests.fix_scheduler import FakeCompute, make_info, make_model
from tierkv.kvcore.errors import DirectoryUnavailableError, TransportError
from tierkv.kvcore.ids import Incarnation, NodeId
from tierkv.kvcore.node import NodeInfo, NodeReport, NodeRole
from tierkv.metaserver.client import DirectoryNode
from tierkv.parts.record_follower import NodeFile
from tierkv.scheduler.nodes.cluster_view import FORGET_AFTER_LOOKS, ClusterView

C1 = NodeId("c1")


class Connections:
    """Makes fakes and remembers them."""

    def __init__(self) -> None:
        self.made: list[FakeCompute] = []

    def __call__(self, info: NodeInfo) -> FakeCompute:
        self.made.append(FakeCompute(info))
        return self.made[-1]


@pytest.fixture
async def meta() -> AsyncIterator[BreakableMeta]:
    meta = BreakableMeta()
    yield meta
    await meta.close()


async def test_only_compute_nodes_are_for_routing_but_all_are_seen(meta: BreakableMeta) -> None:
    for info in (make_info("c1"), make_info("d", role=NodeRole.DMP)):
        await join(meta, info)
    view = ClusterView(meta=meta, connect=Connections())
    assert [seen.info.node_id for seen in await view.refresh()] == ["c1"]
    assert len(view.nodes) == 2


async def test_one_connection_per_life_and_the_old_one_outlives_its_requests(
    meta: BreakableMeta,
) -> None:
    connect = Connections()
    await join(meta, make_info("c1"))
    view = ClusterView(meta=meta, connect=connect)
    await view.refresh()
    first = view.client(C1, Incarnation(1))
    assert view.client(C1, Incarnation(1)) is first
    await join(meta, make_info("c1", incarnation=Incarnation(2)))
    await view.refresh()
    assert not connect.made[0].closed
    with pytest.raises(TransportError):
        view.client(C1, Incarnation(1))
    view.client(C1, Incarnation(2))
    await view.refresh()
    assert connect.made[0].closed
    await view.close()
    assert connect.made[1].closed


async def test_nodes_that_stay_away_are_forgotten(meta: BreakableMeta) -> None:
    connect = Connections()
    await join(meta, make_info("c1"))
    view = ClusterView(meta=meta, connect=connect)
    await view.refresh()
    view.client(C1, Incarnation(1))
    await leave(meta)
    for _ in range(FORGET_AFTER_LOOKS):
        await view.refresh()
    with pytest.raises(TransportError):
        view.client(C1, Incarnation(1))
    await view.close()
    assert connect.made[0].closed


async def test_a_silent_directory_is_the_callers_to_judge(meta: BreakableMeta) -> None:
    meta.down = True
    with pytest.raises(DirectoryUnavailableError):
        await ClusterView(meta=meta, connect=Connections()).refresh()


async def test_without_a_meta_server_remembered_nodes_are_asked_for_themselves(
    meta: BreakableMeta, tmp_path: Path
) -> None:
    memory = NodeFile(tmp_path / "nodes", meta_address="m")
    last_run = (make_info("c1"), make_info("c2"), make_info("d", role=NodeRole.DMP))
    listed = [DirectoryNode(i, NodeReport(), heartbeat_age_s=0.0, state="alive") for i in last_run]
    memory.note(listed, "tiny")
    await join(meta, make_info("c1", incarnation=Incarnation(3)))
    meta.down = True
    lives = {"c1": Incarnation(2)}  # c1 was started again since; c2 has another's address now.

    def connect(info: NodeInfo) -> FakeCompute:
        described = make_info("c1", incarnation=lives["c1"])
        return FakeCompute(described)

    view = ClusterView(meta=meta, connect=connect, memory=memory)
    seen = await view.refresh()
    assert [(s.info.node_id, s.info.incarnation, s.state) for s in seen] == [
        ("c1", 2, "alive"), ("c2", 1, "dead")
    ]  # fmt: skip
    assert view.from_memory and view.pool_nodes == 0 and len(memory.load()[0]) == 3
    view.client(C1, Incarnation(2))
    lives["c1"] = Incarnation(3)
    await view.refresh()
    meta.down = False
    assert [s.info.incarnation for s in await view.refresh()] == [3]
    assert not view.from_memory
    noted, default_model = memory.load()
    assert ([node.info.incarnation for node in noted], default_model) == ([3], "tiny")
    meta.down = True
    with pytest.raises(DirectoryUnavailableError):
        await view.refresh()


async def test_the_only_model_stays_the_default_when_another_joins(meta: BreakableMeta) -> None:
    await join(meta, make_info("c1"))
    view = ClusterView(meta=meta, connect=Connections())
    assert view.default_model == ""
    await view.refresh()
    await join(meta, make_info("c2", models=(make_model("other"),)))
    await view.refresh()
    assert view.default_model == "tiny"
    await meta.deregister(C1, Incarnation(1))
    await view.refresh()
    assert view.default_model == "other"
