"""Leases over several meta servers: one id for the leases that the owners of a chain gave. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from tierkv.kvcore.block_event import NO_LEASE, LeaseId

ServerLease = tuple[int, LeaseId]
"""Number of a server, and its own id of a lease."""

_SPARE_S: Final = 60.0
"""How long an expired lease stays known; the servers judge expiry by their own clocks."""


class JoinedLeases:
    """Ids of this client for the leases of servers; not thread-safe."""

    def __init__(self) -> None:
        self._parts: OrderedDict[LeaseId, tuple[float, tuple[ServerLease, ...]]] = OrderedDict()
        self._last = 0

    def add(self, parts: Sequence[ServerLease], until: float, now: float) -> LeaseId:
        """Return an id for leases until a time; NO_LEASE when there are none."""
        while self._parts and next(iter(self._parts.values()))[0] + _SPARE_S < now:
            self._parts.popitem(last=False)
        if not parts:
            return NO_LEASE
        self._last += 1
        lease = LeaseId(self._last)
        self._parts[lease] = (until, tuple(parts))
        return lease

    def parts(self, lease: LeaseId) -> tuple[ServerLease, ...]:
        """Return the leases behind an id; none for an unknown id."""
        return self._parts.get(lease, (0.0, ()))[1]

    def extend(self, lease: LeaseId, until: float) -> None:
        """Set a new time."""
        if (known := self._parts.get(lease)) is not None:
            self._parts[lease] = (until, known[1])
            self._parts.move_to_end(lease)

    def end(self, lease: LeaseId) -> tuple[ServerLease, ...]:
        """Forget an id and return the leases behind it."""
        return self._parts.pop(lease, (0.0, ()))[1]
