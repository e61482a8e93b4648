"""Figures of all nodes as columns of numbers, so that a prompt is weighed for all of them at once.

A part of the fleet: each NodeRecord keeps its row up to date. scheduler/service.py reads columns;
with a hundred nodes that is fifty times faster than a loop over records.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from scheduler.cost import Rates

Column = NDArray[np.float64]
"""One number per node."""
_GROWTH = 64


class Figures(NamedTuple):
    """What is known of some nodes, one number each; seconds, bytes and tokens.

    Attributes:
        step_s, token_s, pair_s, step_tokens: cost of computing, and tokens of a step at most.
        l2_byte_s, l3_byte_s, l4_byte_s: seconds per byte of each path.
        l2_latency_s, l3_latency_s, l4_latency_s: seconds of a read, however short.
        l2_queued, l3_queued, l4_queued: bytes that are being loaded, or will be.
        waiting_s: seconds of computing for requests of ours, as predicted when they were sent.
        head_s, head_end_s: of these, the request it is at, and when that should be answered.
        others_tokens: tokens it has to compute for others.
        outstanding: requests it has.
        decodes, decode_step_s: requests it decodes, and what a step of that takes.
        overhead_s, factor: what was learned from predictions that were wrong.
        hands_over: 1.0 for a node that only prefills.
        last_chosen: serial number of the last request sent there.
    """

    step_s: Column
    token_s: Column
    pair_s: Column
    step_tokens: Column
    l2_byte_s: Column
    l3_byte_s: Column
    l4_byte_s: Column
    l2_latency_s: Column
    l3_latency_s: Column
    l4_latency_s: Column
    l2_queued: Column
    l3_queued: Column
    l4_queued: Column
    waiting_s: Column
    head_s: Column
    head_end_s: Column
    others_tokens: Column
    outstanding: Column
    decodes: Column
    decode_step_s: Column
    overhead_s: Column
    factor: Column
    hands_over: Column
    last_chosen: Column


WIDTH = len(Figures._fields)
AT = {name: index for index, name in enumerate(Figures._fields)}


class NodeTable:
    """Rows of figures; a row belongs to one record until it is freed."""

    def __init__(self) -> None:
        self._values = np.zeros((WIDTH, _GROWTH))
        self._free = list(range(_GROWTH - 1, -1, -1))

    def take_row(self) -> int:
        """Hand out a row of zeros."""
        if not self._free:
            size = self._values.shape[1]
            self._values = np.hstack((self._values, np.zeros((WIDTH, size))))
            self._free = list(range(2 * size - 1, size - 1, -1))
        return self._free.pop()

    def free_row(self, row: int) -> None:
        """Take a row back."""
        self._values[:, row] = 0.0
        self._free.append(row)

    def put(self, row: int, column: int, value: float) -> None:
        """Set one number."""
        self._values[column, row] = value

    def put_rates(self, row: int, rates: Rates) -> None:
        """Set the first ten columns."""
        self._values[: AT["l2_queued"], row] = (
            rates.step_s,
            1.0 / rates.prefill_tokens_per_s,
            rates.pair_s,
            rates.step_tokens,
            1.0 / rates.l2_bytes_per_s,
            1.0 / rates.l3_bytes_per_s,
            1.0 / rates.l4_bytes_per_s,
            rates.l2_latency_s,
            rates.l3_latency_s,
            rates.l4_latency_s,
        )

    def put_account(self, row: int, account: Sequence[float]) -> None:
        """Set the eight columns from ``l2_queued`` to ``outstanding``."""
        self._values[AT["l2_queued"] : AT["decodes"], row] = account

    def figures(self, rows: Sequence[int]) -> Figures:
        """Copy the figures of some rows, in their order."""
        return Figures(*self._values[:, rows])

    def queued_bytes(self, tier: str) -> float:
        """Sum the bytes queued from a tier (``l3`` or ``l4``) over all nodes."""
        return float(self._values[AT[f"{tier}_queued"]].sum())


def figures_of(rates: Rates) -> Figures:
    """Make the figures of one idle node about which nothing else is known."""
    table = NodeTable()
    table.put_rates(0, rates)
    table.put(0, AT["factor"], 1.0)
    return table.figures([0])
