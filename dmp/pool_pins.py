"""Pins of a Pool: holds on nodes, renewed for as long as somebody wants them.

A node's holds end by themselves, so that a lost client blocks no memory for good; the pool's keeper
renews them. A pin whose node is lost is looked for again and, if the block is gone, counted.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from dmp.node_link import NodeLink
from kvcore.ids import BlockKey
from kvcore.location import Location

HOLD_S: Final = 120.0
"""How long a node keeps a pinned block after its client fell silent."""

RENEW_S: Final = HOLD_S / 4

Holder = tuple[NodeLink, Location]


@dataclass(slots=True)
class _Pin:
    """A pinned block.

    Attributes:
        holder: where it is held.
        count: how often it is pinned.
        holds: taken on it. The node may have fewer: it ends them with the client's last connection,
            of which the client, which connects again, learns nothing. So none is ever released
            before the last unpin; one that is not there is ignored.
    """

    holder: Holder
    count: int = 1
    holds: int = 1

    def release(self) -> None:
        """Let the block go."""
        link, place = self.holder
        release_all(link, [place] * self.holds)


class Pins:
    """Counted pins by key; thread-safe.

    Attributes:
        lost: pins whose block is gone.
    """

    def __init__(self, find: Callable[[BlockKey], Holder | None]) -> None:
        self.lost = 0
        self._find = find
        self._lock = threading.Lock()
        self._pins: dict[BlockKey, _Pin] = {}

    def __len__(self) -> int:
        return len(self._pins)

    def add(self, key: BlockKey) -> Holder | None:
        """Pin a block once more; costs nothing if it is pinned already.

        Returns:
            who holds it; None if it is not in the pool.
        """
        holder = self._count(key)
        if holder is None and (holder := self._take(key)) is not None:
            with self._lock:
                pin = self._pins.get(key)
                if pin is None:
                    self._pins[key] = _Pin(holder)
                    return holder
                pin.count += 1  # Another thread was faster: one hold is enough.
            release(holder)
            return pin.holder
        return holder

    def _count(self, key: BlockKey) -> Holder | None:
        with self._lock:
            pin = self._pins.get(key)
            if pin is None:
                return None
            pin.count += 1
            return pin.holder

    def drop(self, key: BlockKey) -> None:
        """Undo one ``add``; the last one lets the block go.

        Raises:
            KeyError: it is not pinned.
        """
        with self._lock:
            pin = self._pins[key]
            pin.count -= 1
            if pin.count:
                return
            del self._pins[key]
        pin.release()

    def renew(self) -> None:
        """Hold every pinned block for another while; called by one thread at a time."""
        with self._lock:
            pins = list(self._pins.items())
        by_link: dict[NodeLink, list[tuple[BlockKey, _Pin]]] = {}
        for key, pin in pins:
            by_link.setdefault(pin.holder[0], []).append((key, pin))
        for link, group in by_link.items():
            if link.up:  # One that is away may still come back with its blocks.
                self._renew_on(link, group)

    def close(self) -> None:
        """Let every block go."""
        with self._lock:
            pins, self._pins = self._pins, {}
        for pin in pins.values():
            pin.release()

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
        holder = self._take(key)
        with self._lock:
            if self._pins.get(key) is pin:
                if holder is not None:
                    pin.holder, pin.holds = holder, 1
                else:
                    del self._pins[key]
                    self.lost += 1
                return
        if holder is not None:
            release(holder)  # Unpinned meanwhile.

    def _take(self, key: BlockKey) -> Holder | None:
        """Find and hold a block; a remembered place may be stale, so twice."""
        for _ in range(2):
            holder = self._find(key)
            if holder is None or hold(holder):
                return holder
            holder[0].forget(key)
        return None


def hold(holder: Holder) -> bool:
    """Keep a block from eviction for a while; False if it is gone."""
    return hold_all(holder[0], [holder[1]]) == [True]


def release(holder: Holder) -> None:
    """Undo one hold."""
    release_all(holder[0], [holder[1]])


def hold_all(link: NodeLink, places: list[Location]) -> list[bool]:
    """Keep blocks of one node for a while; answers which are still there."""
    held = [False] * len(places)
    with link.absorb():
        held = link.opened.node.hold(places, ttl_s=HOLD_S)
    return held


def release_all(link: NodeLink, places: list[Location]) -> None:
    """Undo one hold on each."""
    if places:
        with link.absorb():
            link.opened.node.release(places)
