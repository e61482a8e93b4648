"""The nodes of the directory, numbered within 16 bits, and the order of each node's event batches.

Used by metaserver/directory/directory.py. The book also maps nodes to hosts and zones, in arrays
for lookups of whole chains. A Feed, one per node and incarnation, classifies batches: repeats, gaps
and inventories in parts; the directory interprets the events. Pure.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from enum import Enum, auto

import numpy as np

from tierkv.kvcore import limits
from tierkv.kvcore.ids import HostId, NodeId, ZoneId
from tierkv.kvcore.node import NodeInfo, NodeRole
from tierkv.kvwire.event_records import EventRecords
from tierkv.metaserver.directory.arrays import Ints


class Verdict(Enum):
    """How to handle a batch."""

    REPEATED = auto()
    """A batch seen before: do nothing."""
    EVENTS = auto()
    """Apply the events; nothing else changes."""
    FIRST_PART = auto()
    """An inventory begins: copies that it does not name are dropped at its end."""
    NEXT_PART = auto()
    """The inventory goes on."""


@dataclass(slots=True)
class Feed:
    """Progress through the numbered batches of one incarnation.

    Attributes:
        last_seq: highest number seen; batches at or below this number are repeats.
        synced: an inventory was completed and nothing is missing since.
        next_part: the inventory part expected next; None outside an inventory.
    """

    last_seq: int = 0
    synced: bool = False
    next_part: int | None = None

    @property
    def wants_inventory(self) -> bool:
        """Return whether the node should report all blocks held."""
        return not self.synced and self.next_part is None

    def admit(self, batch: EventRecords) -> Verdict:
        """Record a batch and classify it.

        After a gap the events are still true (later events about a block win), but only an
        inventory can recover the lost events.
        """
        if batch.seq <= self.last_seq:
            return Verdict.REPEATED
        contiguous = batch.seq == self.last_seq + 1
        self.last_seq = batch.seq
        if not batch.inventory:
            if not contiguous or self.next_part is not None:
                self._lose()
            return Verdict.EVENTS
        if batch.part == 0:
            self._advance(batch)
            return Verdict.FIRST_PART
        if contiguous and batch.part == self.next_part:
            self._advance(batch)
            return Verdict.NEXT_PART
        self._lose()
        return Verdict.EVENTS

    def _lose(self) -> None:
        self.synced = False
        self.next_part = None

    def _advance(self, batch: EventRecords) -> None:
        self.synced = not batch.more
        self.next_part = batch.part + 1 if batch.more else None


class Holder:
    """A live node and the number of its copies.

    Attributes:
        number: index in ``NodeBook.holders``; never 0.
        copies: rows of the node in the copy table.
        epoch: epoch of the node's last inventory, finished or not.
        confirmed: copies named in this epoch or later.
        taking_inventory: parts of an inventory are under way.
    """

    __slots__ = (
        "confirmed", "copies", "epoch", "feed", "info", "number", "taking_inventory",
    )  # fmt: skip

    def __init__(self, info: NodeInfo, number: int) -> None:
        self.info = info
        self.number = number
        self.feed = Feed()
        self.copies = 0
        self.confirmed = 0
        self.epoch = 0
        self.taking_inventory = False

    @property
    def computes(self) -> bool:
        """Return whether the node has an L1."""
        return self.info.role.prefills or self.info.role.decodes

    @property
    def pools(self) -> bool:
        """Return whether the node is a DMP node."""
        return self.info.role is NodeRole.DMP


class NodeBook:
    """Holders by name and by number.

    Attributes:
        holders: by number; None for a free number.
        by_name: by node id.
        hosts: [n] a number per host, equal for holders on one host; 0 for free numbers.
        zones: [n] a number per zone, in the same way.
    """

    def __init__(self) -> None:
        self.holders: list[Holder | None] = [None]
        self.by_name: dict[NodeId, Holder] = {}
        self.hosts: Ints = np.zeros(limits.MAX_NODES + 1, np.int64)
        self.zones: Ints = np.zeros(limits.MAX_NODES + 1, np.int64)
        self._host_numbers: dict[HostId, int] = {}
        self._zone_numbers: dict[ZoneId, int] = {}
        self._new_zones = itertools.count(1)
        self._compute: dict[int, list[int]] = {}

    def add(self, info: NodeInfo) -> Holder:
        """Add an unknown node."""
        number = next((n for n, h in enumerate(self.holders) if n and h is None), None)
        if number is None:
            number = len(self.holders)
            self.holders.append(None)
        holder = self.holders[number] = self.by_name[info.node_id] = Holder(info, number)
        host = self._host_numbers.setdefault(info.host, len(self._host_numbers) + 1)
        self.hosts[number] = host
        self.zones[number] = self._zone_number(info.zone)
        if holder.computes:
            self._compute.setdefault(host, []).append(number)
        return holder

    def _zone_number(self, zone: ZoneId) -> int:
        if zone not in self._zone_numbers:
            self._zone_numbers[zone] = next(self._new_zones)
        return self._zone_numbers[zone]

    def remove(self, holder: Holder) -> None:
        """Remove a node without copies."""
        assert holder.copies == 0, holder.info.node_id
        host = int(self.hosts[holder.number])
        if holder.computes:
            self._compute[host].remove(holder.number)
        zone = self.zones[holder.number]
        self.hosts[holder.number] = self.zones[holder.number] = 0
        if not (self.zones == zone).any():
            del self._zone_numbers[holder.info.zone]
        self.holders[holder.number] = None
        del self.by_name[holder.info.node_id]
        if not (self.hosts == host).any():
            del self._host_numbers[holder.info.host]
            self._compute.pop(host, None)
            self._renumber_hosts()

    def host_number(self, host: HostId | None) -> int:
        """Return a host's number; -1 for a host without nodes."""
        return self._host_numbers.get(host, -1) if host is not None else -1

    @property
    def has_zones(self) -> bool:
        """Return whether there are nodes in different zones."""
        return len(self._zone_numbers) > 1

    def zone_of_host(self, host_number: int) -> int:
        """Return the number of a host's zone; -1 for a host without nodes."""
        on_host = np.flatnonzero(self.hosts == host_number)
        return int(self.zones[on_host[0]]) if len(on_host) and host_number > 0 else -1

    def compute_nodes(self, host_number: int) -> list[int]:
        """Return the numbers of a host's compute nodes."""
        return self._compute.get(host_number, [])

    def holder(self, number: int) -> Holder:
        """Return the holder of a number in use."""
        holder = self.holders[number]
        assert holder is not None, number
        return holder

    def _renumber_hosts(self) -> None:
        """Keep host numbers dense, so they stay small however many hosts come and go."""
        live = [h for h in self.holders if h is not None]
        self._host_numbers = {}
        self._compute = {}
        for holder in live:
            name = holder.info.host
            host = self._host_numbers.setdefault(name, len(self._host_numbers) + 1)
            self.hosts[holder.number] = host
            if holder.computes:
                self._compute.setdefault(host, []).append(holder.number)
