"""The meta server inside this process: a MetaClient directly on the pure core.

Used by the composition root for single-process setups, and by the gRPC service, which only
translates. Calls may come from several threads' event loops; a lock protects the core and the
streams of hold orders. Streams are read in their own event loops. A slow reader loses its stream;
after reopening, the reader gets all orders active at the time.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final

from tierkv.kvcore.block_event import NO_LEASE, EventBatch, HoldOrder, LeaseId
from tierkv.kvcore.clock import Clock, SystemClock
from tierkv.kvcore.errors import DirectoryUnavailableError, LocalProtocolError, UserError
from tierkv.kvcore.ids import BLOCK_KEY_BYTES, BlockKey, HostId, Incarnation, NodeId
from tierkv.kvcore.node import NodeInfo, NodeReport
from tierkv.kvwire.event_records import EventRecords, pack_events
from tierkv.metaserver.client import (
    MAX_LISTED_REPLICAS,
    BlockListing,
    DirectoryNode,
    HeartbeatReply,
    LocateReply,
    Registration,
    ReportReply,
)
from tierkv.metaserver.config import MetaConfig
from tierkv.metaserver.directory.leases import Asked, cut_keys
from tierkv.metaserver.directory.locate_reply import chain_of, checked_question
from tierkv.metaserver.namespaces import LocalRecords
from tierkv.metaserver.state import MetaState

MAX_QUEUED_KEYS: Final = 1 << 18
"""Keys queued for one reader, 4 MiB at most; each order counts as one further key."""

MAX_LISTED_BLOCKS = 100_000
"""Upper bound on records of one ``list_blocks``: a view, not a dump; ``total`` is always exact."""


class _HoldStream:
    """The queued orders of one reader.

    Attributes:
        node_id: the node of the reader.
        incarnation: the node's incarnation.
        _orders: queued orders, oldest first.
        _size: number of keys in the queue, plus one per order.
        _wake: set when an order is queued or the stream is over.
        _over: no more orders will come.
    """

    def __init__(self, node_id: NodeId, incarnation: Incarnation, already: Iterable[Asked]) -> None:
        """Make a stream in the reader's event loop; orders in ``already`` count as size 0."""
        self.node_id = node_id
        self.incarnation = incarnation
        self._loop = asyncio.get_running_loop()
        self._wake = asyncio.Event()
        self._orders: deque[tuple[Asked, int]] = deque((asked, 0) for asked in already)
        self._size = 0
        self._over = False

    def put(self, asked: Asked) -> None:
        """Add an order, from any thread; a full queue ends the stream."""
        size = 1 + len(asked.keys) // BLOCK_KEY_BYTES
        if self._size + size > MAX_QUEUED_KEYS:
            self.end()
        elif not self._over:
            self._size += size
            self._orders.append((asked, size))
            self._notify()

    def end(self) -> None:
        """End the stream after the queued orders, from any thread."""
        self._over = True
        self._notify()

    async def take(self) -> Asked | None:
        """Wait for the next order; None at the end."""
        while not self._orders:
            if self._over:
                return None
            self._wake.clear()
            if not self._orders and not self._over:
                await self._wake.wait()
        asked, size = self._orders.popleft()
        self._size -= size
        return asked

    def _notify(self) -> None:
        # The reader's loop may be closing; the wake-up is then dropped.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._wake.set)


class HoldStreams:
    """The open streams by node."""

    def __init__(self) -> None:
        self._streams: dict[NodeId, set[_HoldStream]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._streams.values()))

    def open(
        self, node_id: NodeId, incarnation: Incarnation, already: Iterable[Asked]
    ) -> _HoldStream:
        """Open a stream, starting with all orders in ``already``, whatever the size."""
        stream = _HoldStream(node_id, incarnation, already)
        self._streams.setdefault(node_id, set()).add(stream)
        return stream

    def close(self, stream: _HoldStream) -> None:
        """Remove a stream whose reader is gone."""
        streams = self._streams.get(stream.node_id, set())
        streams.discard(stream)
        if not streams:
            self._streams.pop(stream.node_id, None)

    def send(self, orders: Iterable[Asked]) -> None:
        """Queue orders for their nodes; a node without a stream gets the orders later."""
        for asked in orders:
            for stream in self._streams.get(asked.node_id, ()):
                stream.put(asked)

    def end_unless(self, living: Callable[[NodeId], Incarnation | None]) -> None:
        """End the streams of ended incarnations."""
        for node_id, streams in self._streams.items():
            for stream in streams:
                if stream.incarnation != living(node_id):
                    stream.end()

    def end_all(self) -> None:
        """End every stream."""
        for streams in self._streams.values():
            for stream in streams:
                stream.end()


