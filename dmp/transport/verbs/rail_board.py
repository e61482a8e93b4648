"""The rails to a DMP node, shared by all threads.

Called by dmp/transport/verbs/lane.py and dmp/transport/verbs/node.py. Asks the node once for its
ports, tracks the health of each rail, and tells whether RDMA is in use, and if not, why.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from tierkv.dmp.transport.connection import Peer
from tierkv.dmp.transport.verbs.fabric import Fabric
from tierkv.dmp.transport.verbs.link import ask_offer
from tierkv.dmp.transport.verbs.rails import NumaPlace, RailHealth, nearest, pair_ports
from tierkv.kvcore.clock import Clock
from tierkv.kvcore.errors import CacheError, TransportError

log = logging.getLogger(__name__)
OFFER_RETRY_S: Final = 30.0
"""How long a node's answer counts while no rail works."""


class NoRailError(TransportError):
    """No rail to the node may be used now: the bytes go over TCP."""


@dataclass(frozen=True, slots=True)
class Rail:
    """A local port, paired with a port of the node.

    Attributes:
        local: index of our device in the fabric.
        remote: name of the node's device.
        name: human-readable name.
    """

    local: int
    remote: str
    name: str


class RailBoard:
    """Rails and their health; thread-safe.

    Attributes:
        is_refused: the node has answered that it has no port for us.
    """

    def __init__(self, fabric: Fabric, peer: Peer, clock: Clock) -> None:
        self.fabric = fabric
        self.peer = peer
        self._clock = clock
        self._lock = threading.Lock()
        self._health: dict[Rail, RailHealth] = {}
        self._refusal = ""
        self.is_refused = False
        self._ask_again_at = 0.0
        self._told = ""

    def ask(self) -> str:
        """Ask the node for its ports if due; return why no rail exists, or an empty string."""
        with self._lock:
            now = self._clock.now()
            is_up = any(health.is_usable(now) for health in self._health.values())
            if is_up or now < self._ask_again_at:
                return self._refusal
        try:
            offer = ask_offer(self.peer)
        except CacheError as error:
            return self._refuse(error.message)
        ours = [port.gid for port in self.fabric.ports]
        pairs = pair_ports(ours, [port.gid for port in offer.ports])
        self.is_refused = not pairs
        if not pairs:
            return self._refuse(f"{self.peer.node_id}: {offer.reason or 'no RDMA ports'}")
        names = [port.device for port in self.fabric.ports]
        rails = [
            Rail(i, offer.ports[j].device, f"{names[i]}-{offer.ports[j].device}") for i, j in pairs
        ]
        with self._lock:
            self._refusal = ""
            self._ask_again_at = self._clock.now() + OFFER_RETRY_S
            # The node may have other ports now; kept ports keep their history.
            self._health = {rail: self._health.get(rail) or RailHealth() for rail in rails}
        return ""

    def _refuse(self, reason: str) -> str:
        with self._lock:
            self._refusal = reason
            self._ask_again_at = self._clock.now() + OFFER_RETRY_S
        return reason

    def usable(self, place: NumaPlace, *, without: Collection[Rail] = ()) -> list[Rail]:
        """Return the usable rails nearest to a place.

        Raises:
            NoRailError: no rail is usable.
        """
        refusal = self.ask()
        if refusal:
            raise NoRailError(refusal)
        with self._lock:
            now = self._clock.now()
            rails = [r for r, h in self._health.items() if h.is_usable(now) and r not in without]
        if not rails:
            raise NoRailError(self._troubles())
        far = self.fabric.distances(place)
        return nearest(rails, [far[rail.local] for rail in rails])

    def succeeded(self, rail: Rail) -> None:
        """Note a successful transfer."""
        with self._lock:
            if rail in self._health:
                self._health[rail].succeeded(self._clock.now())

    def failed(self, rail: Rail, error: CacheError) -> None:
        """Note an error; log once when the rail trips."""
        with self._lock:
            health = self._health.get(rail)
            if health is None:
                return
            tripped = health.failed(self._clock.now(), error.message)
            cooldown = health.cooldown_s
        if tripped:
            log.warning(
                "dmp %s: rail %s is left alone for %d s: %s",
                *(self.peer.node_id, rail.name, cooldown, error.message),
            )

    def note_path(self, reason: str = "") -> None:
        """Note the path of a transfer: rails, or TCP for a reason; log changes."""
        with self._lock:
            told, self._told = self._told, reason
        if reason and not told:
            log.warning("dmp %s: bytes go over TCP: %s", self.peer.node_id, reason)
        elif told and not reason:
            log.info("dmp %s: bytes go over RDMA again", self.peer.node_id)

    def why_tcp(self) -> str:
        """Return why bytes go over TCP now; empty while bytes go over RDMA."""
        with self._lock:
            now = self._clock.now()
            if self._health and not any(h.is_usable(now) for h in self._health.values()):
                return self._troubles_of(now)
            return self._told or self._refusal

    def describe(self) -> str:
        """Return the names of the rails, with the fault of each rail that is down."""
        with self._lock:
            now = self._clock.now()
            parts = [
                rail.name if health.is_usable(now) else f"{rail.name} down ({health.reason})"
                for rail, health in self._health.items()
            ]
        return ", ".join(parts) or "not connected yet"

    def _troubles(self) -> str:
        with self._lock:
            return self._troubles_of(self._clock.now())

    def _troubles_of(self, now: float) -> str:
        parts = [
            f"{rail.name}: {health.reason or 'busy'}"
            + (f", next try in {health.tripped_until - now:.0f} s" * (not health.is_usable(now)))
            for rail, health in self._health.items()
        ]
        return f"no RDMA rail works ({'; '.join(parts)})"
