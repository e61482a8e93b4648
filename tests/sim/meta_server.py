"""The meta server of the simulation, and what every node does to stay known to it.

MetaServer is tierkv.metaserver.state.MetaState behind the simulated network. ReportingNode does
with simulated time what metaserver/agent.py does with asyncio: register, beat, send events, hear
orders.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import replace

from tests.sim.directory import Directory
from tests.sim.network import Ask, Network, Process, Sleep, Steps
from tierkv.kvcore.block_event import (
    NO_LEASE,
    BlockEvent,
    BlockStored,
    EventBatch,
    HoldOrder,
    LeaseId,
)
from tierkv.kvcore.errors import StaleEpochError
from tierkv.kvcore.ids import BlockKey, HostId, Incarnation, NodeId
from tierkv.kvcore.node import NodeInfo, NodeReport
from tierkv.kvwire.event_records import pack_events
from tierkv.metaserver.client import HeartbeatReply, LocateReply, Registration, ReportReply
from tierkv.metaserver.config import MetaConfig
from tierkv.metaserver.directory.leases import Asked
from tierkv.metaserver.reporter import MetaReporter
from tierkv.metaserver.state import MetaState

BEAT_S = 0.5
META_CONFIG = MetaConfig(
    heartbeat_interval_s=BEAT_S, suspect_after_s=1.5, dead_after_s=2.5, forget_after_s=60.0
)


class MetaServer(Process):
    """A life of a meta server; each one begins with nothing."""

    def __init__(self, name: str, net: Network, life: int) -> None:
        super().__init__(name, net)
        self.state = MetaState(META_CONFIG, first_lease=life << 20)

    def register(self, info: NodeInfo) -> Registration | None:
        try:
            return self.state.register(info, self.now)
        except StaleEpochError:
            return None

    def heartbeat(self, info: NodeInfo, report: NodeReport) -> HeartbeatReply:
        return self.state.heartbeat(info.node_id, info.incarnation, report, self.now)

    def report(self, batch: EventBatch) -> ReportReply:
        return self.state.report(pack_events(batch), self.now)

    def locate(
        self, keys: Sequence[BlockKey], *, reader: HostId | None = None, reserve_s: float = 0.0
    ) -> LocateReply:
        found = self.state.locate(b"".join(keys), self.now, reader=reader, reserve_s=reserve_s)
        self._order(found.orders)
        return found.reply

    def extend_lease(self, lease: LeaseId, ttl_s: float) -> bool:
        change = self.state.extend_lease(lease, ttl_s, self.now)
        self._order(change.orders)
        return change.lease != NO_LEASE

    def end_lease(self, lease: LeaseId, *, used: bool) -> bool:
        change = self.state.end_lease(lease, self.now, used=used)
        self._order(change.orders)
        return change.lease != NO_LEASE

    def open_holds(self, node_id: NodeId, incarnation: Incarnation) -> list[HoldOrder] | None:
        asked = self.state.orders_of(node_id, incarnation, self.now)
        return None if asked is None else [each.order() for each in asked]

    def _order(self, orders: Iterable[Asked]) -> None:
        for asked in orders:
            order = asked.order()
            self.net.send(asked.node_id, lambda node, order=order: node.on_hold(order))


class ReportingNode(Process):
    """A DMP or compute node, as far as the directory is concerned."""

    def __init__(self, info: NodeInfo, net: Network, metas: Sequence[str]) -> None:
        super().__init__(info.node_id, net)
        self.info = info
        self.directory = Directory(self, metas)
        self.reporter = MetaReporter(info.node_id, info.incarnation, self.inventory)
        self._known = dict.fromkeys(metas, False)
        self._owed = dict.fromkeys(metas, False)
        self.spawn(self._send_events())
        for meta in metas:
            self.spawn(self._stay_known(meta))
            self.spawn(self._follow_holds(meta))

    @abstractmethod
    def inventory(self) -> Sequence[BlockStored]:
        """List what this node holds."""

    @abstractmethod
    def on_hold(self, order: HoldOrder) -> None:
        """Keep blocks, or let go of them."""

    @abstractmethod
    def load(self) -> NodeReport:
        """Say how busy this node is."""

    def _stay_known(self, meta: str) -> Steps:
        """Register with a server and beat; a server that missed events gets an inventory."""
        while True:
            if not self._known[meta]:
                reply = yield Ask(meta, lambda server: server.register(self.info))
                if reply is not None:
                    self._known[meta] = True
                    if reply.send_inventory:
                        self.reporter.request_inventory()
            else:
                report = self.load()
                reply = yield Ask(meta, lambda m, r=report: m.heartbeat(self.info, r))
                if reply is not None:
                    self._known[meta] = reply.known
                    owed, self._owed[meta] = self._owed[meta], False
                    if reply.known and (reply.send_inventory or owed):
                        self.reporter.request_inventory()
            yield Sleep(BEAT_S if self._known[meta] else 0.1)

    def _send_events(self) -> Steps:
        """Tell each block's owners; who could not be told is owed an inventory."""
        while True:
            batch = self.reporter.next_batch() if any(self._known.values()) else None
            if batch is None:
                yield Sleep(0.1)
                continue
            table = self.directory.owners.of([event.key for event in batch.events]).tolist()
            shares: dict[str, list[BlockEvent]] = {name: [] for name in self.directory.names}
            for event, owners in zip(batch.events, table, strict=True):
                for number in owners:
                    shares[self.directory.names[number]].append(event)
            replies = yield from self.directory.ask_all(
                lambda name, batch=batch, shares=shares: (
                    lambda meta: meta.report(replace(batch, events=tuple(shares[name])))
                )
            )
            for name in self.directory.names:
                accepted = name in replies and replies[name].accepted
                self._owed[name] |= not accepted
                self._known[name] &= accepted or name not in replies
            if replies:
                joined = ReportReply(
                    any(reply.accepted for reply in replies.values()),
                    any(reply.send_inventory for reply in replies.values()),
                )
                self.reporter.acknowledge(batch, joined)

    def _follow_holds(self, meta: str) -> Steps:
        """Hear now and then of everything that is on: single orders may get lost."""
        info = self.info
        while True:
            orders = yield Ask(meta, lambda m: m.open_holds(info.node_id, info.incarnation))
            for order in orders or ():
                self.on_hold(order)
            yield Sleep(1.0)
