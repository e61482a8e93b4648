"""Delivery of hold orders to nodes: one bounded queue per open stream.

Owned by metaserver/local.py, whose lock guards ``send`` and ``open``; streams are read in their own
event loops. A slow reader loses its stream. After reopening, the reader gets all orders active at
the time.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Final

from tierkv.kvcore.ids import BLOCK_KEY_BYTES, Incarnation, NodeId
from tierkv.metaserver.directory.leases import Asked

MAX_QUEUED_KEYS: Final = 1 << 18
"""Keys queued for one reader, 4 MiB at most; each order counts as one further key."""


class HoldStream:
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
        self._streams: dict[NodeId, set[HoldStream]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._streams.values()))

    def open(
        self, node_id: NodeId, incarnation: Incarnation, already: Iterable[Asked]
    ) -> HoldStream:
        """Open a stream, starting with all orders in ``already``, whatever the size."""
        stream = HoldStream(node_id, incarnation, already)
        self._streams.setdefault(node_id, set()).add(stream)
        return stream

    def close(self, stream: HoldStream) -> None:
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
