"""The frames that carry KV bytes, server side: READ, WRITE and PUT.

Called by dmp/server/client_connection.py. Bytes move straight between the socket and pinned slots.
The payload of a refused frame is skipped, so the connection stays usable. For a slow reader the
node keeps only pins in memory, and the number of pinned bytes is bounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from tierkv.dmp.node.node import DmpNode
from tierkv.dmp.server.clients import ByteBudget
from tierkv.dmp.wire import messages as m
from tierkv.dmp.wire.frame import FrameHeader, FrameType, pack_header
from tierkv.dmp.wire.frame_reader import FrameReader
from tierkv.dmp.wire.range_codec import Ref, pack_sums, unpack_ranges, unpack_sums
from tierkv.dmp.wire.socket_io import Wire
from tierkv.kvcore import limits
from tierkv.kvcore.block import BlockSpec
from tierkv.kvcore.errors import RemoteProtocolError, TransportError

PUT_DEADLINE_S: Final = 60.0
"""Longest reservation of a PUT; the frame itself has a shorter deadline."""


class ByteFrames:
    """Handlers of one connection."""

    def __init__(self, wire: Wire, reader: FrameReader, node: DmpNode, budget: ByteBudget) -> None:
        self._wire = wire
        self._reader = reader
        self._node = node
        self._budget = budget

    def read(self, header: FrameHeader, refs: Sequence[Ref]) -> None:
        """Send ranges straight from their slots."""
        total = sum([ref[5] for ref in refs])
        if total > limits.MAX_FRAME_BYTES:
            raise RemoteProtocolError("more is asked for than fits a frame")
        if not self._budget.take(total, timeout_s=self._wire.timeout_s):
            raise TransportError("too many bytes are being read at once")
        try:
            ticket = self._node.gets.begin_read(refs)
            try:
                lead = pack_header(
                    FrameType.REPLY,
                    header.request_id,
                    head_bytes=8 * len(refs),
                    payload_bytes=total,
                )
                self._wire.send([lead + pack_sums(ticket.checksums), *ticket.views])
            finally:
                self._node.gets.end_read(ticket)
        finally:
            self._budget.give_back(total)

    def write(self, header: FrameHeader, head: bytearray) -> bytes:
        """Receive ranges straight into their slots."""
        refs = unpack_ranges(head)
        if sum([ref[5] for ref in refs]) != header.payload_bytes:
            raise RemoteProtocolError("a WRITE frame's payload is as long as its ranges")
        ticket = self._node.puts.begin_write(refs)
        try:
            self._reader.take(ticket.views)
        finally:
            self._node.puts.end_write(ticket)
        return b""

    def put(self, header: FrameHeader, head: bytearray, owner: str) -> bytes:
        """Reserve, receive and seal whole blocks; the reply has None for blocks without a slot."""
        ask = m.Put.unpack(head)
        if ask.data_bytes + ask.sums_bytes != header.payload_bytes:
            raise RemoteProtocolError("a PUT frame's payload is as long as its blocks")
        ticket = self._node.puts.begin_put(ask.puts, deadline_s=PUT_DEADLINE_S, owner=owner)
        try:
            sums = bytearray(ask.sums_bytes)
            self._receive_blocks(ask.puts, ticket.views, memoryview(sums))
        except BaseException:
            self._node.puts.abort_put(ticket)
            raise
        places = self._node.puts.end_put(ticket, _checksums(ask.puts, sums))
        return m.MaybeRefs(places).pack()

    def _receive_blocks(
        self, puts: Sequence[BlockSpec], views: Sequence[memoryview | None], sums: memoryview
    ) -> None:
        """Receive each run of blocks that have a slot with one call; skip the other blocks."""
        run: list[memoryview] = []
        for put, view in zip(puts, views, strict=True):
            if view is not None:
                run.append(view)
                continue
            self._reader.take(run)
            run = []
            self._reader.skip(put.ranges.payload_bytes)
        run.append(sums)
        self._reader.take(run)


def _checksums(puts: Sequence[BlockSpec], sums: bytearray) -> list[tuple[int, ...]]:
    """Split the checksums of all ranges by block."""
    found = tuple(unpack_sums(sums, len(sums) // 8))
    answer, start = [], 0
    for put in puts:
        answer.append(found[start : start + put.ranges.count])
        start += put.ranges.count
    return answer