class LocalMeta(LocalRecords):
    """A complete meta server without a network; implements MetaClient.

    MetaState makes the decisions and stays separate, because simulations run it alone with virtual
    time. Each method here adds parts excluded from MetaState: the lock, the clock, the refusal
    after ``close``, the streams of hold orders, or the durable namespaces.

    Attributes:
        state: the pure core, touched only under ``_lock``.
        streams: hold orders on their way to nodes.
        namespaces: the durable state; its ``trouble`` is the damage found at the start.
    """

    def __init__(self, config: MetaConfig | None = None, *, clock: Clock | None = None) -> None:
        """Open the durable state; raise ConfigError when the database can't be used."""
        config = config or MetaConfig()
        super().__init__(config)
        self._clock = clock or SystemClock()
        # Leases of an earlier process must stay unknown: lease numbers begin at the time of this
        # start. A node hears of leases of several servers, which may start in the same moment.
        start = int(self._clock.wall() * 1_000) << 20
        self.state = MetaState(config, first_lease=start + secrets.randbits(20))
        self.streams = HoldStreams()

    async def register(self, info: NodeInfo, *, home: str = "") -> Registration:
        with self._open():
            registration = self.state.register(info, self._clock.now(), home=home)
            self._end_stale_streams()
            return registration

    async def heartbeat(
        self, node_id: NodeId, incarnation: Incarnation, report: NodeReport
    ) -> HeartbeatReply:
        with self._open():
            reply = self.state.heartbeat(node_id, incarnation, report, self._clock.now())
            return replace(reply, namespaces_version=self.namespaces.version)

    async def deregister(self, node_id: NodeId, incarnation: Incarnation) -> None:
        with self._open():
            self.state.deregister(node_id, incarnation)
            self._end_stale_streams()

    async def report_events(self, batch: EventBatch | EventRecords) -> ReportReply:
        records = batch if isinstance(batch, EventRecords) else pack_events(batch)
        with self._open():
            return self.state.report(records, self._clock.now())

    async def locate(
        self,
        keys: Sequence[BlockKey],
        *,
        reader: HostId | None = None,
        max_replicas: int = MAX_LISTED_REPLICAS,
        reserve_s: float = 0.0,
    ) -> LocateReply:
        return self.locate_chain(
            chain_of(keys), reader=reader, max_replicas=max_replicas, reserve_s=reserve_s
        )

    def locate_chain(
        self, chain: bytes, *, reader: HostId | None, max_replicas: int, reserve_s: float
    ) -> LocateReply:
        """Find a chain of concatenated keys; see ``locate``."""
        if max_replicas < 0:
            raise LocalProtocolError(f"max_replicas can't be negative, got {max_replicas}")
        with self._open():
            located = self.state.locate(
                chain,
                self._clock.now(),
                reader=reader,
                max_replicas=max_replicas,
                reserve_s=reserve_s,
            )
            self.streams.send(located.orders)
            return located.reply

    async def locate_many(
        self, chains: Sequence[Sequence[BlockKey]], *, reserve_s: float = 0.0
    ) -> list[LocateReply]:
        return self.locate_chains(checked_question(map(chain_of, chains)), reserve_s=reserve_s)

    def locate_chains(self, chains: Sequence[bytes], *, reserve_s: float) -> list[LocateReply]:
        """Count the blocks found of several chains of concatenated keys; see ``locate_many``."""
        with self._open():
            found = self.state.locate_many(chains, self._clock.now(), reserve_s=reserve_s)
            for located in found:
                self.streams.send(located.orders)
            return [located.reply for located in found]

    async def extend_lease(self, lease: LeaseId, *, ttl_s: float) -> bool:
        with self._open():
            change = self.state.extend_lease(lease, ttl_s, self._clock.now())
            self.streams.send(change.orders)
            return change.lease != NO_LEASE

    async def end_lease(self, lease: LeaseId, *, used: bool) -> bool:
        with self._open():
            change = self.state.end_lease(lease, self._clock.now(), used=used)
            self.streams.send(change.orders)
            return change.lease != NO_LEASE

    async def holds(
        self, node_id: NodeId, incarnation: Incarnation
    ) -> AsyncGenerator[HoldOrder, None]:
        with self._open():
            orders = self.state.orders_of(node_id, incarnation, self._clock.now())
            if orders is None:
                return
            stream = self.streams.open(node_id, incarnation, orders)
        try:
            while (asked := await stream.take()) is not None:
                yield asked.order()
        finally:
            with self._lock:
                self.streams.close(stream)
        if self._closed:
            raise DirectoryUnavailableError("the meta server in this process is closed")

    async def list_nodes(self) -> tuple[DirectoryNode, ...]:
        with self._open():
            return self.state.list_nodes(self._clock.now())

    async def list_blocks(self, limit: int) -> BlockListing:
        if limit < 0:
            raise UserError(f"the limit of a block listing can't be negative, got {limit}")
        with self._open():
            return self.state.list_blocks(min(limit, MAX_LISTED_BLOCKS), self._clock.now())

    async def blocks_after(self, keys: Sequence[BlockKey]) -> dict[BlockKey, BlockKey]:
        with self._open():
            found, parents = self.state.directory.blocks_after(b"".join(keys))
        return dict(zip(cut_keys(found), cut_keys(parents), strict=True))

    async def directory_counts(self) -> tuple[tuple[str, int], ...]:
        with self._open():
            counts = self.state.counts(self._clock.now())
            if not self.namespaces.trouble:
                return counts
            return tuple(sorted((*counts, ("database_damaged", 1))))

    async def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                self.streams.end_all()
                self.namespaces.close()

    def _end_stale_streams(self) -> None:
        self.streams.end_unless(self.state.directory.incarnation_of)

    def end_holds(self) -> None:
        """End all streams of orders; an open stream would keep a server from stopping."""
        with self._lock:
            self.streams.end_all()
