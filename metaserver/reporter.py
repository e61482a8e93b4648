"""A node's outbox of block events: numbered batches, and full inventories after a loss of events.

Nodes call ``report`` from any thread; metaserver/agent.py takes batches out and sends them. Nothing
here does I/O. While the meta server is away the outbox stays bounded: beyond its limit the queued
events are dropped, and an inventory will be sent instead.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from tierkv.kvcore.block_event import BlockEvent, BlockStored, EventBatch
from tierkv.kvcore.ids import Incarnation, NodeId
from tierkv.metaserver.client import ReportReply

BATCH_EVENTS: Final = 4_096
"""Events per batch, well below limits.MAX_EVENTS_PER_BATCH: packing or applying a batch occupies an
event loop for about 4 ms."""

Inventory = Callable[[], Sequence[BlockStored]]


@dataclass(slots=True)
class _Snapshot:
    """An inventory being sent; ``ticket`` is delivered with the last part."""

    blocks: Sequence[BlockStored]
    ticket: int
    sent_blocks: int = 0
    part: int = 0


class MetaReporter:
    """Implements tierkv.kvcore.block_event.BlockReporter. Thread-safe.

    An inventory is a snapshot of the blocks on the node and supersedes events reported before the
    snapshot. Therefore nodes must change their state first and report the change afterwards.

    Attributes:
        _queue: events newer than the last snapshot, oldest first.
        _inventory_due: a snapshot must be taken; until then the queue stays empty.
        _snapshot: the inventory being sent; None when there is none.
        _in_flight: the batch taken out and not acknowledged; it is sent again.
        _reported: number of tickets given out, one per event and per requested inventory.
        _delivered: the meta server has acknowledged all tickets up to this number.
    """

    def __init__(
        self,
        node_id: NodeId,
        incarnation: Incarnation,
        inventory: Inventory | None = None,
        *,
        max_queued_events: int = 1 << 18,
    ) -> None:
        """Make an outbox.

        Args:
            node_id: the reporting node.
            incarnation: the node's incarnation.
            inventory: returns all blocks held now; called from a worker thread. None: no blocks,
                until ``set_inventory``.
            max_queued_events: above this number an inventory replaces the queue.
        """
        self._node_id = node_id
        self._incarnation = incarnation
        self._inventory = inventory or _nothing
        self._max_queued_events = max_queued_events
        self._lock = threading.Lock()
        self._queue: deque[BlockEvent] = deque()
        self._inventory_due = True
        self._snapshot: _Snapshot | None = None
        self._in_flight: EventBatch | None = None
        self._in_flight_ticket = 0
        self._seq = 0
        self._reported = 1
        self._delivered = 0
        self._wake: Callable[[], None] = _ignore

    def set_inventory(self, inventory: Inventory) -> None:
        """Set the source of inventories, for nodes made after their reporter."""
        self._inventory = inventory
        self.request_inventory()

    def set_wake(self, wake: Callable[[], None] | None) -> None:
        """Set the callback that announces new work to the sender, from any thread."""
        self._wake = wake or _ignore

    def report(self, events: Sequence[BlockEvent]) -> None:
        """Queue events; never blocks and never raises."""
        if not events:
            return
        with self._lock:
            self._reported += len(events)
            if not self._inventory_due:
                self._queue.extend(events)
                if len(self._queue) > self._max_queued_events:
                    self._fall_back_to_inventory()
        self._wake()

    def request_inventory(self) -> None:
        """Send an inventory, unless an inventory is due or under way.

        A meta server that asks while parts are under way either has not seen them yet, or will
        refuse the next part; then ``acknowledge`` starts again.
        """
        with self._lock:
            if not self._owes_inventory():
                self._fall_back_to_inventory()
        self._wake()

    @property
    def inventory_due(self) -> bool:
        """Return whether ``next_batch`` will first take a snapshot, which may be slow."""
        return self._inventory_due

    def next_batch(self) -> EventBatch | None:
        """Return the batch to send now, repeated until acknowledged; None without work.

        Called by one sender at a time.
        """
        if self._inventory_due:
            self._take_snapshot()
        with self._lock:
            if self._in_flight is None:
                self._in_flight = self._next_part() or self._next_events()
            return self._in_flight

    def acknowledge(self, batch: EventBatch, reply: ReportReply) -> None:
        """Record the meta server's answer to the batch in flight."""
        with self._lock:
            if self._in_flight is not batch:
                return
            self._in_flight = None
            if not reply.accepted or reply.send_inventory:
                self._fall_back_to_inventory()
            if reply.accepted:
                self._delivered = max(self._delivered, self._in_flight_ticket)

    def ticket(self) -> int:
        """Return a ticket for ``is_delivered``, covering all events reported until now."""
        with self._lock:
            return self._reported

    def is_delivered(self, ticket: int) -> bool:
        """Return whether all events of ``ticket`` are acknowledged and no inventory is pending."""
        with self._lock:
            return self._delivered >= ticket and not self._owes_inventory()

    def _owes_inventory(self) -> bool:
        last_part_in_flight = self._in_flight is not None and self._in_flight.inventory
        return self._inventory_due or self._snapshot is not None or last_part_in_flight

    def _fall_back_to_inventory(self) -> None:
        self._inventory_due = True
        self._snapshot = None
        self._in_flight = None
        self._queue.clear()
        self._reported += 1

    def _take_snapshot(self) -> None:
        """Take a snapshot of the node's blocks, outside the lock; new events queue up meanwhile."""
        with self._lock:
            self._inventory_due = False
            self._in_flight = None
            self._queue.clear()
            self._snapshot = _Snapshot(blocks=(), ticket=self._reported)
            snapshot = self._snapshot
        try:
            snapshot.blocks = self._inventory()
        except BaseException:
            with self._lock:
                self._fall_back_to_inventory()
            raise

    def _next_part(self) -> EventBatch | None:
        """Cut the next part off the snapshot; an empty inventory still has one part."""
        snapshot = self._snapshot
        if snapshot is None:
            return None
        start, part = snapshot.sent_blocks, snapshot.part
        end = min(start + BATCH_EVENTS, len(snapshot.blocks))
        snapshot.sent_blocks, snapshot.part = end, part + 1
        more = end < len(snapshot.blocks)
        self._in_flight_ticket = 0 if more else snapshot.ticket
        if not more:
            self._snapshot = None
        events = tuple(snapshot.blocks[start:end])
        return self._numbered(events, inventory=True, more=more, part=part)

    def _next_events(self) -> EventBatch | None:
        if not self._queue:
            return None
        count = min(BATCH_EVENTS, len(self._queue))
        events = tuple(self._queue.popleft() for _ in range(count))
        self._in_flight_ticket = self._reported - len(self._queue)
        return self._numbered(events)

    def _numbered(
        self,
        events: tuple[BlockEvent, ...],
        *,
        inventory: bool = False,
        more: bool = False,
        part: int = 0,
    ) -> EventBatch:
        self._seq += 1
        return EventBatch(
            node_id=self._node_id,
            incarnation=self._incarnation,
            seq=self._seq,
            events=events,
            inventory=inventory,
            more=more,
            part=part,
        )


def _nothing() -> Sequence[BlockStored]:
    return ()


def _ignore() -> None:
    """Do nothing: the wake-up before a sender is set."""
