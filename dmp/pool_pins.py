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
    holder: Holder
    count: int = 1


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

    def add(self, key: BlockKey) -> bool:
        """Pin a block once more; False if it is not in the pool."""
        with self._lock:
            pin = self._pins.get(key)
            if pin is not None:
                pin.count += 1
                return True
            holder = self._take(key)
            if holder is not None:
                self._pins[key] = _Pin(holder)
            return holder is not None

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
        release(pin.holder)

    def renew(self) -> None:
        """Hold every pinned block for another while."""
        with self._lock:
            for key in list(self._pins):
                self._renew_one(key, self._pins[key])

    def close(self) -> None:
        """Let every block go."""
        with self._lock:
            pins, self._pins = self._pins, {}
        for pin in pins.values():
            release(pin.holder)

    def _renew_one(self, key: BlockKey, pin: _Pin) -> None:
        if hold(pin.holder):
            release(pin.holder)  # Holds are counted: the new one stays, the old one goes.
            return
        holder = self._take(key)
        if holder is not None:
            pin.holder = holder
        elif pin.holder[0].up:
            # The node answers and does not have it. A node that is away may still come back.
            del self._pins[key]
            self.lost += 1

    def _take(self, key: BlockKey) -> Holder | None:
        holder = self._find(key)
        return holder if holder is not None and hold(holder) else None


def hold(holder: Holder, ttl_s: float = HOLD_S) -> bool:
    """Keep a block from eviction for a while; False if it is gone."""
    link, location = holder
    held = False
    with link.absorb():
        held = link.opened.node.hold([location], ttl_s=ttl_s) == [True]
    return held


def release(holder: Holder) -> None:
    """Undo one hold."""
    link, location = holder
    with link.absorb():
        link.opened.node.release([location])
