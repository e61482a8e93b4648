"""Pins of a Pool: holds on nodes, renewed until the last unpin.

A node's holds end by themselves, so a lost client does not block memory for good. The pool's keeper
thread renews the holds. After the loss of a node, the keeper searches pinned blocks on all nodes; a
pin without a block is counted as lost.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from tierkv.dmp.client.node_link import Act, NodeLink
from tierkv.kvcore.block import Location
from tierkv.kvcore.ids import BlockKey

HOLD_S: Final = 120.0
"""How long a node keeps a pinned block after its client fell silent."""

RENEW_S: Final = HOLD_S / 4

Holder = tuple[NodeLink, Location]


@dataclass(slots=True)
class _Pin:
    """A pinned block.

    Attributes:
        holder: node and location of the hold.
        count: number of pins.
        holds: number of holds taken by this client. The node may have fewer holds: the node ends
            them with the client's last connection, and a client that reconnects does not notice.
            Hence no hold is released before the last unpin; the release of a missing hold is
            ignored.
    """

    holder: Holder
    count: int = 1
    holds: int = 1

    def holders(self) -> list[Holder]:
        """Return the holds to release to make the block evictable."""
        return [self.holder] * self.holds


class Pins:
    """Counted pins by key; thread-safe.

    Attributes:
        lost: number of pins whose block is gone.
    """

    def __init__(self, seek: Callable[[Sequence[BlockKey], Act], None]) -> None:
        self.lost = 0
        self._seek = seek
        self._lock = threading.Lock()
        self._pins: dict[BlockKey, _Pin] = {}

    def __len__(self) -> int:
        return len(self._pins)

    def add(self, keys: Sequence[BlockKey]) -> dict[BlockKey, Holder]:
        """Add a pin per named key (a repeated key counts again); no request for pinned blocks.

        Returns:
            The holder of each block; no entry for a block that is not in the pool.
        """
        counted = self._count(keys)
        new = [key for key in keys if key not in counted]
        taken = self._take(list(dict.fromkeys(new))) if new else {}
        surplus: list[Holder] = []
        mine: set[BlockKey] = set()
        with self._lock:
            for key in (key for key in new if key in taken):
                pin = self._pins.get(key)
                if pin is None:
                    self._pins[key] = _Pin(taken[key])
                    mine.add(key)
                    continue
                pin.count += 1
                if key not in mine:  # Another thread was faster: one hold is enough.
                    surplus.append(taken[key])
                    taken[key] = pin.holder
                    mine.add(key)
        _release_holders(surplus)
        return counted | taken

    def _count(self, keys: Sequence[BlockKey]) -> dict[BlockKey, Holder]:
        counted: dict[BlockKey, Holder] = {}
        with self._lock:
            for key in keys:
                if (pin := self._pins.get(key)) is not None:
                    pin.count += 1
                    counted[key] = pin.holder
        return counted

    def drop(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Undo one ``add`` of each key; the last releases the block. False if not pinned."""
        dropped: list[bool] = []
        unwanted: list[Holder] = []
        with self._lock:
            for key in keys:
                pin = self._pins.get(key)
                dropped.append(pin is not None)
                if pin is None:
                    continue
                pin.count -= 1
                if not pin.count:
                    del self._pins[key]
                    unwanted += pin.holders()
        _release_holders(unwanted)
        return dropped

    def renew(self) -> None:
        """Renew the hold on every pinned block; called by one thread at a time."""
        with self._lock:
            pins = list(self._pins.items())
        by_link: dict[NodeLink, list[tuple[BlockKey, _Pin]]] = {}
        for key, pin in pins:
            by_link.setdefault(pin.holder[0], []).append((key, pin))
        for link, group in by_link.items():
            if link.up:  # A node that is down may return with its blocks.
                self._renew_on(link, group)

    def close(self) -> None:
        """Release every block."""
        with self._lock:
            pins, self._pins = self._pins, {}
        _release_holders([holder for pin in pins.values() for holder in pin.holders()])

    def _renew_on(self, link: NodeLink, group: list[tuple[BlockKey, _Pin]]) -> None:
        places = [pin.holder[1] for _, pin in group]
        held = hold_all(link, places)
        unwanted: list[Location] = []
        for (key, pin), place, ok in zip(group, places, held, strict=True):
            if not ok and link.up:
                self._find_again(key, pin)
            with self._lock:
                if ok and self._pins.get(key) is pin:
                    pin.holds += 1
                elif ok:
                    unwanted.append(place)  # Unpinned meanwhile.
        release_all(link, unwanted)

    def _find_again(self, key: BlockKey, pin: _Pin) -> None:
        holder = self._take([key]).get(key)
        with self._lock:
            if self._pins.get(key) is pin:
                if holder is not None:
                    pin.holder, pin.holds = holder, 1
                else:
                    del self._pins[key]
                    self.lost += 1
                return
        if holder is not None:
            _release_holders([holder])  # Unpinned meanwhile.

    def _take(self, keys: Sequence[BlockKey]) -> dict[BlockKey, Holder]:
        """Find and hold blocks; search twice for keys whose remembered location was stale."""
        held: dict[BlockKey, Holder] = {}
        stale: list[BlockKey] = []

        def take(link: NodeLink, wanted: list[BlockKey]) -> set[BlockKey]:
            known = {key: block for key in wanted if (block := link.known.get(key)) is not None}
            unknown = [key for key in wanted if key not in known]
            blocks = known | (link.find(unknown) if unknown else {})
            places = [block.location for block in blocks.values()]
            for key, place, ok in zip(blocks, places, hold_all(link, places), strict=True):
                if ok:
                    held[key] = link, place
                else:
                    link.forget(key)
                    stale.append(key)
            return held.keys() & blocks.keys()

        self._seek(keys, take)
        if again := [key for key in dict.fromkeys(stale) if key not in held]:
            self._seek(again, take)
        return held


def hold_all(link: NodeLink, places: list[Location]) -> list[bool]:
    """Hold blocks of one node for HOLD_S; return which locations are still valid."""
    held = [False] * len(places)
    if places:
        with link.absorb():
            held = link.opened.hold(places, ttl_s=HOLD_S)
    return held


def release_all(link: NodeLink, places: list[Location]) -> None:
    """Undo one hold on each location."""
    if places:
        with link.absorb():
            link.opened.release(places)


def _release_holders(holders: Iterable[Holder]) -> None:
    by_link: dict[NodeLink, list[Location]] = {}
    for link, place in holders:
        by_link.setdefault(link, []).append(place)
    for link, places in by_link.items():
        release_all(link, places)
