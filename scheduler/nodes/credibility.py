"""How far what was learned of one node is believed: as far as its answers support it, no further.

Pure; a part of scheduler/choosing/choice.py. In a batch a node is judged by about seven answers
that shared a few steps. A node that got unlucky would get no calls, so nothing would ever be
learned of it again. So what was learned is drawn towards the typical node, by its own doubt
(positive-part shrinkage, James and Stein 1961).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tierkv.costing.service_time import StepCost
from tierkv.scheduler.cost import COMPARED_TOKENS, UNLIKE_OTHERS
from tierkv.scheduler.nodes.node_table import Column, Columns, Figures

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
