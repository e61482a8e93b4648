"""Figures of all nodes as columns of numbers.

A part of the fleet: each NodeRecord keeps its row up to date, scheduler/choosing/ reads columns;
with a hundred nodes that is fifty times faster than a loop over records. What the figures cost is
computed in costing/.
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
    """What is known of some nodes, one number each; seconds, bytes and tokens.

    Attributes:
        speeds: how fast they compute and load.
        queued: [3, nodes] bytes that are being loaded, or will be, from L2, L3 and L4.
        waiting_s: seconds of computing for requests of ours, as predicted when they were sent.
        head_s, head_end_s: of these, the request it is at, and when that should be answered.
        others_tokens: tokens it has to compute for others.
        outstanding: requests it has.
        decodes, decode_step_s: requests it decodes, and what a step of that takes.
        learned: from predictions that were wrong.
        hands_over: 1.0 for a node that only prefills.
        last_chosen: serial number of the last request sent there.
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
    """Whoever has a row: writes its figures down when somebody is going to read them."""

    def write_row(self) -> None: ...


class NodeTable:
    """Rows of figures; a row belongs to one record until it is freed.

    What changes between two looks is written once, before the second: ``note`` says so.
    """

    def __init__(self) -> None:
        self._values = np.zeros((_WIDTH, _GROWTH))
        self._free = list(range(_GROWTH - 1, -1, -1))
        self._changed: dict[Row, None] = {}

    def take_row(self) -> int:
        """Hand out a row of zeros."""
        if not self._free:
            size = self._values.shape[1]
            self._values = np.hstack((self._values, np.zeros((_WIDTH, size))))
            self._free = list(range(2 * size - 1, size - 1, -1))
        return self._free.pop()

    def free_row(self, row: int, owner: Row) -> None:
        """Take a row back."""
        self._changed.pop(owner, None)
        self._values[:, row] = 0.0
        self._free.append(row)

    def note(self, owner: Row) -> None:
        """The owner's figures are no longer what its row says."""
        self._changed[owner] = None

    def put(self, row: int, figures: Sequence[float]) -> None:
        """Set all figures of a row, in the order of ``Figures``."""
        self._values[:, row] = figures

    def figures(self, rows: NDArray[np.intp]) -> Figures:
        """Copy the figures of some rows, in their order."""
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
