"""A DMP node reached over TCP (tier L3, and the control side of shared memory).

Implements dmp.pool_node.PoolNode. Bytes go straight between the caller's buffers and the socket;
each range is verified against the checksum that came with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final, TypeVar

import xxhash

from dmp import messages as m
from dmp.frame import FrameType
from dmp.messages import RangeRef
from dmp.pool_node import (
    PathInfo,
    PoolNode,
    PoolNodeStats,
    PutGrant,
    PutRequest,
    RangeRead,
    RangeWrite,
)
from dmp.stored import StoredBlock, unpack_stored
from dmp.transport.connection import Connection, ConnectionPool, Peer
from dmp.transport.pending import PendingPuts
from kvcore import limits
from kvcore.clock import Clock, SystemClock
from kvcore.errors import BlockNotFoundError, ChecksumError, RemoteProtocolError, TransportError
from kvcore.ids import BlockKey, HostId, NodeId
from kvcore.location import Location

T = TypeVar("T")
_ITEMS: Final = limits.MAX_FRAME_ITEMS
_SEAL_ITEMS: Final = 1_024
"""A seal carries up to 2 KiB of checksums per block; this many stay under MAX_HEAD_BYTES."""

_READ_BYTES: Final = 64 << 20
"""Bytes per READ frame; keeps one operation well inside its timeout on a 1 Gbit/s link."""


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
    def node_id(self) -> NodeId:
        return self._peer.node_id

    @property
    def host(self) -> HostId:
        return self._host

    def lookup(self, keys: Sequence[BlockKey]) -> list[Location | None]:
        answer: list[Location | None] = []
        for part in _parts(keys, _ITEMS):
            answer += self._maybe_refs(FrameType.LOOKUP, m.Lookup(part).pack(), len(part))
        return answer

    @property
    def path(self) -> PathInfo:
        return self._path

    def promote(self, keys: Sequence[BlockKey]) -> list[Location | None]:
        return self.lookup(keys)

    def reserve(
        self, puts: Sequence[PutRequest], *, deadline_s: float = 30.0
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
        for write in writes:
            self._write(write.grant, write.index, write.data.cast("B"))

    def _write(self, grant: PutGrant, index: int, data: memoryview) -> None:
        self.pending.check(grant, index, data)
        head = m.Ranges([RangeRef(grant.location, index)]).pack()
        self._pool.run(lambda c: c.call(FrameType.WRITE, head, data))
        self.pending.written(grant, index, data)

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
        for part in _read_parts(reads):
            self._read_part(part)

    def _read_part(self, reads: Sequence[RangeRead]) -> None:
        views = [read.destination.cast("B") for read in reads]
        refs = [RangeRef(self.mine(read.location), read.index) for read in reads]

        def into(head: bytearray) -> Sequence[memoryview]:
            sizes = [item.size for item in m.ReadReply.unpack(head).sums]
            if sizes != [len(view) for view in views]:
                raise TransportError("the ranges are not as long as the destinations")
            return views

        def read(connection: Connection) -> bytearray:
            return connection.call(FrameType.READ, m.Ranges(refs).pack(), into=into)

        sums = m.ReadReply.unpack(self._pool.run(read)).sums
        pairs = zip(refs, views, sums, strict=True)
        bad = [ref for ref, v, s in pairs if xxhash.xxh3_64_intdigest(v) != s.checksum]
        if bad:
            self.suspect(bad)
            raise ChecksumError(f"{len(bad)} ranges from {self.node_id} have wrong checksums")

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

    def describe(self, keys: Sequence[BlockKey]) -> list[StoredBlock | None]:
        """Look blocks up whose layout is not known here."""
        answer: list[StoredBlock | None] = []
        for part in _parts(keys, _ITEMS):
            reply = self._ask(FrameType.DESCRIBE, m.Lookup(part).pack())
            answer += _trust(partial(unpack_stored, node=self.node_id), reply)
        if len(answer) != len(keys):
            raise TransportError(f"{self.node_id} answered {len(answer)} of {len(keys)} items")
        return answer

    def suspect(self, refs: Sequence[RangeRef]) -> None:
        """Ask the node to check ranges that look bad here, and to quarantine them if they are."""
        self._ask(FrameType.SUSPECT, m.Ranges(refs).pack())

    def stats(self) -> PoolNodeStats:
        reply = self._ask(FrameType.STATS, b"")
        return _trust(m.unpack_stats, reply)

    def close(self) -> None:
        self._pool.close()

    def mine(self, location: Location) -> Location:
        """Check that a reference is to this node."""
        if location.node != self.node_id:
            raise BlockNotFoundError(f"a reference to {location.node} was given to {self.node_id}")
        return location

    def _ask(self, kind: FrameType, head: bytes) -> bytearray:
        return self._pool.run(lambda connection: connection.call(kind, head))

    def _maybe_refs(self, kind: FrameType, head: bytes, count: int) -> Sequence[Location | None]:
        reply = self._ask(kind, head)
        places = _trust(partial(m.MaybeRefs.unpack, node=self.node_id), reply).locations
        if len(places) != count:
            raise TransportError(f"{self.node_id} answered {len(places)} of {count} items")
        return places


def as_grant(put: PutRequest, location: Location | None) -> PutGrant | None:
    """Turn a node's answer into a grant."""
    if location is None:
        return None
    return PutGrant(put.key, location, put.range_bytes, put.range_count)


def _trust(unpack: Callable[[bytearray], T], head: bytearray) -> T:
    """Unpack a reply; a peer that answers nonsense is a failed transfer."""
    try:
        return unpack(head)
    except RemoteProtocolError as error:
        raise TransportError(f"nonsense from the node: {error}") from error


def _parts(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


def _read_parts(reads: Sequence[RangeRead]) -> Iterator[Sequence[RangeRead]]:
    """Cut a long list of reads into frames of at most _READ_BYTES and _ITEMS."""
    start, size = 0, 0
    for i, read in enumerate(reads):
        size += read.destination.nbytes
        if i > start and (size > _READ_BYTES or i - start >= _ITEMS):
            yield reads[start:i]
            start, size = i, read.destination.nbytes
    if start < len(reads):
        yield reads[start:]
