"""Heads of the frames that set up one-sided RDMA: a node's offer, and one queue pair.

Called by dmp/server/rdma_door.py and dmp/transport/verbs/link.py, over the control connection.
Remote keys travel only in these messages, and every repr leaves them out.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from tierkv.dmp.segment.geometry import LAYOUT_VERSION, Geometry
from tierkv.dmp.wire.packing import Packer, Unpacker
from tierkv.kvcore.errors import RemoteProtocolError
from tierkv.kvcore.ids import Incarnation

Head = bytes | bytearray | memoryview
MAX_PORTS: Final = 64
MAX_MTU: Final = 5
"""Largest value of ibv_mtu: 4096 bytes."""


@dataclass(frozen=True, slots=True)
class PortOffer:
    """A port of the node that serves RDMA."""

    device: str
    gid: str


@dataclass(frozen=True, slots=True)
class RdmaOffer:
    """The reply to RDMA_OFFER: the node's ports, or the reason for having no ports."""

    ports: Sequence[PortOffer]
    reason: str = ""

    def pack(self) -> bytes:
        p = Packer().pack("I", len(self.ports))
        for port in self.ports:
            p.text(port.device).raw(_pack_gid(port.gid))
        return p.text(self.reason).bytes()

    @classmethod
    def unpack(cls, head: Head) -> RdmaOffer:
        u = Unpacker(head)
        count = u.integer("I")
        if count > MAX_PORTS:
            raise RemoteProtocolError(f"{count} RDMA ports, {MAX_PORTS} allowed")
        ports = [PortOffer(u.text(), _unpack_gid(u)) for _ in range(count)]
        message = cls(ports, u.text())
        u.end()
        return message


@dataclass(frozen=True, slots=True)
class QpAddress:
    """One end of a reliable connection.

    Attributes:
        gid: address of the port.
        lid: InfiniBand local id of the port; 0 on Ethernet.
        qp_num: queue pair number.
        psn: first packet number that this end sends.
        mtu: largest packet, as ibv_mtu (5 is 4096 bytes).
        reads: maximum number of concurrent RDMA READs, to serve or in flight.
    """

    gid: str
    lid: int
    qp_num: int
    psn: int
    mtu: int
    reads: int

    def pack_into(self, p: Packer) -> Packer:
        """Append the fields."""
        p.raw(_pack_gid(self.gid))
        return p.pack("HIIBB", self.lid, self.qp_num, self.psn, self.mtu, self.reads)

    @classmethod
    def take(cls, u: Unpacker) -> QpAddress:
        """Take the fields.

        Raises:
            RemoteProtocolError: a number is out of range.
        """
        address = cls(_unpack_gid(u), *(u.integer(code) for code in "HIIBB"))
        if not 1 <= address.mtu <= MAX_MTU or address.reads < 1:
            raise RemoteProtocolError("a queue pair of impossible MTU or depth")
        if max(address.qp_num, address.psn) >= 1 << 24:
            raise RemoteProtocolError("queue pair and packet numbers have 24 bits")
        return address


@dataclass(frozen=True, slots=True)
class RdmaConnect:
    """Request for a queue pair, on a device of the node, that is connected to the client's."""

    device: str
    address: QpAddress

    def pack(self) -> bytes:
        return self.address.pack_into(Packer().text(self.device)).bytes()

    @classmethod
    def unpack(cls, head: Head) -> RdmaConnect:
        u = Unpacker(head)
        message = cls(u.text(), QpAddress.take(u))
        u.end()
        return message


@dataclass(frozen=True, slots=True)
class RemoteArea:
    """A registered range of the node's segment, as one of its devices knows the range."""

    address: int
    rkey: int = field(repr=False)


@dataclass(frozen=True, slots=True)
class RdmaAccept:
    """The node's queue pair, and the addresses of the segment.

    Attributes:
        address: the node's end of the connection.
        incarnation: life of the node in which the addresses are valid.
        geometry: layout of the segment.
        headers: the file's bytes [0, payload_at), read-only.
        payload: the file's bytes [payload_at, file_bytes).
    """

    address: QpAddress
    incarnation: Incarnation
    geometry: Geometry
    headers: RemoteArea
    payload: RemoteArea

    def pack(self) -> bytes:
        shape = self.geometry
        p = self.address.pack_into(Packer()).pack("QI", self.incarnation, LAYOUT_VERSION)
        p.pack("QQQ", shape.extent_count, shape.extent_bytes, shape.slots_per_extent)
        for area in (self.headers, self.payload):
            p.pack("QI", area.address, area.rkey)
        return p.bytes()

    @classmethod
    def unpack(cls, head: Head) -> RdmaAccept:
        u = Unpacker(head)
        address = QpAddress.take(u)
        incarnation = Incarnation(u.integer("Q"))
        version = u.integer("I")
        if version != LAYOUT_VERSION:
            raise RemoteProtocolError(f"the node's segment has layout version {version}")
        extent_count, extent_bytes, slots_per_extent = u.integers("Q", 3)
        if not extent_count or not extent_bytes or not slots_per_extent:
            raise RemoteProtocolError("the node's segment has no room")
        areas = [RemoteArea(u.integer("Q"), u.integer("I")) for _ in range(2)]
        u.end()
        shape = Geometry(extent_count, extent_bytes, slots_per_extent)
        return cls(address, incarnation, shape, *areas)


def _pack_gid(gid: str) -> bytes:
    return ipaddress.IPv6Address(gid).packed


def _unpack_gid(u: Unpacker) -> str:
    return ipaddress.IPv6Address(u.raw(16)).exploded
