"""Figures of all nodes as columns of numbers, and how far what was learned of one node is believed.

A part of the fleet: each NodeRecord keeps its row up to date, scheduler/choosing/ reads columns;
with a hundred nodes that is fifty times faster than a loop over records. In a batch a node is
judged by about seven answers that shared a few steps, and an unlucky node would get no more calls
and could not be judged again. So each figure is drawn towards the typical node by its own
doubt (positive-part shrinkage, James and Stein 1961).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from tierkv.costing.service_time import StepCost
from tierkv.scheduler.cost import COMPARED_TOKENS, UNLIKE_OTHERS, Rates

Column = NDArray[np.float64]
"""One number per node."""
Columns = NDArray[np.float64]
"""Some rows of such numbers."""
_GROWTH = 64


class Figures(NamedTuple):
    """What is known of some nodes, one number each; seconds, bytes and tokens.

    Attributes:
        step_s, token_s, pair_s, sequence_s: cost of computing (``cost``).
        step_tokens: of a step at most.
        byte_s: [3, nodes] seconds per byte, layer by layer, of what is in L2, L3 and L4; the last
            is read like L3 once it was brought up.
        latency_s: [3, nodes] seconds of each layer's read, however short.
        rise_byte_s, rise_latency_s: the same of bringing up what is in L4, before it is read.
        queued: [3, nodes] bytes that are being loaded, or will be, from L2, L3 and L4.
        waiting_s: seconds of computing for requests of ours, as predicted when they were sent.
        head_s, head_end_s: of these, the request it is at, and when that should be answered.
        others_tokens: tokens it has to compute for others.
        outstanding: requests it has.
        decodes, decode_step_s: requests it decodes, and what a step of that takes.
        overhead_s, factor: what was learned from predictions that were wrong.
        doubt: relative standard error of what these correct; infinite while nothing was learned.
        hands_over: 1.0 for a node that only prefills.
        last_chosen: serial number of the last request sent there.
    """

    step_s: Column
    token_s: Column
    pair_s: Column
    sequence_s: Column
    step_tokens: Column
    byte_s: Columns
    latency_s: Columns
    rise_byte_s: Column
    rise_latency_s: Column
    queued: Columns
    waiting_s: Column
    head_s: Column
    head_end_s: Column
    others_tokens: Column
    outstanding: Column
    decodes: Column
    decode_step_s: Column
    overhead_s: Column
    factor: Column
    doubt: Column
    hands_over: Column
    last_chosen: Column

    @property
    def cost(self) -> Any:
        """What computing costs; a StepCost of columns."""
        figures: Any = self
        return StepCost(figures.token_s, figures.pair_s, figures.step_s, figures.sequence_s)


_ROWS_OF = {"byte_s": 3, "latency_s": 3, "queued": 3}
AT: dict[str, int] = {}
"""In which row of the table each figure is, or begins."""
WIDTH = 0
for _name in Figures._fields:
    AT[_name] = WIDTH
    WIDTH += _ROWS_OF.get(_name, 1)
_SLICES = [slice(at, at + 3) if name in _ROWS_OF else at for name, at in AT.items()]


class Row(Protocol):
    """Whoever has a row: writes its figures down when somebody is going to read them."""

    def write_row(self) -> None: ...


class NodeTable:
    """Rows of figures; a row belongs to one record until it is freed.

    What changes between two looks is written once, before the second: ``note`` says so.
    """

    def __init__(self) -> None:
        self._values = np.zeros((WIDTH, _GROWTH))
        self._free = list(range(_GROWTH - 1, -1, -1))
        self._changed: dict[Row, None] = {}

    def take_row(self) -> int:
        """Hand out a row of zeros."""
        if not self._free:
            size = self._values.shape[1]
            self._values = np.hstack((self._values, np.zeros((WIDTH, size))))
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
        return Figures(*[some[at] for at in _SLICES])

    def queued_bytes(self) -> Column:
        """Sum the bytes queued from L2, L3 and L4 over all nodes."""
        self._write_changed()
        total: Column = self._values[AT["queued"] : AT["queued"] + 3].sum(axis=1)
        return total

    def _write_changed(self) -> None:
        changed, self._changed = self._changed, {}
        for owner in changed:
            owner.write_row()


def rate_figures(rates: Rates) -> tuple[float, ...]:
    """Return the figures up to ``queued``."""
    l2_s, l3_s = 1.0 / rates.l2_bytes_per_s, 1.0 / rates.l3_bytes_per_s
    return (
        *(rates.step_s, 1.0 / rates.prefill_tokens_per_s, rates.pair_s, rates.sequence_s),
        rates.step_tokens,
        *(l2_s, l3_s, l3_s),
        *(rates.l2_latency_s, rates.l3_latency_s, rates.l3_latency_s),
        *(1.0 / rates.l4_bytes_per_s, rates.l4_latency_s),
    )


def figures_of(rates: Rates) -> Figures:
    """Make the figures of one idle node about which nothing else is known."""
    column = [*rate_figures(rates), *[0.0] * (WIDTH - AT["queued"])]
    column[AT["factor"]], column[AT["doubt"]] = 1.0, math.inf
    values = np.array(column)[:, None]
    return Figures(*[values[at] for at in _SLICES])


_ALIKE = 1.25

DOUBTED = 2.0
"""A difference of less than so many standard errors is none."""


def typical(values: NDArray[Any]) -> Any:
    """Return the middle value of each row, as a column that goes with any node's; O(n log n)."""
    ordered = np.sort(values, axis=-1)
    return ordered[..., values.shape[-1] // 2, None]


class TypicalRates(NamedTuple):
    """How fast a typical node of some computes and loads; see ``node_table.Figures``."""

    cost: StepCost
    byte_s: Columns
    latency_s: Columns
    rise_byte_s: Column
    rise_latency_s: Column


def typical_rates(figures: Figures) -> TypicalRates:
    """Take the middle of each figure."""
    columns = (figures.token_s, figures.pair_s, figures.step_s, figures.sequence_s)
    return TypicalRates(
        StepCost(*[float(typical(column)[0]) for column in columns]),
        typical(figures.byte_s),
        typical(figures.latency_s),
        typical(figures.rise_byte_s),
        typical(figures.rise_latency_s),
    )


def credible(figures: Figures, predicted_s: Column) -> Figures:
    """Draw the corrections of some nodes towards the typical one, as far as they are doubted.

    Args:
        figures: of the nodes; ``doubt`` is the relative standard error of a corrected prediction,
            infinite where no answer was measured.
        predicted_s: what is to be corrected, at each of them.

    Returns:
        the figures, with other ``factor`` and ``overhead_s``.
    """
    factor, overhead_s = figures.factor, figures.overhead_s
    known = np.isfinite(figures.doubt)
    if factor.size == 1 or not known.any():
        return figures
    usual_factor, usual_overhead_s = typical(factor[known]), typical(overhead_s[known])
    usual_s = usual_factor * predicted_s + usual_overhead_s
    apart = np.log((factor * predicted_s + overhead_s) / usual_s)
    noise = DOUBTED * np.where(known, figures.doubt, np.inf)
    share = 1.0 - np.minimum(noise / np.maximum(np.abs(apart), 1e-9), 1.0) ** 2
    return figures._replace(
        factor=usual_factor * (factor / usual_factor) ** share,
        overhead_s=usual_overhead_s * (overhead_s / usual_overhead_s) ** share,
    )


def speeds(figures: Figures) -> Column:
    """How fast some nodes are beside the typical one, as their answers tell; a fifth is nothing.

    What a node measured when it started says little on a machine where others started, too.
    """
    known = np.isfinite(figures.doubt)
    if not known.any():
        return np.ones(known.shape)
    own_s = figures.cost.causal_seconds(0, COMPARED_TOKENS)
    figures = credible(figures, own_s)
    seconds = figures.factor * own_s + figures.overhead_s
    speed = np.clip(typical(seconds[known]) / seconds, 1.0 / UNLIKE_OTHERS, UNLIKE_OTHERS)
    alike: Column = np.where(known & (np.abs(np.log(speed)) > np.log(_ALIKE)), speed, 1.0)
    return alike
