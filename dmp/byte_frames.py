"""The frames that carry KV bytes, server side: READ, WRITE and PUT.

Called by dmp/session.py. Bytes go straight between the socket and pinned slots. What the node
refuses is swallowed from the stream, so that the connection lives on; nothing is kept in memory
for a slow reader but its own pins, and those are bounded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Final

from dmp import messages as m
from dmp.clients import ByteBudget
from dmp.frame import FrameHeader, FrameType, pack_header
from dmp.frame_reader import FrameReader
from dmp.node import DmpNode
from dmp.pool_node import PutRequest
from dmp.range_codec import Ref, pack_sums, unpack_ranges
from dmp.socket_io import Wire
from kvcore import limits
from kvcore.errors import BlockNotFoundError, RemoteProtocolError, TransportError
from kvcore.ids import Incarnation
from kvcore.location import Location

PUT_DEADLINE_S: Final = 60.0
"""Longest reservation of a PUT; its frame has a shorter deadline of its own."""


class ByteFrames:
    """Handlers of one connection."""

    def __init__(self, wire: Wire, reader: FrameReader, node: DmpNode, budget: ByteBudget) -> None:
        self._wire = wire
        self._reader = reader
        self._node = node
        self._budget = budget

    def read(self, header: FrameHeader, head: bytearray) -> None:
        """Send ranges straight from their slots."""
        refs = unpack_ranges(head)
        total = sum([ref[5] for ref in refs])
        if total > limits.MAX_FRAME_BYTES:
            raise RemoteProtocolError("more is asked for than fits a frame")
        if not self._budget.take(total, timeout_s=self._wire.timeout_s):
            raise TransportError("too many bytes are being read at once")
        try:
            ticket = _begin_read(self._node, refs)
            try:
                lead = pack_header(
                    FrameType.REPLY,
                    header.request_id,
                    head_bytes=8 * len(refs),
                    payload_bytes=total,
                )
                self._wire.send([lead + pack_sums(ticket.checksums), *ticket.views])
            finally:
                ticket.close()
        finally:
            self._budget.give_back(total)

    def write(self, header: FrameHeader, head: bytearray) -> bytes:
        """Receive ranges straight into their slots."""
        refs = unpack_ranges(head)
        if sum([ref[5] for ref in refs]) != header.payload_bytes:
            raise RemoteProtocolError("a WRITE frame's payload is as long as its ranges")
        ticket = _begin_write(self._node, refs)
        try:
            self._reader.take(ticket.views)
        finally:
            ticket.close()
        return b""

    def put(self, header: FrameHeader, head: bytearray, owner: str) -> bytes:
        """Reserve, receive and seal whole blocks; None for those that found no slot."""
        ask = m.Put.unpack(head)
        if ask.payload_bytes != header.payload_bytes:
            raise RemoteProtocolError("a PUT frame's payload is as long as its blocks")
        puts = [block.put for block in ask.blocks]
        places = self._node.reserve(puts, deadline_s=PUT_DEADLINE_S, owner=owner)
        try:
            for put, place in zip(puts, places, strict=True):
                self._receive_block(put, place)
            sealed = iter(self._node.seal(_sealings(ask.blocks, places)))
        except BaseException:
            self._node.abort([place for place in places if place is not None])
            raise
        return m.MaybeRefs([None if p is None else next(sealed) for p in places]).pack()

    def _receive_block(self, put: PutRequest, place: Location | None) -> None:
        if place is None:
            self._reader.skip(put.range_bytes * put.range_count)
            return
        slot = (place.incarnation, place.segment, place.slot, place.generation)
        ticket = _begin_write(
            self._node, [(*slot, index, put.range_bytes) for index in range(put.range_count)]
        )
        try:
            self._reader.take(ticket.views)
        finally:
            ticket.close()


def _sealings(blocks: Sequence[m.NewBlock], places: Sequence[Location | None]) -> list[m.Sealing]:
    pairs = zip(blocks, places, strict=True)
    return [m.Sealing(place, block.checksums) for block, place in pairs if place is not None]


class _Ticket:
    """Ranges opened one by one."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self.close = self._stack.close
        self.views: list[memoryview] = []
        self.checksums: list[int] = []


def _begin_read(node: DmpNode, refs: Sequence[Ref]) -> _Ticket:
    ticket = _Ticket()
    items = ticket._stack.enter_context(node.open_read([_range_ref(node, ref) for ref in refs]))
    for item, ref in zip(items, refs, strict=True):
        if len(item.view) != ref[5]:
            ticket.close()
            raise BlockNotFoundError(f"the range has {len(item.view)} bytes, not {ref[5]}")
    ticket.views = [item.view for item in items]
    ticket.checksums = [item.checksum for item in items]
    return ticket


def _begin_write(node: DmpNode, refs: Sequence[Ref]) -> _Ticket:
    ticket = _Ticket()
    try:
        for ref in refs:
            r = _range_ref(node, ref)
            view = ticket._stack.enter_context(node.open_write(r.location, r.index))
            if len(view) != ref[5]:
                raise BlockNotFoundError(f"the range has {len(view)} bytes, not {ref[5]}")
            ticket.views.append(view)
    except BaseException:
        ticket.close()
        raise
    return ticket


def _range_ref(node: DmpNode, ref: Ref) -> m.RangeRef:
    incarnation, segment, slot, generation, index, _ = ref
    place = Location(node.node_id, Incarnation(incarnation), segment, slot, generation, 0)
    return m.RangeRef(place, index)
