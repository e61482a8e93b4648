"""Requests on their way: what is sent, and where the reply goes.

Made by dmp/transport/tcp.py, carried by dmp/transport/connection.py. A read fills the caller's
buffers piece by piece and verifies each piece while it is still in the processor's cache and the
next one is under way.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import xxhash

from tierkv.dmp.pool_node import PutRequest
from tierkv.dmp.transport.single_read import PIECE_BYTES, receive_hashed
from tierkv.dmp.wire.frame import FrameHeader, FrameType, pack_header
from tierkv.dmp.wire.messages import Put
from tierkv.dmp.wire.range_codec import pack_ranges, pack_sums, unpack_sums
from tierkv.dmp.wire.range_ref import Ref
from tierkv.dmp.wire.socket_io import Buffer, Wire
from tierkv.kvcore.errors import RemoteProtocolError


class Ask:
    """A request whose reply has no payload.

    Attributes:
        kind: frame type.
        head: packed message.
        payload: what follows it.
        reply: head of the reply, once taken.
    """

    __slots__ = ("head", "kind", "payload", "reply")

    def __init__(self, kind: FrameType, head: bytes, payload: Sequence[Buffer] = ()) -> None:
        self.kind = kind
        self.head = head
        self.payload = payload
        self.reply = bytearray()

    def send(self, wire: Wire, request_id: int) -> None:
        """Send it all.

        Raises:
            OSError: the peer does not take it.
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
        """Receive what follows the reply's header.

        Raises:
            RemoteProtocolError: it is not what was asked for.
            OSError, EOFError: it did not come.
        """
        if header.payload_bytes:
            raise RemoteProtocolError(f"{header.payload_bytes} payload bytes nobody asked for")
        if header.head_bytes:
            self.reply = bytearray(header.head_bytes)
            wire.receive_into(memoryview(self.reply))


class PutAsk(Ask):
    """A request to store whole blocks, hashed piece by piece as they are sent."""

    __slots__ = ("_payloads", "_puts")

    def __init__(self, puts: Sequence[PutRequest], payloads: Sequence[memoryview]) -> None:
        super().__init__(FrameType.PUT, Put(puts).pack(), payloads)
        self._puts = puts
        self._payloads = payloads

    def send(self, wire: Wire, request_id: int) -> None:
        ranges = [
            payload[start : start + put.range_bytes]
            for put, payload in zip(self._puts, self._payloads, strict=True)
            for start in range(0, len(payload), put.range_bytes)
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
    """Send what is ready and a long range; answers its checksum."""
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
        bad: positions of ranges whose bytes do not have the checksum that came with them.
    """

    __slots__ = ("_size", "_views", "bad")

    def __init__(self, refs: Sequence[Ref], views: Sequence[memoryview]) -> None:
        super().__init__(FrameType.READ, pack_ranges(refs))
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
    """Fill views with about a piece per system call; yields the checksum of each view."""
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
