"""A machine without RDMA, as most are: everything says so and nothing breaks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fix_dmp import Rig
from tests.fix_tls import Certificates
from tierkv.dmp.transport.connection import Peer, PeerConnection
from tierkv.dmp.transport.verbs.device import discover
from tierkv.dmp.wire.frame import FrameType
from tierkv.dmp.wire.rdma_messages import QpAddress, RdmaConnect, RdmaOffer
from tierkv.kvcore.errors import ConfigError, TransportError


def test_no_device_is_a_reason_not_an_error(tmp_path: Path) -> None:
    found = discover(sysfs=tmp_path / "none")
    assert (found.ports, found.reason) == ((), "no RDMA: this machine has no RDMA device")


def test_an_unknown_device_is_named(tmp_path: Path) -> None:
    (tmp_path / "mlx5_0").mkdir()
    found = discover(["mlx5_7"], sysfs=tmp_path)
    assert (found.ports, found.reason) == ((), "no RDMA: there is no device mlx5_7")


def test_a_device_that_cant_be_opened_is_a_reason(tmp_path: Path) -> None:
    (tmp_path / "nosuch0").mkdir()
    found = discover(sysfs=tmp_path)
    assert found.ports == () and found.reason.startswith("no RDMA: ")


def test_a_node_without_rdma_offers_nothing_and_says_why(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(rdma="off")
    connection = PeerConnection(Peer(rig.node.node_id, rig.server.address))
    try:
        offer = RdmaOffer.unpack(connection.call(FrameType.RDMA_OFFER, b""))
        assert offer == RdmaOffer([], "the node is configured without RDMA")
        ask = RdmaConnect("mlx5_0", QpAddress("::1", 0, 1, 2, 5, 16))
        with pytest.raises(TransportError, match="configured without RDMA"):
            connection.call(FrameType.RDMA_CONNECT, ask.pack())
        assert RdmaOffer.unpack(connection.call(FrameType.RDMA_OFFER, b"")) == offer
    finally:
        connection.close()


def test_nonsense_ends_the_connection_not_the_node(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(rdma="off")
    peer = Peer(rig.node.node_id, rig.server.address)
    connection = PeerConnection(peer)
    try:
        with pytest.raises(TransportError):
            connection.call(FrameType.RDMA_CONNECT, b"\xff" * 40)
    finally:
        connection.close()
    other = PeerConnection(peer)
    assert other.is_open
    other.close()


def test_tls_keeps_the_door_shut_unless_it_is_asked_for(
    make_rig: Callable[..., Rig], certificates: Certificates
) -> None:
    secret = make_rig(tls=certificates.server)
    assert secret.server.rdma is not None
    assert "RDMA is not encrypted" in secret.server.rdma.reason
    asked = make_rig("dmp-b", tls=certificates.server, rdma="on")
    assert asked.server.rdma is not None
    assert "encrypted" not in asked.server.rdma.reason


def test_rdma_is_auto_on_or_off(make_rig: Callable[..., Rig]) -> None:
    with pytest.raises(ConfigError, match="auto, on or off"):
        make_rig(rdma="maybe")
