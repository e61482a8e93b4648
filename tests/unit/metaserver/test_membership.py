"""Silence makes nodes suspect, dead and forgotten; incarnations fence the past off."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tierkv.kvcore import limits
from tierkv.kvcore.errors import ConfigError, OverloadedError, StaleEpochError
from tierkv.kvcore.ids import HostId, Incarnation, NodeId
from tierkv.kvcore.node import NodeInfo, NodeLoad, NodeReport, NodeRole
from tierkv.metaserver.config import MetaConfig
from tierkv.metaserver.state import Membership, MetaState


def node(name: str = "n", incarnation: int = 5) -> NodeInfo:
    return NodeInfo(NodeId(name), Incarnation(incarnation), NodeRole.DMP, HostId("h"))


def states(members: Membership, now: float) -> list[tuple[str, str]]:
    return [(n.info.node_id, n.state) for n in members.nodes(now)]


def test_a_node_dies_once_and_is_forgotten_later() -> None:
    members = Membership(MetaConfig(forget_after_s=100.0))
    members.register(node("a"), now=0.0)
    members.register(node("b"), now=0.0)
    assert members.heartbeat(NodeId("b"), Incarnation(5), NodeReport(), now=3.0)
    assert members.expire(now=4.9) == []
    assert states(members, 4.9) == [("a", "suspect"), ("b", "alive")]
    assert members.expire(now=5.5) == ["a"]
    assert members.expire(now=6.0) == []
    assert states(members, 6.0) == [("a", "dead"), ("b", "suspect")]
    assert not members.heartbeat(NodeId("a"), Incarnation(5), NodeReport(), now=6.0)
    assert members.expire(now=101.0) == ["b"]
    assert states(members, 101.0) == [("b", "dead")]


def test_a_report_survives_registering_again_but_not_a_restart() -> None:
    members = Membership(MetaConfig())
    busy = NodeReport(load=NodeLoad(requests_running=3))
    members.register(node(), now=0.0)
    members.heartbeat(NodeId("n"), Incarnation(5), busy, now=0.5)
    members.register(node(), now=1.0)
    assert members.nodes(1.0)[0].report == busy
    members.register(node(incarnation=6), now=1.0)
    assert members.nodes(1.0)[0].report == NodeReport()


def test_the_pools_version_tells_of_pool_nodes_that_come_leave_and_die() -> None:
    members = Membership(MetaConfig())
    seen = [members.pool_version]
    members.register(node("a"), now=0.0)
    seen.append(members.pool_version)
    members.register(node("a"), now=0.5)
    members.register(replace(node("c"), role=NodeRole.COMPUTE), now=0.5)
    members.heartbeat(NodeId("a"), Incarnation(5), NodeReport(), now=1.0)
    assert members.pool_version == seen[-1]
    members.register(node("a", incarnation=6), now=1.0)
    seen.append(members.pool_version)
    members.register(node("b"), now=3.0)
    seen.append(members.pool_version)
    members.expire(now=6.1)
    seen.append(members.pool_version)
    members.deregister(NodeId("b"), Incarnation(5))
    assert members.pool_version == seen[0]
    assert len(set(seen)) == len(seen) and 0 not in seen


def test_an_older_incarnation_comes_back_only_when_the_newer_is_dead() -> None:
    members = Membership(MetaConfig())
    members.register(node(incarnation=6), now=0.0)
    with pytest.raises(StaleEpochError, match="incarnation 6; 5 is older") as caught:
        members.register(node(incarnation=5), now=1.0)
    assert "own node id" in caught.value.hint
    members.expire(now=6.0)
    members.register(node(incarnation=5), now=6.0)
    assert members.nodes(6.0)[0].info.incarnation == 5


def test_a_second_process_of_a_name_waits_until_the_first_is_silent() -> None:
    members = Membership(MetaConfig())
    members.register(node(incarnation=5), now=0.0, home="a")
    with pytest.raises(StaleEpochError, match=r"node n is already running at h") as caught:
        members.register(node(incarnation=6), now=1.0, home="b")
    assert "--node-id" in caught.value.hint
    assert members.heartbeat(NodeId("n"), Incarnation(5), NodeReport(), now=2.0)
    assert members.nodes(2.0)[0].rival == "h"
    assert members.nodes(12.0)[0].rival == ""
    members.expire(now=7.0)
    members.register(node(incarnation=6), now=7.0, home="b")
    assert members.nodes(7.0)[0].info.incarnation == 6


@pytest.mark.parametrize(("first", "second"), [("a", "a"), ("", "b"), ("a", "")])
def test_a_restart_at_the_same_home_is_taken_at_once(first: str, second: str) -> None:
    members = Membership(MetaConfig())
    members.register(node(incarnation=5), now=0.0, home=first)
    members.register(node(incarnation=6), now=0.1, home=second)
    assert members.nodes(0.1)[0].info.incarnation == 6


def test_the_cluster_has_a_size_limit() -> None:
    members = Membership(MetaConfig())
    for number in range(limits.MAX_NODES):
        members.register(node(f"n{number}"), now=0.0)
    with pytest.raises(OverloadedError, match="4096 nodes"):
        members.register(node("one-more"), now=0.0)
    members.register(node("n0", incarnation=6), now=0.0)


def test_directory_and_membership_agree_on_who_lives() -> None:
    state = MetaState(MetaConfig())
    for name in ("a", "b", "c"):
        state.register(node(name), now=0.0)
    state.deregister(NodeId("b"), Incarnation(4))
    state.check_invariants(0.0)
    state.deregister(NodeId("b"), Incarnation(5))
    state.heartbeat(NodeId("c"), Incarnation(5), NodeReport(), now=4.0)
    assert [n.state for n in state.list_nodes(6.0)] == ["dead", "alive"]
    state.check_invariants(6.0)


@pytest.mark.parametrize(
    "times",
    [
        {"heartbeat_interval_s": 0.0},
        {"heartbeat_interval_s": 3.0},
        {"suspect_after_s": 6.0},
        {"dead_after_s": float("nan")},
        {"forget_after_s": 5.0},
    ],
)
def test_times_that_can_not_work_are_refused(times: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="must hold"):
        MetaConfig(**times)


def test_a_short_secret_is_refused_and_none_is_shown() -> None:
    with pytest.raises(ConfigError, match="16 to 64 bytes"):
        MetaConfig(cluster_secret=b"short")
    shown = repr(MetaConfig(cluster_secret=b"0123456789abcdef", token="hush"))
    assert "0123" not in shown
    assert "hush" not in shown
