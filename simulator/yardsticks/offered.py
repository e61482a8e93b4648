"""The part of an EvictionPolicy that most yardsticks share: which handles may go.

Arc, S3Fifo and the policies of block_policies.py extend it; Lhd draws from an array instead. The
other methods of the contract are theirs.
"""

from __future__ import annotations


class OfferedHandles:
    """Keeps the offered handles in a set.

    Attributes:
        _offered: resident handles that may go.
    """

    def __init__(self) -> None:
        self._offered: set[int] = set()

    def offer(self, handle: int) -> None:
        self._offered.add(handle)

    def withdraw(self, handle: int) -> None:
        self._offered.discard(handle)
