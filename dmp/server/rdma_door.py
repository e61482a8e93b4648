"""The RDMA server of a DMP node: the registered segment, for peers that read and write one-sidedly.

Opened by dmp/server/server.py beside the TCP server. dmp/server/client_connection.py passes in the
frames that set up queue pairs. After the setup the node's processor takes no part in a transfer:
peers address slots and check headers and checksums themselves, and the device confines peers to the
two registered ranges.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress

from tierkv.dmp.config import DmpConfig
from tierkv.dmp.node.node import DmpNode
from tierkv.dmp.transport.verbs.device import Access, Device, QueuePair, RdmaPort, Region, discover
from tierkv.dmp.transport.verbs.fabric import address_of
from tierkv.dmp.wire import rdma_messages as m
from tierkv.dmp.wire.frame import FrameType
from tierkv.kvcore.errors import TransportError

log = logging.getLogger(__name__)
_DEPTH = 1
"""Send queue depth: a serving queue pair sends nothing."""


class _Hall:
    """One device of the node and the two registered ranges of the segment."""

    def __init__(self, port: RdmaPort, node: DmpNode) -> None:
        if not node.segment.backing.back_all():  # A device pins the segment.
            raise TransportError("there is no memory for the whole segment, which RDMA pins")
        memory, payload_at = node.segment.memory, node.segment.geometry.payload_at
        base, size = address_of(memory), len(memory)
        self.device = Device(port)
        self._regions: list[Region] = []
        try:
            # Only the node writes headers: a peer can't seal or forge a slot.
            headers = self._register(base, payload_at, Access.READABLE)
            payload = self._register(base + payload_at, size - payload_at, Access.SHARED)
        except TransportError:
            self.close()
            raise
        self.headers = m.RemoteArea(base, headers.rkey)
        self.payload = m.RemoteArea(base + payload_at, payload.rkey)

    def _register(self, address: int, size: int, access: Access) -> Region:
        region = self.device.register(address, size, access)
        self._regions.append(region)
        return region

    def close(self) -> None:
        for region in self._regions:
            region.close()
        self.device.close()


def _why_closed(config: DmpConfig) -> str:
    if config.rdma == "off":
        return "the node is configured without RDMA"
    if config.rdma == "auto" and config.tls.serves:
        return "the node speaks TLS and RDMA is not encrypted; dmp.rdma=on opens it all the same"
    return ""


class RdmaDoor:
    """The RDMA devices that a node serves; no device, with a reason, where RDMA is impossible.

    Attributes:
        reason: why RDMA is unavailable; empty if RDMA works.
    """

    def __init__(self, node: DmpNode) -> None:
        self._node = node
        self._lock = threading.Lock()
        self._guests: set[RdmaGuest] = set()
        self._halls: dict[str, _Hall] = {}
        self.reason = _why_closed(node.config) or self._open()
        if self._halls:
            log.info("dmp %s: RDMA on %s", node.node_id, ", ".join(self._halls))
        else:
            log.info("dmp %s: TCP only: %s", node.node_id, self.reason)

    @property
    def devices(self) -> tuple[str, ...]:
        """Names of the served devices."""
        return tuple(self._halls)

    def _open(self) -> str:
        found = discover(self._node.config.rdma_devices)
        if not found.ports:
            return found.reason
        problems: list[str] = []
        for port in found.ports:
            try:
                self._halls[port.device] = _Hall(port, self._node)
            except TransportError as error:
                problems.append(error.message)
        return "" if self._halls else f"no RDMA: {'; '.join(problems)}"

    def guest(self) -> RdmaGuest:
        """Create the state of one client connection; the connection must close the guest."""
        guest = RdmaGuest(self)
        with self._lock:
            self._guests.add(guest)
        return guest

    def offer(self) -> m.RdmaOffer:
        """Return the ports that a client may connect to."""
        ports = [m.PortOffer(name, h.device.port.gid) for name, h in self._halls.items()]
        return m.RdmaOffer(ports, self.reason)

    def connect(self, ask: m.RdmaConnect) -> tuple[QueuePair, m.RdmaAccept]:
        """Make the node's end of a connection.

        Raises:
            TransportError: the device does not exist or can't reach the client.
        """
        hall = self._halls.get(ask.device)
        if hall is None:
            raise TransportError(self.reason or f"the node has no RDMA device {ask.device!r}")
        pair = QueuePair(hall.device, depth=_DEPTH, serves=True)
        try:
            pair.connect(ask.address)
        except TransportError:
            pair.close()
            raise
        node = self._node
        shape = node.segment.geometry
        areas = (hall.headers, hall.payload)
        return pair, m.RdmaAccept(pair.address, node.incarnation, shape, *areas)

    def left(self, guest: RdmaGuest) -> None:
        """Forget a closed guest."""
        with self._lock:
            self._guests.discard(guest)

    def close(self) -> None:
        """End every connection and deregister the segment; call before the segment is unmapped."""
        with self._lock:
            guests = list(self._guests)
        for guest in guests:
            guest.close()
        halls, self._halls = self._halls, {}
        self.reason = "the node is stopping"
        for hall in halls.values():
            with suppress(TransportError):  # The end of the process frees the device.
                hall.close()


class RdmaGuest:
    """The queue pair of one client connection; ends with the connection.

    Attributes:
        handlers: handlers of the session's RDMA frames.
    """

    def __init__(self, door: RdmaDoor) -> None:
        self._door = door
        self._lock = threading.Lock()
        self._pair: QueuePair | None = None
        self._closed = False
        self.handlers: dict[FrameType, Callable[[bytearray], bytes]] = {
            FrameType.RDMA_OFFER: self._offer,
            FrameType.RDMA_CONNECT: self._connect,
        }

    def close(self) -> None:
        """Revoke the peer's access; harmless when repeated."""
        with self._lock:
            self._closed = True
            self._drop()
        self._door.left(self)

    def _offer(self, head: bytearray) -> bytes:
        return self._door.offer().pack()

    def _connect(self, head: bytearray) -> bytes:
        ask = m.RdmaConnect.unpack(head)
        with self._lock:
            if self._closed:
                raise TransportError("the node is stopping")
            self._drop()  # One per connection: connections bound pairs.
            self._pair, accept = self._door.connect(ask)
        return accept.pack()

    def _drop(self) -> None:
        pair, self._pair = self._pair, None
        if pair is not None:
            with suppress(TransportError):
                pair.close()
