"""What serving a prompt takes at each of some nodes: one pass over columns of figures.

Pure; called by scheduler/choosing/choice.py for routing and by the simulator for its gate. The
formula is costing/service_time.py's, by which nodes decide, too; here it is evaluated for all nodes
at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tierkv.costing.service_time import pipeline_sums
from tierkv.kvcore.layout import BlockLayout
from tierkv.scheduler.cost import CachedPrefix, Rates, ServiceCost
from tierkv.scheduler.nodes.node_table import Column, Figures, figures_of

Grid = NDArray[np.float64]
"""One row per alternative, one column per node."""


@dataclass(frozen=True, slots=True)
class Waits:
    """When things begin at each node, in seconds from now.

    Attributes:
        compute_s: its turn to be computed.
        paths_s: [3, nodes] its turn on the paths to L2, L3 and L4.
    """

    compute_s: Column
    paths_s: Grid


_IDLE = Waits(np.zeros(1), np.zeros((3, 1)))


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
        return plans.best([plans.nothing_loaded()])
    whole = plans.whole_tiers()
    shares = _hiding_shares(whole)
    if not ((shares > 0.0) & (shares < 1.0)).any():
        return plans.best([whole])
    return plans.best([whole, plans.parts(whole, shares)])


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
        begins_s: when their path is free.
        rise_s: seconds to bring up what rests, before any layer.
        load_s: seconds to read all layers.
        compute_s: seconds to compute the rest.
        sums: the three of which the latest is the end: the node is busy until then, the first layer
            arrives late, the last one does.
    """

    depth: Grid
    begins_s: Grid
    rise_s: Any
    load_s: Grid
    compute_s: Grid
    sums: tuple[Grid, Grid, Grid]


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
        self._segments = ends[1:] - ends[:-1]
        self.can_load = bool(self._segments.any())
        self._tokens = tokens
        self._figures = figures
        self._layout = layout
        self._waits = waits
        self._cost = figures.cost
        self._in_one_step = tokens <= float(figures.step_tokens.min())
        if self.can_load:
            self._block_bytes = layout.stored_bytes
            self._block_s = self._block_bytes * figures.byte_s
            self._latency_s = layout.layers * figures.latency_s
            self._in_disks = bool(self._segments[2].any())

    def best(self, tried: Sequence[_Evaluated]) -> Service:
        """Take the plan of each node that ends first; among equals the one that loads less."""
        ended = [np.maximum(np.maximum(x.sums[0], x.sums[1]), x.sums[2]) for x in tried]
        ended_s = ended[0] if len(ended) == 1 else np.concatenate(ended)
        at = (ended_s.argmin(axis=0), np.arange(ended_s.shape[1]))
        depth, load_s, compute_s = (
            (parts[0] if len(parts) == 1 else np.concatenate(parts))[at]
            for parts in (
                [x.depth for x in tried],
                [x.load_s + x.rise_s for x in tried],
                [x.compute_s for x in tried],
            )
        )
        return Service(depth, self.ends, load_s, compute_s, ended_s[at])

    def nothing_loaded(self) -> _Evaluated:
        """Plan to use what is in L1."""
        depth = self.ends[:1]
        nothing = np.zeros(depth.shape)
        return self._evaluated(depth, nothing, 0.0, nothing)

    def whole_tiers(self) -> _Evaluated:
        """Plan to load nothing, all of L2, of L3 too, and of L4 too."""
        # Counts of blocks become 1.0 for any: cheaper than a comparison and its conversion.
        used = np.minimum(self._segments, 1.0)
        load_s, begins_s = np.zeros(self.ends.shape), np.zeros(self.ends.shape)
        read_s = self._segments * self._block_s + used * self._latency_s
        np.cumsum(read_s, axis=0, out=load_s[1:])
        np.maximum.accumulate(used * self._waits.paths_s, axis=0, out=begins_s[1:])
        rise_s: Any = 0.0
        if self._in_disks:
            rise_s = np.zeros(self.ends.shape)
            rise_s[3] = self._rise_s(self._segments[2], used[2])
        return self._evaluated(self.ends, begins_s, rise_s, load_s)

    def parts(self, whole: _Evaluated, shares: Grid) -> _Evaluated:
        """Plan to load the tiers before one, and a share of that one."""
        blocks = np.floor(self._segments * shares)
        used = np.minimum(blocks, 1.0)
        load_s = whole.load_s[:-1] + blocks * self._block_s + used * self._latency_s
        begins_s = np.maximum(whole.begins_s[:-1], used * self._waits.paths_s)
        rise_s: Any = 0.0
        if self._in_disks:
            rise_s = np.zeros(blocks.shape)
            rise_s[2] = self._rise_s(blocks[2], used[2])
        return self._evaluated(self.ends[:-1] + blocks, begins_s, rise_s, load_s)

    def _rise_s(self, blocks: Column, used: Column) -> Any:
        figures = self._figures
        return blocks * (self._block_bytes * figures.rise_byte_s) + used * figures.rise_latency_s

    def _evaluated(self, depth: Grid, begins_s: Grid, rise_s: Any, load_s: Grid) -> _Evaluated:
        first_step_s, later_s = self._compute_s(depth)
        compute_from_s: Any = self._waits.compute_s
        load: Any = load_s
        sums: Any = pipeline_sums(
            load,
            first_step_s,
            self._layout.layers,
            load_from_s=begins_s + rise_s,
            compute_from_s=compute_from_s,
        )
        compute_s = first_step_s
        if not self._in_one_step:
            sums = tuple(one + later_s for one in sums)
            compute_s = first_step_s + later_s
        return _Evaluated(depth, begins_s, rise_s, load_s, compute_s, sums)

    def _compute_s(self, depth: Grid) -> tuple[Any, Any]:
        """Seconds of the first forward pass, and of all later ones."""
        at: Any = depth * self._layout.block_tokens
        rest = self._tokens - at
        if self._in_one_step:
            return self._cost.causal_seconds(at, rest), 0.0
        step_tokens: Any = self._figures.step_tokens
        first = np.minimum(rest, step_tokens)
        later = rest - first
        later_s = self._cost.causal_seconds(at + first, later, steps=later / step_tokens)
        return self._cost.causal_seconds(at, first), later_s


def _hiding_shares(whole: _Evaluated) -> Grid:
    """How much of L2, L3 and L4 to load so that it just hides behind the computation.

    Deeper, a later last layer outweighs what is no longer computed. Found as if all were straight
    lines between a tier's ends; what such a plan takes is evaluated exactly. Not in (0, 1) where
    one end is best.
    """
    busy_s, first_s, last_s = whole.sums
    shares = []
    for lead in (busy_s - last_s, first_s - last_s):
        fall = lead[:-1] - lead[1:]
        shares.append(lead[:-1] / np.maximum(fall, 1e-12))
    return np.minimum(np.maximum(np.maximum(shares[0], shares[1]), 0.0), 1.0)
