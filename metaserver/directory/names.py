"""Names as numbers: models, tenants and sessions that blocks carry.

Used by metaserver/directory/ledger.py. A table stays bounded: when it is full it forgets names
that no block has any more; if all are in use, further names are number 0, the empty one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray


class Names:
    """Numbers of names, given out once and reused when no block has them any more.

    Attributes:
        _numbers: number of each name; the empty name is 0.
        _names: name of each number.
        _free: numbers without a name.
        _unknown: names that were not known when they came, since the last sweep.
    """

    def __init__(self, *, limit: int) -> None:
        """Know the empty name only; give out at most ``limit`` numbers."""
        self._limit = limit
        self._numbers = {"": 0}
        self._names = [""]
        self._free: list[int] = []
        self._sweep_at = min(limit, 1 << 16)
        self._unknown = 0

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, number: int) -> str:
        return self._names[number]

    def numbers(
        self, names: Sequence[str], in_use: Callable[[], Iterable[int]]
    ) -> NDArray[np.uint32]:
        """Return the numbers of ``names``.

        Args:
            names: of a batch.
            in_use: answers the numbers that blocks have; called when the table has doubled, or when
                it is full and many unknown names came since, for it may be slow.
        """
        known = self._numbers
        unknown = sum(name not in known for name in names)
        self._unknown += unknown
        is_full = len(known) + unknown > self._sweep_at
        if is_full and self._unknown >= min(self._limit, 1 << 16) >> 4:
            self._unknown = 0
            self._sweep(in_use())
        return np.array([known.get(n) or self._number(n) for n in names], np.uint32)

    def _number(self, name: str) -> int:
        if not name:
            return 0
        if self._free:
            number = self._free.pop()
            self._names[number] = name
        elif len(self._names) < self._limit:
            number = len(self._names)
            self._names.append(name)
        else:
            return 0
        self._numbers[name] = number
        return number

    def _sweep(self, in_use: Iterable[int]) -> None:
        """Forget names that no block has."""
        keep = {0, *in_use}
        for number in [n for n in self._numbers.values() if n not in keep]:
            del self._numbers[self._names[number]]
            self._names[number] = ""
            self._free.append(number)
        self._sweep_at = min(self._limit, max(1 << 16, 2 * len(self._numbers)))
