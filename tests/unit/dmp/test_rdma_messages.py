from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.dmp.segment.geometry import Geometry
from tierkv.dmp.wire.rdma_messages import (
    PortOffer,
    QpAddress,
    RdmaAccept,
    RdmaConnect,
    RdmaOffer,
    RemoteArea,
)
from tierkv.kvcore.errors import RemoteProtocolError
from tierkv.kvcore.ids import Incarnation

GID = "0000:0000:0000:0000:0000:ffff:0a4d:0001"
ADDRESS = QpAddress(GID, lid=3, qp_num=17, psn=0xABCDEF, mtu=5, reads=16)
ACCEPT = RdmaAccept(
    ADDRESS,
    Incarnation(1 << 60),
    Geometry.of(extent_count=4, extent_bytes=256 << 10),
    RemoteArea(0x7F00_0000_0000, 0xFFFF_FFFF),
    RemoteArea(0x7F00_0010_0000, 1),
)


@pytest.mark.parametrize(
    "message",
    [
        RdmaOffer([PortOffer("rxe0", GID), PortOffer("rxe2", GID)]),
        RdmaOffer([], "no RDMA: this machine has no RDMA device"),
        RdmaConnect("rxe0", ADDRESS),
        ACCEPT,
    ],
)
def test_messages_come_back_as_they_were(message) -> None:
    assert type(message).unpack(message.pack()) == message


@pytest.mark.parametrize("kind", [RdmaOffer, RdmaConnect, RdmaAccept])
@given(head=st.binary(max_size=200))
def test_nonsense_is_a_protocol_error(kind, head: bytes) -> None:
    try:
        kind.unpack(head)
    except RemoteProtocolError:
        return
    assert kind.unpack(kind.unpack(head).pack()) == kind.unpack(head)


@given(at=st.integers(0, len(ACCEPT.pack()) - 1), bit=st.integers(0, 7))
def test_a_damaged_accept_is_another_one_or_refused(at: int, bit: int) -> None:
    raw = bytearray(ACCEPT.pack())
    raw[at] ^= 1 << bit
    with contextlib.suppress(RemoteProtocolError):
        assert RdmaAccept.unpack(raw) != ACCEPT


@pytest.mark.parametrize(
    "changes", [{"mtu": 0}, {"mtu": 6}, {"reads": 0}, {"qp_num": 1 << 24}, {"psn": 1 << 24}]
)
def test_impossible_queue_pairs_are_refused(changes: dict[str, int]) -> None:
    with pytest.raises(RemoteProtocolError):
        RdmaConnect.unpack(RdmaConnect("rxe0", replace(ADDRESS, **changes)).pack())
