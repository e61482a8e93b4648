"""A DMP node reached over TCP (tier L3, and the control side of shared memory and RDMA).

Implements tierkv.dmp.pool_node.PoolNode. Bytes move straight between the caller's buffers and the
socket; each range is verified against the received checksum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final, TypeVar

from tierkv.dmp.pool_node import PathInfo, PoolNode, PoolNodeStats, PutGrant, RangeRead, RangeWrite
from tierkv.dmp.transport.ask import Ask, PutAsk, ReadAsk
from tierkv.dmp.transport.connection import Peer
from tierkv.dmp.transport.connection_pool import ConnectionPool
from tierkv.dmp.transport.pending import PendingPuts, as_bytes
from tierkv.dmp.wire import messages as m
from tierkv.dmp.wire.frame import FrameType
from tierkv.dmp.wire.messages import RangeRef
from tierkv.dmp.wire.range_codec import DescribedBlock, Ref, pack_ranges, unpack_stored
from tierkv.kvcore import limits
from tierkv.kvcore.block import BlockSpec
from tierkv.kvcore.clock import Clock, SystemClock
from tierkv.kvcore.errors import (
    BlockNotFoundError,
    ChecksumError,
    RemoteProtocolError,
    TransportError,
)
from tierkv.kvcore.ids import BlockKey, HostId, NodeId
from tierkv.kvcore.location import Location

T = TypeVar("T")
_ITEMS: Final = limits.MAX_FRAME_ITEMS
_SEAL_ITEMS: Final = 1_024
"""A seal carries up to 2 KiB of checksums per block; this number of blocks stays under
MAX_HEAD_BYTES."""

_PROMOTE_ITEMS: Final = 256
"""Blocks promoted by one frame; the node may read all of them from disk, one after another."""

_FRAME_BYTES: Final = 4 << 20
"""Payload per frame (a single block or range may be longer). Several frames are in flight, so the
node sends one frame while this side verifies another."""

_FRAME_RANGES: Final = 256


class TcpPoolNode(PoolNode):
    """PoolNode over TCP."""

    def __init__(
        self, peer: Peer, *, host: HostId, clock: Clock | None = None, reason: str = "asked for"
    ) -> None:
        self._peer = peer
        self._host = host
        self._clock = clock or SystemClock()
        self._pool = ConnectionPool(peer)
        self._path = PathInfo("tcp", reason)
        self.pending = PendingPuts(self._clock)

    @property
    def peer(self) -> Peer:
        """The peer, with the client id; further connections of the same client use this value."""
        return self._pool.peer

    @property
    def node_id(self) -> NodeId:
        return self._peer.node_id

    @property
    def host(self) -> HostId:
        return self._host

    def lookup(self, keys: Sequence[BlockKey]) -> list[Location | None]:
        answer: list[Location | None] = []
        for part in _parts(keys, _ITEMS):
            answer += self._maybe_refs(FrameType.LOOKUP, m.BlockLookup(part).pack(), len(part))
        return answer

    @property
    def path(self) -> PathInfo:
        return self._path

    def promote(self, keys: Sequence[BlockKey]) -> list[Location | None]:
        answer: list[Location | None] = []
        timeout_s = self._peer.promote_timeout_s
        for part in _parts(keys, _PROMOTE_ITEMS):
            head = m.BlockLookup(part).pack()
            answer += self._maybe_refs(FrameType.PROMOTE, head, len(part), timeout_s=timeout_s)
        return answer

    def reserve(
        self, puts: Sequence[BlockSpec], *, deadline_s: float = 30.0
    ) -> list[PutGrant | None]:
        # Counted from before the request: the writer's deadline is never later than the node's.
        deadline = self._clock.now() + deadline_s
        grants: list[PutGrant | None] = []
        for part in _parts(puts, _ITEMS):
            head = m.Reserve(deadline_s, part).pack()
            places = self._maybe_refs(FrameType.RESERVE, head, len(part))
            grants += [as_grant(p, place) for p, place in zip(part, places, strict=True)]
        self.pending.opened(grants, deadline=deadline)
        return grants

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

    def put(
        self, puts: Sequence[BlockSpec], payloads: Sequence[memoryview]
    ) -> list[Location | None]:
        datas = [as_bytes(payload) for payload in payloads]
        for put, data in zip(puts, datas, strict=True):
            if len(data) != put.ranges.payload_bytes:
                raise BlockNotFoundError(f"{len(data)} bytes are not the block's")
        parts = list(_by_bytes([len(data) for data in datas]))
        sent: list[Ask] = []

        def asks() -> Iterator[Ask]:
            sent.clear()
            for part in parts:
                sent.append(PutAsk(puts[part], datas[part]))
                yield sent[-1]

        self._pool.run(lambda connection: connection.exchange(asks()))
        answer: list[Location | None] = []
        for part, ask in zip(parts, sent, strict=True):
            answer += self._places(ask.reply, part.stop - part.start)
        return answer

    def seal(self, grants: Sequence[PutGrant]) -> list[Location | None]:
        items = self.pending.closed(grants)
        ready = [item for item in items if item is not None]
        sealed: list[Location | None] = []
        for part in _parts(ready, _SEAL_ITEMS):
            sealed += self._maybe_refs(FrameType.SEAL, m.Seal(part).pack(), len(part))
        self._abort([g.location for g, item in zip(grants, items, strict=True) if item is None])
        places = iter(sealed)
        return [next(places) if item is not None else None for item in items]

    def abort(self, grants: Sequence[PutGrant]) -> None:
        self.pending.closed(grants)
        self._abort([grant.location for grant in grants])

    def _abort(self, locations: Sequence[Location]) -> None:
        for part in _parts(locations, _ITEMS):
            self._ask(FrameType.ABORT, m.Refs(part).pack())

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
        asks = [ReadAsk(refs[part], views[part]) for part in parts]
        self._pool.run(lambda connection: connection.exchange(asks))
        bad = [part.start + i for part, ask in zip(parts, asks, strict=True) for i in ask.bad]
        if bad:
            self.suspect([RangeRef(reads[i].location, reads[i].index) for i in bad])
            raise ChecksumError(f"{len(bad)} ranges from {self.node_id} have wrong checksums")

    def _read_one(self, read: RangeRead) -> None:
        """Read one range with the fewest calls."""
        location = self.mine(read.location)
        view = as_bytes(read.destination)
        ref = _ref(location, read.index, len(view))
        if not self._pool.run(lambda connection: connection.read_one(ref, view)):
            self.suspect([RangeRef(location, read.index)])
            raise ChecksumError(f"a range from {self.node_id} has a wrong checksum")

    def hold(self, locations: Sequence[Location], *, ttl_s: float) -> list[bool]:
        answer: list[bool] = []
        for part in _parts(locations, _ITEMS):
            reply = self._ask(FrameType.HOLD, m.Refs(part, ttl_s).pack())
            answer += _trust(m.Flags.unpack, reply).values
        return answer

    def release(self, locations: Sequence[Location]) -> None:
        for part in _parts(locations, _ITEMS):
            self._ask(FrameType.RELEASE, m.Refs(part).pack())

    def touch(self, locations: Sequence[Location], *, read_bytes: int) -> None:
        """Report reads made through a mapping."""
        for part in _parts(locations, _ITEMS):
            self._ask(FrameType.TOUCH, m.Refs(part, float(read_bytes)).pack())
            read_bytes = 0

    def describe(self, keys: Sequence[BlockKey]) -> list[DescribedBlock | None]:
        """Look up blocks whose layout the caller does not know."""
        answer: list[DescribedBlock | None] = []
        for part in _parts(keys, _ITEMS):
            reply = self._ask(FrameType.DESCRIBE, m.BlockLookup(part).pack())
            answer += _trust(partial(unpack_stored, node=self.node_id), reply)
        if len(answer) != len(keys):
            raise TransportError(f"{self.node_id} answered {len(answer)} of {len(keys)} items")
        return answer

    def suspect(self, refs: Sequence[RangeRef]) -> None:
        """Ask the node to check ranges that look bad here, and to quarantine really bad slots."""
        self._ask(FrameType.SUSPECT, m.Ranges(refs).pack())

    def stats(self) -> PoolNodeStats:
        reply = self._ask(FrameType.STATS, b"")
        return _trust(m.unpack_stats, reply)

    def answered(self) -> None:
        """Use a silent node again: another connection has reached the node."""
        self._pool.silence.answered()

    def close(self) -> None:
        self._pool.close()

    def mine(self, location: Location) -> Location:
        """Check that a reference is to this node."""
        if location.node != self.node_id:
            raise BlockNotFoundError(f"a reference to {location.node} was given to {self.node_id}")
        return location

    def _ask(self, kind: FrameType, head: bytes, *, timeout_s: float = 0.0) -> bytearray:
        return self._pool.run(lambda connection: connection.call(kind, head, timeout_s=timeout_s))

    def _maybe_refs(
        self, kind: FrameType, head: bytes, count: int, *, timeout_s: float = 0.0
    ) -> Sequence[Location | None]:
        return self._places(self._ask(kind, head, timeout_s=timeout_s), count)

    def _places(self, reply: bytearray, count: int) -> Sequence[Location | None]:
        places = _trust(partial(m.MaybeRefs.unpack, node=self.node_id), reply).locations
        if len(places) != count:
            raise TransportError(f"{self.node_id} answered {len(places)} of {count} items")
        return places


class BesideTcp(PoolNode):
    """A PoolNode whose control messages use TCP, and whose bytes use another path."""

    def __init__(self, control: TcpPoolNode) -> None:
        self._control = control

    @property
    def node_id(self) -> NodeId:
        return self._control.node_id

    @property
    def host(self) -> HostId:
        return self._control.host

    def promote(self, keys: Sequence[BlockKey]) -> list[Location | None]:
        return self._control.promote(keys)

    def lookup(self, keys: Sequence[BlockKey]) -> list[Location | None]:
        return self._control.lookup(keys)

    def seal(self, grants: Sequence[PutGrant]) -> list[Location | None]:
        return self._control.seal(grants)

    def abort(self, grants: Sequence[PutGrant]) -> None:
        self._control.abort(grants)

    def hold(self, locations: Sequence[Location], *, ttl_s: float) -> list[bool]:
        return self._control.hold(locations, ttl_s=ttl_s)

    def release(self, locations: Sequence[Location]) -> None:
        self._control.release(locations)


def as_grant(put: BlockSpec, location: Location | None) -> PutGrant | None:
    """Turn a node's answer into a grant."""
    if location is None:
        return None
    return PutGrant(put, location)


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


def _trust(unpack: Callable[[bytearray], T], head: bytearray) -> T:
    """Unpack a reply; a malformed reply counts as a failed transfer."""
    try:
        return unpack(head)
    except RemoteProtocolError as error:
        raise TransportError(f"nonsense from the node: {error}") from error


def _parts(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


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
