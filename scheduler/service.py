"""What serving a prompt takes at each of some nodes: one pass over columns of figures.

Pure; called by scheduler/choice.py for routing and by the simulator for its gate. The formula is
policies/service_time.py's, by which nodes decide, too; here it is evaluated for all nodes at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcore.layout import BlockLayout
from policies.service_time import StepCost, causal_pairs, pipeline_sums
from scheduler.cost import CachedPrefix, Rates, ServiceCost
from scheduler.node_table import Column, Figures, figures_of

Grid = NDArray[np.float64]
"""One row per alternative, one column per node."""


@dataclass(frozen=True, slots=True)
class Waits:
    """When things begin at each node, in seconds from now.

    Attributes:
        compute_s: its turn to be computed.
        l2_s, l3_s, l4_s: its turn on the path to that tier.
    """

    compute_s: Column
    l2_s: Column
    l3_s: Column
    l4_s: Column


_IDLE = Waits(*(np.zeros(1) for _ in range(4)))


@dataclass(frozen=True, slots=True)
class Service:
    """The best plan at each node.

    Attributes:
        depth: blocks reused.
        reach: blocks that could be, from L1, to L2, to L3, to L4; ascending.
        load_s: seconds to load what is not in L1.
        prefill_s: seconds to compute the rest.
        ended_s: seconds from now to the first token.
    """

    depth: Column
    reach: Grid
    load_s: Column
    prefill_s: Column
    ended_s: Column

    def tier_blocks(self, node: int) -> tuple[int, int, int, int]:
        """Split the reused blocks of one node by tier."""
        depth = int(self.depth[node])
        l1, l2, l3, _ = (min(depth, int(end)) for end in self.reach[:, node].tolist())
        return l1, l2 - l1, l3 - l2, depth - l3


def service_cost(
    prompt_tokens: int, prefix: CachedPrefix, rates: Rates, layout: BlockLayout
) -> ServiceCost:
    """Find how deep into the cached prefix it pays to load at one idle node, and what that takes.

    Args:
        prompt_tokens: tokens of the prompt, at least 1.
        prefix: what the node can reuse.
        rates: how fast it is.
        layout: bytes per block and tokens per block.
    """
    reach = np.array(
        [[prefix.l1_blocks], [prefix.l2_blocks], [prefix.l3_blocks], [prefix.l4_blocks]]
    )
    best = serve(prompt_tokens, reach, figures_of(rates), layout, _IDLE)
    return ServiceCost(
        int(best.depth[0]),
        float(best.load_s[0]),
        float(best.prefill_s[0]),
        float(best.ended_s[0]),
        best.tier_blocks(0),
    )


def serve(
    prompt_tokens: int, reach: NDArray[Any], figures: Figures, layout: BlockLayout, waits: Waits
) -> Service:
    """Find the fastest plan at each node.

    Tried are: to load nothing, all of each tier the node can reach, and as much of it as just hides
    behind computing the rest. A path that is slower than computing is not used. The last prompt
    token is always computed, because its logits are wanted.

    Args:
        prompt_tokens: tokens of the prompt, at least 1.
        reach: [4, nodes] blocks each could reuse from L1, to L2, to L3 and to L4.
        figures: of the nodes.
        layout: bytes per block and tokens per block.
        waits: when things begin.
    """
    plans = _Plans(prompt_tokens, _ends(prompt_tokens, reach, layout), figures, layout, waits)
    if not plans.can_load:
        return plans.best(plans.at(plans.ends[:1]))
    whole = plans.at(plans.ends)
    shares = _hiding_shares(whole)
    if not ((shares > 0.0) & (shares < 1.0)).any():
        return plans.best(whole)
    segments = plans.ends[1:] - plans.ends[:-1]
    hidden = plans.at(np.floor(plans.ends[:-1] + shares * segments))
    return plans.best(whole.beside(hidden))


def _ends(prompt_tokens: int, reach: NDArray[Any], layout: BlockLayout) -> Grid:
    """Blocks to reuse from L1, to L2, to L3 and to L4: ascending, and not the whole prompt."""
    ends = np.empty(reach.shape)
    np.minimum(reach, (prompt_tokens - 1) // layout.block_tokens, out=ends)
    for tier in (1, 2, 3):
        np.maximum(ends[tier], ends[tier - 1], out=ends[tier])
    return ends


@dataclass(frozen=True, slots=True)
class _Evaluated:
    """Plans and what they take.

    Attributes:
        depth: blocks reused.
        load_s: seconds to load.
        compute_s: seconds to compute.
        busy_s: end if the node is busy until then.
        first_s: end if the first layer arrives late.
        last_s: end if the last one does.
    """

    depth: Grid
    load_s: Grid
    compute_s: Grid
    busy_s: Grid
    first_s: Grid
    last_s: Grid

    def beside(self, other: _Evaluated) -> _Evaluated:
        """Put other plans below these."""
        return _Evaluated(
            np.concatenate((self.depth, other.depth)),
            np.concatenate((self.load_s, other.load_s)),
            np.concatenate((self.compute_s, other.compute_s)),
            np.concatenate((self.busy_s, other.busy_s)),
            np.concatenate((self.first_s, other.first_s)),
            np.concatenate((self.last_s, other.last_s)),
        )


class _Plans:
    """Evaluates plans for one prompt at all nodes.

    Attributes:
        ends: blocks that could be reused from L1, to L2, to L3 and to L4.
        can_load: some node could reuse what is not in its L1.
    """

    def __init__(
        self, tokens: int, ends: Grid, figures: Figures, layout: BlockLayout, waits: Waits
    ) -> None:
        self.ends = ends
        self.can_load = bool((ends[3] - ends[0]).any())
        self._tokens = tokens
        self._figures = figures
        self._layout = layout
        self._waits = waits
        columns: Any = figures
        self._cost = StepCost(columns.token_s, columns.pair_s, columns.step_s)
        self._in_one_step = tokens <= float(figures.step_tokens.min())
        if self.can_load:
            block_bytes, layers = layout.stored_bytes, layout.layers
            self._l2_block_s = block_bytes * figures.l2_byte_s
            self._l3_block_s = block_bytes * figures.l3_byte_s
            self._l2_latency_s = layers * figures.l2_latency_s
            self._l3_latency_s = layers * figures.l3_latency_s
            self._in_disks = bool((ends[3] - ends[2]).any())

    def best(self, plans: _Evaluated) -> Service:
        """Take the plan of each node that ends first; among equals the one that loads less."""
        ended_s = np.maximum(np.maximum(plans.busy_s, plans.first_s), plans.last_s)
        if len(ended_s) == 1:
            depth, load_s, compute_s = plans.depth[0], plans.load_s[0], plans.compute_s[0]
            return Service(depth, self.ends, load_s, compute_s, ended_s[0])
        at = (ended_s.argmin(axis=0), np.arange(ended_s.shape[1]))
        return Service(
            plans.depth[at], self.ends, plans.load_s[at], plans.compute_s[at], ended_s[at]
        )

    def at(self, depth: Grid) -> _Evaluated:
        """Say what plans take that reuse so many blocks, at least those in L1."""
        first_step_s, later_s = self._compute_s(depth)
        begins_s, load_s, lift_s = self._load_s(depth)
        compute_from_s: Any = self._waits.compute_s
        sums: Any = pipeline_sums(
            load_s,
            first_step_s,
            self._layout.layers,
            load_from_s=begins_s + lift_s,
            compute_from_s=compute_from_s,
        )
        busy_s, first_s, last_s = (one + later_s for one in sums)
        return _Evaluated(depth, load_s + lift_s, first_step_s + later_s, busy_s, first_s, last_s)

    def _compute_s(self, depth: Grid) -> tuple[Any, Any]:
        """Seconds of the first forward pass, and of all later ones."""
        at: Any = depth * self._layout.block_tokens
        rest = self._tokens - at
        if self._in_one_step:
            return self._cost.seconds(rest, causal_pairs(at, rest)), 0.0
        first = np.minimum(rest, self._figures.step_tokens)
        later = rest - first
        steps = later / self._figures.step_tokens
        return (
            self._cost.seconds(first, causal_pairs(at, first)),
            self._cost.seconds(later, causal_pairs(at + first, later), steps=steps),
        )

    def _load_s(self, depth: Grid) -> tuple[Any, Any, Any]:
        """When loading begins, seconds to read all layers, and before that to bring up blocks."""
        if not self.can_load:
            nothing = np.zeros(depth.shape)
            return nothing, nothing, 0.0
        to_l2 = np.minimum(depth, self.ends[1])
        l2, far = to_l2 - np.minimum(depth, self.ends[0]), depth - to_l2
        # Counts of blocks become 1.0 for any: cheaper than a comparison and its conversion.
        uses_l2, uses_far = np.minimum(l2, 1.0), np.minimum(far, 1.0)
        load_s = l2 * self._l2_block_s + far * self._l3_block_s
        load_s += uses_l2 * self._l2_latency_s + uses_far * self._l3_latency_s
        begins_s = np.maximum(uses_l2 * self._waits.l2_s, uses_far * self._waits.l3_s)
        if not self._in_disks:
            return begins_s, load_s, 0.0
        l4 = depth - np.minimum(depth, self.ends[2])
        uses_l4 = np.minimum(l4, 1.0)
        lift_s = l4 * (self._layout.stored_bytes * self._figures.l4_byte_s)
        lift_s += uses_l4 * self._figures.l4_latency_s
        return np.maximum(begins_s, uses_l4 * self._waits.l4_s), load_s, lift_s


def _hiding_shares(whole: _Evaluated) -> Grid:
    """How much of L2, L3 and L4 to load so that it just hides behind the computation.

    Deeper, a later last layer outweighs what is no longer computed. Found as if all were straight
    lines between a tier's ends; what such a plan takes is evaluated exactly. Not in (0, 1) where
    one end is best.
    """
    shares = []
    for other in (whole.busy_s, whole.first_s):
        lead = other - whole.last_s
        fall = lead[:-1] - lead[1:]
        shares.append(lead[:-1] / np.maximum(fall, 1e-12))
    return np.minimum(np.maximum(np.maximum(shares[0], shares[1]), 0.0), 1.0)
