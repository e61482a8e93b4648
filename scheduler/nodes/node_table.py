"""Figures of all nodes as columns of numbers.

A part of the fleet: each NodeRecord keeps its row up to date, and scheduler/choosing/ reads
columns. With a hundred nodes this is fifty times faster than a loop over records. Costs are
computed from the figures in costing/.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from tierkv.costing.correction import Column, Corrections
from tierkv.costing.node_service import SPEED_ROWS, Columns, NodeSpeeds, speeds_of

_GROWTH = 64


class Figures(NamedTuple):
    """Figures of some nodes, one number per node; seconds, bytes and tokens.

    Attributes:
        speeds: compute and load speeds.
        queued: [3, nodes] bytes being or to be loaded from L2, L3 and L4.
        waiting_s: seconds of computing for our requests, as predicted at dispatch.
        head_s, head_end_s: the part of ``waiting_s`` of the current request, and when it is due.
        others_tokens: tokens to compute for other fronts.
        outstanding: requests at the node.
        decodes, decode_step_s: requests being decoded, and seconds of one decode step.
        learned: corrections from earlier prediction errors.
        hands_over: 1.0 for a node that only prefills.
        last_chosen: serial number of the last request sent to the node.
    """

    speeds: NodeSpeeds
    queued: Columns
    waiting_s: Column
    head_s: Column
    head_end_s: Column
    others_tokens: Column
    outstanding: Column
    decodes: Column
    decode_step_s: Column
    learned: Corrections
    hands_over: Column
    last_chosen: Column


_QUEUED = slice(SPEED_ROWS, SPEED_ROWS + 3)
_ACCOUNT = slice(_QUEUED.stop, _QUEUED.stop + 7)
_LEARNED = slice(_ACCOUNT.stop, _ACCOUNT.stop + 3)
_WIDTH = _LEARNED.stop + 2


class Row(Protocol):
    """Owner of a row; writes its figures before they are read."""

    def write_row(self) -> None: ...


class NodeTable:
    """Rows of figures; a row belongs to one record until the row is freed.

    Changes between two reads are written once, before the second read; ``note`` announces a change.
    """

    def __init__(self) -> None:
        self._values = np.zeros((_WIDTH, _GROWTH))
        self._free = list(range(_GROWTH - 1, -1, -1))
        self._changed: dict[Row, None] = {}

    def take_row(self) -> int:
        """Return a free row of zeros."""
        if not self._free:
            size = self._values.shape[1]
            self._values = np.hstack((self._values, np.zeros((_WIDTH, size))))
            self._free = list(range(2 * size - 1, size - 1, -1))
        return self._free.pop()

    def free_row(self, row: int, owner: Row) -> None:
        """Free a row."""
        self._changed.pop(owner, None)
        self._values[:, row] = 0.0
        self._free.append(row)

    def note(self, owner: Row) -> None:
        """Mark the owner's row as out of date."""
        self._changed[owner] = None

    def put(self, row: int, figures: Sequence[float]) -> None:
        """Set all figures of a row, in the order of ``Figures``."""
        self._values[:, row] = figures

    def figures(self, rows: NDArray[np.intp]) -> Figures:
        """Copy the figures of the given rows, in this order."""
        self._write_changed()
        some = self._values[:, rows]
        columns = (*some[_ACCOUNT], Corrections(*some[_LEARNED]), *some[_LEARNED.stop :])
        return Figures(speeds_of(some), some[_QUEUED], *columns)

    def queued_bytes(self) -> Column:
        """Sum the bytes queued from L2, L3 and L4 over all nodes."""
        self._write_changed()
        total: Column = self._values[_QUEUED].sum(axis=1)
        return total

    def _write_changed(self) -> None:
        changed, self._changed = self._changed, {}
        for owner in changed:
            owner.write_row()
