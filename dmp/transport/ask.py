"""Requests on their way: what is sent, and where the reply goes.

Made by dmp/transport/tcp.py, carried by dmp/transport/connection.py. A read fills the caller's
buffers piece by piece and verifies each piece while it is still in the processor's cache and the
next one is under way.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import xxhash

from dmp.frame import FrameHeader, FrameType
from dmp.range_codec import Ref, pack_ranges, unpack_sums
from dmp.socket_io import Buffer, Wire
from dmp.transport.single_read import PIECE_BYTES, receive_hashed
from kvcore.errors import RemoteProtocolError


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
