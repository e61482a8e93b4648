"""A DMP node whose bytes use TCP too (tier L3).

Implements tierkv.dmp.pool_node.PoolNode. Bytes move straight between the caller's buffers and the
socket; each range is verified against the received checksum. Shared memory and RDMA fall back to
this path.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from tierkv.dmp.pool_node import PathInfo, RangeRead, RangeWrite
from tierkv.dmp.transport.ask import Ask, PutAsk, ReadAsk
from tierkv.dmp.transport.connection import Peer
from tierkv.dmp.transport.control import NodeControl
from tierkv.dmp.transport.pending import as_bytes
from tierkv.dmp.wire.frame import FrameType
from tierkv.dmp.wire.messages import RangeRef
from tierkv.dmp.wire.range_codec import Ref, pack_ranges
from tierkv.dmp.zone_traffic import may_transfer, received, sent
from tierkv.kvcore import limits
from tierkv.kvcore.block import BlockSpec, Location
from tierkv.kvcore.clock import Clock
from tierkv.kvcore.errors import BlockNotFoundError, ChecksumError
from tierkv.kvcore.ids import HostId

_FRAME_BYTES: Final = 4 << 20
"""Payload per frame (a single block or range may be longer). Several frames are in flight, so the
node sends one frame while this side verifies another."""

_FRAME_RANGES: Final = 256


class TcpPoolNode(NodeControl):
    """PoolNode over TCP."""

    def __init__(
        self, peer: Peer, *, host: HostId, clock: Clock | None = None, reason: str = "asked for"
    ) -> None:
        super().__init__(peer, host=host, clock=clock)
        self._path = PathInfo("tcp", reason)

    @property
    def path(self) -> PathInfo:
        return self._path

    def write_ranges(self, writes: Sequence[RangeWrite]) -> None:
        datas = [as_bytes(write.data) for write in writes]
        self.pending.check(writes)
        parts = list(_by_bytes([len(data) for data in datas]))

        def asks() -> Iterator[Ask]:
            for part in parts:
                refs = [
                    _ref(w.grant.location, w.index, w.grant.block.ranges.size_bytes)
                    for w in writes[part]
                ]
                yield Ask(FrameType.WRITE, pack_ranges(refs), datas[part])

        self._pool.run(lambda connection: connection.exchange(asks()))
        self.pending.written(writes)
        sent(self.other_zone, sum(map(len, datas)))

    def put(
        self, puts: Sequence[BlockSpec], payloads: Sequence[memoryview]
    ) -> list[Location | None]:
        datas = [as_bytes(payload) for payload in payloads]
        for put, data in zip(puts, datas, strict=True):
            if len(data) != put.ranges.payload_bytes:
                raise BlockNotFoundError(f"{len(data)} bytes are not the block's")
        if not may_transfer(self.other_zone):
            return [None] * len(puts)
        parts = list(_by_bytes([len(data) for data in datas]))
        asked: list[Ask] = []

        def asks() -> Iterator[Ask]:
            asked.clear()
            for part in parts:
                asked.append(PutAsk(puts[part], datas[part]))
                yield asked[-1]

        self._pool.run(lambda connection: connection.exchange(asks()))
        answer: list[Location | None] = []
        for part, ask in zip(parts, asked, strict=True):
            answer += self._places(ask.reply, part.stop - part.start)
        sent(self.other_zone, sum(map(len, datas)))
        return answer

    def read_ranges(self, reads: Sequence[RangeRead]) -> None:
        if len(reads) == 1:
            self._read_one(reads[0])
            return
        node_id = self._peer.node_id
        views = []
        refs = []
        for read in reads:
            location = read.location
            if location.node != node_id:
                self.mine(location)
            view = as_bytes(read.destination)
            views.append(view)
            refs.append(_ref(location, read.index, len(view)))
        parts = list(_by_bytes([ref[5] for ref in refs]))
        ahead = reads[0].ahead
        asks = [ReadAsk(refs[part], views[part], ahead=ahead) for part in parts]
        self._pool.run(lambda connection: connection.exchange(asks))
        received(self.other_zone, sum(map(len, views)))
        bad = [part.start + i for part, ask in zip(parts, asks, strict=True) for i in ask.bad]
        if bad:
            self.suspect([RangeRef(reads[i].location, reads[i].index) for i in bad])
            raise ChecksumError(f"{len(bad)} ranges from {self.node_id} have wrong checksums")

    def _read_one(self, read: RangeRead) -> None:
        """Read one range with the fewest calls."""
        location = self.mine(read.location)
        view = as_bytes(read.destination)
        ref = _ref(location, read.index, len(view))
        if not self._pool.run(lambda connection: connection.read_one(ref, view, ahead=read.ahead)):
            self.suspect([RangeRef(location, read.index)])
            raise ChecksumError(f"a range from {self.node_id} has a wrong checksum")
        received(self.other_zone, len(view))


def _ref(location: Location, index: int, size: int) -> Ref:
    if not 0 <= index < limits.MAX_LAYERS:
        raise BlockNotFoundError(f"range {index} is outside [0, {limits.MAX_LAYERS})")
    return (
        location.incarnation,
        location.segment,
        location.slot,
        location.generation,
        index,
        size,
    )


def _by_bytes(sizes: Sequence[int]) -> Iterator[slice]:
    """Split a long list into frames of at most _FRAME_BYTES and _FRAME_RANGES."""
    start, total = 0, 0
    for i, size in enumerate(sizes):
        total += size
        if i > start and (total > _FRAME_BYTES or i - start >= _FRAME_RANGES):
            yield slice(start, i)
            start, total = i, size
    if start < len(sizes):
        yield slice(start, len(sizes))
