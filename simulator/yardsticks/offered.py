"""The part of an EvictionPolicy that most yardsticks share: the set of evictable handles.

Arc, S3Fifo and the policies of block_policies.py extend this class; Lhd draws from an array
instead. Subclasses implement the other methods of the contract.
"""

from __future__ import annotations


class OfferedHandles:
    """Keeps the offered handles in a set.

    Attributes:
        _offered: resident handles that may be evicted.
    """

    def __init__(self) -> None:
        self._offered: set[int] = set()

    def offer(self, handle: int) -> None:
        self._offered.add(handle)

    def withdraw(self, handle: int) -> None:
        self._offered.discard(handle)
