"""Bytes between this process and pool nodes of other zones: counted, and limited by a bucket.

A transfer begins only while the bucket has room, and is charged after the bytes have moved, so the
bucket may fall below zero. The next transfer then does not begin: KV is computed, or not stored.
Over time the bytes stay within the limit. Used by dmp/transport/ and, over PoolNode.other_zone, by
compute/tiers/finder.py.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace

from tierkv.kvcore.clock import Clock
from tierkv.kvcore.ids import ZoneId
from tierkv.kvcore.node import NodeReport


class ZoneTraffic:
    """Counts and limits of one process; thread-safe.

    Attributes:
        zone: the process's own zone; empty if it has none, and every node counts as near.
        bytes_in: bytes received from other zones.
        bytes_out: bytes sent to other zones.
        refusals: transfers that did not begin because of the limit.
    """

    def __init__(self, zone: ZoneId, *, clock: Clock, bytes_per_s: float = 0.0) -> None:
        """Begin with a full bucket: the bytes of one second.

        Args:
            zone: the process's own zone.
            clock: fills the bucket.
            bytes_per_s: bytes in both directions that may move on average; 0: no limit.
        """
        self.zone = zone
        self.bytes_in = 0
        self.bytes_out = 0
        self.refusals = 0
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._room = bytes_per_s
        self._filled_s = clock.now()
        self._lock = threading.Lock()

    def other(self, zone: ZoneId) -> OtherZone | None:
        """Describe a node's zone; None for the own zone, and if either zone is unknown."""
        return OtherZone(zone, self) if zone and self.zone and zone != self.zone else None

    @property
    def has_room(self) -> bool:
        """Whether a transfer may begin."""
        with self._lock:
            return not self._bytes_per_s or self._fill() > 0

    def admit(self) -> bool:
        """Return whether a transfer may begin, and count a refusal."""
        if self.has_room:
            return True
        self.refusals += 1
        return False

    def received(self, size_bytes: int) -> None:
        """Count bytes from another zone."""
        with self._lock:
            self.bytes_in += size_bytes
            self._room = self._fill() - size_bytes

    def sent(self, size_bytes: int) -> None:
        """Count bytes to another zone."""
        with self._lock:
            self.bytes_out += size_bytes
            self._room = self._fill() - size_bytes

    def told_in(self, report: NodeReport) -> NodeReport:
        """Return a report with these counts."""
        return replace(
            report,
            cross_zone_bytes_in=self.bytes_in,
            cross_zone_bytes_out=self.bytes_out,
            cross_zone_refusals=self.refusals,
        )

    def _fill(self) -> float:
        now = self._clock.now()
        grown = self._room + (now - self._filled_s) * self._bytes_per_s
        self._filled_s = now
        self._room = min(self._bytes_per_s, grown)
        return self._room


@dataclass(frozen=True, slots=True)
class OtherZone:
    """A zone that is not the caller's.

    Attributes:
        name: the zone.
        traffic: what the caller exchanges with all other zones.
    """

    name: ZoneId
    traffic: ZoneTraffic


def may_transfer(zone: OtherZone | None) -> bool:
    """Return whether a transfer with a node may begin; ``zone`` is None for the own zone."""
    return zone is None or zone.traffic.admit()


def received(zone: OtherZone | None, size_bytes: int) -> None:
    """Count bytes from a node, if it is in another zone."""
    if zone is not None:
        zone.traffic.received(size_bytes)


def sent(zone: OtherZone | None, size_bytes: int) -> None:
    """Count bytes to a node, if it is in another zone."""
    if zone is not None:
        zone.traffic.sent(size_bytes)
