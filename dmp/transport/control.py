"""The control side of a DMP node over TCP, whichever path the bytes take.

Base class of the transports: dmp/transport/tcp.py, dmp/transport/shm.py and
dmp/transport/verbs/node.py add the paths of the bytes. Control messages are lookups, reservations,
seals, holds and reports of reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final, TypeVar

from tierkv.dmp.pool_node import PoolNode, PoolNodeStats, PutGrant
from tierkv.dmp.transport.connection import Peer
from tierkv.dmp.transport.connection_pool import ConnectionPool
from tierkv.dmp.transport.pending import PendingPuts, as_grant
from tierkv.dmp.wire import messages as m
from tierkv.dmp.wire.frame import FrameType
from tierkv.dmp.wire.messages import RangeRef
from tierkv.dmp.wire.range_codec import DescribedBlock, unpack_stored
from tierkv.dmp.zone_traffic import OtherZone, may_transfer
from tierkv.kvcore import limits
from tierkv.kvcore.block import BlockSpec, Erased, Location
from tierkv.kvcore.clock import Clock, SystemClock
from tierkv.kvcore.errors import BlockNotFoundError, RemoteProtocolError, TransportError
from tierkv.kvcore.ids import BlockKey, HostId, NodeId

T = TypeVar("T")
_ITEMS: Final = limits.MAX_FRAME_ITEMS
_SEAL_ITEMS: Final = 1_024
"""A seal carries up to 2 KiB of checksums per block; this number of blocks stays under
MAX_HEAD_BYTES."""

_PROMOTE_ITEMS: Final = 256
"""Blocks promoted or erased by one frame: each may cost the node a disk access."""

_ERASE_TIMEOUT_S: Final = 120.0
"""Longest answer to one ERASE frame: the node waits for transfers, its disk and its archive."""


class NodeControl(PoolNode):
    """A PoolNode without a path for bytes.

    Attributes:
        pending: open grants of this client.
    """

    def __init__(self, peer: Peer, *, host: HostId, clock: Clock | None = None) -> None:
        self._peer = peer
        self._host = host
        self._clock = clock or SystemClock()
        self._pool = ConnectionPool(peer)
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

    @property
    def other_zone(self) -> OtherZone | None:
        return self._peer.other_zone

    def lookup(self, keys: Sequence[BlockKey]) -> list[Location | None]:
        answer: list[Location | None] = []
        for part in _parts(keys, _ITEMS):
            answer += self._maybe_refs(FrameType.LOOKUP, m.BlockLookup(part).pack(), len(part))
        return answer

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
        if not may_transfer(self.other_zone):
            return [None] * len(puts)
        # Counted from before the request: the writer's deadline is never later than the node's.
        deadline = self._clock.now() + deadline_s
        grants: list[PutGrant | None] = []
        for part in _parts(puts, _ITEMS):
            head = m.Reserve(deadline_s, part).pack()
            places = self._maybe_refs(FrameType.RESERVE, head, len(part))
            grants += [as_grant(p, place) for p, place in zip(part, places, strict=True)]
        self.pending.opened(grants, deadline=deadline)
        return grants

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

    def hold(self, locations: Sequence[Location], *, ttl_s: float) -> list[bool]:
        if not may_transfer(self.other_zone):
            return [False] * len(locations)
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

    def erase(self, keys: Sequence[BlockKey]) -> Erased:
        erased = Erased()
        for part in _parts(keys, _PROMOTE_ITEMS):
            head = m.BlockLookup(part).pack()
            reply = self._ask(FrameType.ERASE, head, timeout_s=_ERASE_TIMEOUT_S)
            erased += _trust(m.unpack_erased, reply)
        return erased

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


def _trust(unpack: Callable[[bytearray], T], head: bytearray) -> T:
    """Unpack a reply; a malformed reply counts as a failed transfer."""
    try:
        return unpack(head)
    except RemoteProtocolError as error:
        raise TransportError(f"nonsense from the node: {error}") from error


def _parts(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]
