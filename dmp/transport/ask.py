"""Requests in flight: the bytes to send, and the destination of the reply.

Made by dmp/transport/tcp.py, sent by dmp/transport/connection.py. A read fills the caller's buffers
piece by piece. Each piece is verified while its bytes are still in the processor's cache and the
next piece is in flight.

SingleRead reads a single range with the fewest instructions, because Python is most of the cost of
a small get. One call sends the request. One call receives header, checksum and the part of the
payload that has arrived. One call receives the rest.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import xxhash

from tierkv.dmp.wire.frame import (
    AHEAD,
    MAGIC,
    PROTOCOL_VERSION,
    FrameHeader,
    FrameType,
    pack_header,
)
from tierkv.dmp.wire.messages import Put
from tierkv.dmp.wire.range_codec import ONE_RANGE_BYTES, Ref, pack_ranges, pack_sums, unpack_sums
from tierkv.dmp.wire.socket_io import Buffer, Wire
from tierkv.kvcore.block import BlockSpec
from tierkv.kvcore.errors import RemoteProtocolError
from tierkv.kvwire.frames import HEADER, HEADER_BYTES

_REQUEST: Final = struct.Struct("<4sBBHIIIIQIQQIQ")
_READ: Final = int(FrameType.READ)
_REPLY: Final = int(FrameType.REPLY)
LEAD_BYTES: Final = HEADER_BYTES + 8
PIECE_BYTES: Final = 256 << 10
"""Bytes received and verified at a time: half of a usual L2 cache."""


class SingleRead:
    """Sends reads of one range over one wire; used by one thread at a time.

    Attributes:
        lead: header and checksum of the latest reply; the first bytes of any other reply.
    """

    __slots__ = ("_wire", "lead")

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self.lead = memoryview(bytearray(LEAD_BYTES))

    def read(self, request_id: int, ref: Ref, view: memoryview) -> int:
        """Request a range and receive the beginning of the reply.

        Returns:
            Number of bytes of ``view`` that are filled.
        """
        lead = self.lead
        request = _REQUEST.pack(
            MAGIC, PROTOCOL_VERSION, _READ, 0, request_id, ONE_RANGE_BYTES, 0, 1, *ref
        )
        got = self._wire.ask(request, (lead, view))
        if got < LEAD_BYTES:
            self._wire.receive_into(lead[got:])
            got = LEAD_BYTES
        return got - LEAD_BYTES

    def is_answer(self, request_id: int, size: int) -> bool:
        """Return True if ``lead`` begins the expected reply, not an error or an invalid frame."""
        want = HEADER.pack(MAGIC, PROTOCOL_VERSION, _REPLY, 0, request_id, 8, size)
        return self.lead[:HEADER_BYTES] == want

    def finish(self, view: memoryview, got: int) -> bool:
        """Receive the rest of the range; return True if the bytes match the received checksum."""
        size = len(view)
        if size <= PIECE_BYTES:
            if got < size:
                self._wire.receive_into(view[got:])
            found = xxhash.xxh3_64_intdigest(view)
        else:
            found = receive_hashed(self._wire, view, got)
        return found == int.from_bytes(self.lead[HEADER_BYTES:], "little")


def receive_hashed(wire: Wire, view: memoryview, got: int = 0) -> int:
    """Fill the rest of a view; hash each piece while it is cached and the next piece arrives."""
    state = xxhash.xxh3_64()
    if got:
        state.update(view[:got])
    for start in range(got, len(view), PIECE_BYTES):
        piece = view[start : start + PIECE_BYTES]
        wire.receive_into(piece)
        state.update(piece)
    return state.intdigest()


class Ask:
    """A request whose reply has no payload.

    Attributes:
        kind: frame type.
        head: packed message.
        payload: buffers that follow the head.
        flags: bits set in the request id.
        reply: head of the reply, once received.
    """

    __slots__ = ("flags", "head", "kind", "payload", "reply")

    def __init__(self, kind: FrameType, head: bytes, payload: Sequence[Buffer] = ()) -> None:
        self.kind = kind
        self.head = head
        self.payload = payload
        self.flags = 0
        self.reply = bytearray()

    def send(self, wire: Wire, request_id: int) -> None:
        """Send the whole request.

        Raises:
            OSError: the peer does not accept the bytes.
        """
        size = sum([len(part) for part in self.payload])
        wire.send([self._lead(request_id, size), *self.payload])

    def _lead(self, request_id: int, payload_bytes: int) -> bytes:
        head = self.head
        header = pack_header(
            self.kind, request_id, head_bytes=len(head), payload_bytes=payload_bytes
        )
        return header + head

    def take(self, wire: Wire, header: FrameHeader) -> None:
        """Receive the part of the reply that follows the header.

        Raises:
            RemoteProtocolError: the reply does not match the request.
            OSError, EOFError: the reply did not arrive.
        """
        if header.payload_bytes:
            raise RemoteProtocolError(f"{header.payload_bytes} payload bytes nobody asked for")
        if header.head_bytes:
            self.reply = bytearray(header.head_bytes)
            wire.receive_into(memoryview(self.reply))


class PutAsk(Ask):
    """A request to store whole blocks, hashed piece by piece during the send."""

    __slots__ = ("_payloads", "_puts")

    def __init__(self, puts: Sequence[BlockSpec], payloads: Sequence[memoryview]) -> None:
        super().__init__(FrameType.PUT, Put(puts).pack(), payloads)
        self._puts = puts
        self._payloads = payloads

    def send(self, wire: Wire, request_id: int) -> None:
        ranges = [
            payload[start : start + put.ranges.size_bytes]
            for put, payload in zip(self._puts, self._payloads, strict=True)
            for start in range(0, len(payload), put.ranges.size_bytes)
        ]
        size = sum([len(payload) for payload in self._payloads])
        ready: list[Buffer] = [self._lead(request_id, size + 8 * len(ranges))]
        waiting = 0
        sums = []
        for piece in ranges:
            if len(piece) > PIECE_BYTES:
                sums.append(_send_long(wire, ready, piece))
                ready, waiting = [], 0
                continue
            sums.append(xxhash.xxh3_64_intdigest(piece))
            ready.append(piece)
            waiting += len(piece)
            if waiting >= PIECE_BYTES:
                wire.send(ready)
                ready, waiting = [], 0
        wire.send([*ready, pack_sums(sums)])


def _send_long(wire: Wire, ready: Sequence[Buffer], data: memoryview) -> int:
    """Send the ready buffers and a long range; return the checksum of the range."""
    state = xxhash.xxh3_64()
    for start in range(0, len(data), PIECE_BYTES):
        piece = data[start : start + PIECE_BYTES]
        state.update(piece)
        wire.send([*ready, piece])
        ready = ()
    return state.intdigest()


class ReadAsk(Ask):
    """A request for ranges.

    Attributes:
        bad: positions of ranges whose bytes do not match the received checksum.
    """

    __slots__ = ("_size", "_views", "bad")

    def __init__(
        self, refs: Sequence[Ref], views: Sequence[memoryview], *, ahead: bool = False
    ) -> None:
        super().__init__(FrameType.READ, pack_ranges(refs))
        self.flags = AHEAD if ahead else 0
        self.bad: list[int] = []
        self._views = views
        self._size = sum([ref[5] for ref in refs])

    def take(self, wire: Wire, header: FrameHeader) -> None:
        views = self._views
        if header.head_bytes != 8 * len(views) or header.payload_bytes != self._size:
            raise RemoteProtocolError("the ranges are not as long as the destinations")
        head = memoryview(bytearray(header.head_bytes))
        if self._size <= PIECE_BYTES:
            wire.receive_all([head, *views])
            found: Iterable[int] = map(xxhash.xxh3_64_intdigest, views)
        else:
            wire.receive_into(head)
            found = list(_receive_pieces(wire, views))
        pairs = zip(found, unpack_sums(head, len(views)), strict=True)
        self.bad = [i for i, (have, want) in enumerate(pairs) if have != want]


def _receive_pieces(wire: Wire, views: Sequence[memoryview]) -> Iterator[int]:
    """Fill views with about a piece per system call; yield the checksum of each view."""
    group: list[memoryview] = []
    size = 0
    for view in views:
        if len(view) > PIECE_BYTES:
            yield from _receive_group(wire, group)
            group, size = [], 0
            yield receive_hashed(wire, view)
            continue
        group.append(view)
        size += len(view)
        if size >= PIECE_BYTES:
            yield from _receive_group(wire, group)
            group, size = [], 0
    yield from _receive_group(wire, group)


def _receive_group(wire: Wire, views: Sequence[memoryview]) -> Iterable[int]:
    if views:
        wire.receive_all(views)
    return map(xxhash.xxh3_64_intdigest, views)
