"""Which rows that decode together should read the beginning they share once for all of them.

Pure: page tables in, a partition out. Called while a batch is laid out (compute/model/batch.py);
pages are compared by number, for equal tokens that are findable have one page in L1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Int64Array = NDArray[np.int64]

LEAST_SAVED_TOKENS = 512
"""Reads of a key spared, at least, for two attentions to be cheaper than one (bench.decoding)."""


@dataclass(frozen=True, slots=True)
class Cohort:
    """Rows whose page tables begin with the same pages.

    Attributes:
        members: indices of the rows, ascending.
        shared_pages: leading pages that are read once; 0: nothing is shared.
    """

    members: tuple[int, ...]
    shared_pages: int

    @property
    def saved_pages(self) -> int:
        """Pages that need not be read again."""
        return self.shared_pages * (len(self.members) - 1)


def find_cohorts(table: Int64Array, full_pages: Int64Array, *, least_saved: int) -> list[Cohort]:
    """Partition rows so that the fewest pages are read; what shares too little stays together.

    O(rows x pages): each page is looked at once on the way down the tree of beginnings.

    Args:
        table: ``[rows, pages]``, page numbers, one row per sequence.
        full_pages: ``[rows]``, how many leading pages hold only what all of a row's queries see.
        least_saved: cohorts that spare fewer pages are not worth it.

    Returns:
        cohorts: those that share; then, if any rows are left, one that does not.
    """
    sharing = [
        cohort
        for cohort in _best(table, full_pages, np.arange(len(table)), 0)
        if cohort.saved_pages >= max(1, least_saved)
    ]
    taken = {row for cohort in sharing for row in cohort.members}
    rest = tuple(row for row in range(len(table)) if row not in taken)
    return [*sharing, Cohort(rest, 0)] if rest else sharing


def _best(table: Int64Array, full: Int64Array, rows: Int64Array, depth: int) -> Sequence[Cohort]:
    """Keep rows that agree on ``depth`` pages together, or split them where that spares more."""
    if len(rows) < 2:
        return ()
    most = int(full[rows].min())
    window = table[rows, depth:most]
    differs = (window != window[0]).any(axis=0)
    common = depth + int(differs.argmax() if differs.any() else max(0, most - depth))
    whole = Cohort(tuple(rows.tolist()), common)
    deeper = rows[full[rows] > common]
    if len(deeper) < 2:
        return (whole,)
    pages = table[deeper, common]
    parts = [
        cohort
        for page in np.unique(pages)
        for cohort in _best(table, full, deeper[pages == page], common + 1)
    ]
    return parts if sum(part.saved_pages for part in parts) > whole.saved_pages else (whole,)
