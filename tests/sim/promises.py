"""What a node has promised to keep: the model that its real core is checked against.

It knows nothing of caches: it takes in each order and what the core kept of it, and answers what
must still be there.
"""

from __future__ import annotations

from collections.abc import Callable

from tierkv.kvcore.block_event import HoldOrder, LeaseId
from tierkv.kvcore.ids import BlockKey


class Promises:
    """Leases on one node's blocks. ``until`` counts from receipt, as the order says."""

    def __init__(self) -> None:
        self._leases: dict[LeaseId, tuple[float, set[BlockKey]]] = {}

    def take_in(self, order: HoldOrder, kept: Callable[[BlockKey], bool], now: float) -> None:
        """Note an order that was carried out; ``kept`` says whether a block is under lease now."""
        self.forget_expired(now)
        until = now + order.ttl_s
        if order.keys:
            keys = self._leases.get(order.lease, (0.0, set()))[1]
            keys |= {key for key in order.keys if kept(key)}
            if keys:
                self._leases[order.lease] = (until, keys)
        elif order.ttl_s > 0 and order.lease in self._leases:
            self._leases[order.lease] = (until, self._leases[order.lease][1])
        elif order.ttl_s <= 0:
            self._leases.pop(order.lease, None)

    def forget_expired(self, now: float) -> None:
        """Let go of what is over."""
        self._leases = {k: v for k, v in self._leases.items() if v[0] > now}

    def give_way(self, kept: Callable[[BlockKey], bool]) -> None:
        """Let leases end that had to, the first to expire first, until the rest is kept."""
        while self._leases and not all(map(kept, self._keys())):
            del self._leases[min(self._leases, key=lambda lease: self._leases[lease][0])]

    def _keys(self) -> set[BlockKey]:
        return {key for _, keys in self._leases.values() for key in keys}

    def kept(self, now: float) -> set[BlockKey]:
        """Name the blocks that must not go now."""
        return {key for until, keys in self._leases.values() if until > now for key in keys}
