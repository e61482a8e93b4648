"""Which client has which reservations and holds, so that a dead client leaves none behind.

A part of the pure core, used by dmp/slots/slot_table.py. It may list slots that have moved on; the
table looks at each before it acts.
"""

from __future__ import annotations


class Owners:
    """Slot numbers by owner; the owner "" is nobody and is not kept."""

    def __init__(self) -> None:
        self._slots: dict[str, set[int]] = {}

    def add(self, owner: str, index: int) -> None:
        """Note that an owner has something to do with a slot."""
        if owner:
            self._slots.setdefault(owner, set()).add(index)

    def discard(self, owner: str, index: int) -> None:
        """Forget that."""
        slots = self._slots.get(owner)
        if slots is not None:
            slots.discard(index)
            if not slots:
                del self._slots[owner]

    def take(self, owner: str) -> set[int]:
        """Forget an owner; answers its slots."""
        return self._slots.pop(owner, set())

    def slots_of(self, owner: str) -> frozenset[int]:
        """Return an owner's slots."""
        return frozenset(self._slots.get(owner, ()))
