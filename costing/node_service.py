"""Time to serve a prompt at each of several nodes: one pass over columns of figures.

```
blocks    0      ends[0]      ends[1]      ends[2]      ends[3]        tokens
          |  L1  |     L2     |     L3     |     L4     |   computed   |
plan      ------------------->|                         load nothing, or to the end of a tier,
          -------------->|                              or as much as hides behind computing

block of a tier   layers reads, of stored bytes / layers each; blocks of L4 are promoted before
load              the tiers one after the other, started when the path to each tier is free
end               costing/service_time.py over the first forward pass; later passes follow
```

The sums are the same by which a node decides how much to load (costing/load_controller.py),
evaluated for all nodes at once. A node tries every depth that can be best; this module tries two
depths per tier. Rates come from heartbeats (costing/node_cost.py), bytes from the model's layout.
Pure; called by scheduler/choosing/choice.py for routing and by simulator/nodes/node.py for
a simulated node's decision.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tierkv.costing.correction import Column, typical
from tierkv.costing.node_cost import CachedPrefix, Rates, ServiceCost
from tierkv.costing.service_time import InSteps, Line, PipelineEnds, StepCost, pipeline_ends
from tierkv.kvcore.layout import BlockLayout

Grid = NDArray[np.float64]
"""A row per alternative, a column per node."""
Columns = NDArray[np.float64]
"""Several rows of figures, a column per node."""


class NodeSpeeds(NamedTuple):
    """Computing and loading speed of several nodes: Rates as columns.

    Attributes:
        cost: cost of computing.
        step_tokens: maximum number of tokens in a forward pass.
        reads: [3, nodes] read of a layer from L2, L3 and L4. A promoted block of L4 is read like
            L3.
        rise: promotion of blocks from L4, once before the read.
    """

    cost: StepCost
    step_tokens: Column
    reads: Line
    rise: Line


SPEED_ROWS = 13
"""Number of rows that describe the speed of a node."""


def speed_row(rates: Rates) -> tuple[float, ...]:
    """Return a node's rates as a tuple, in the order that ``speeds_of`` reads."""
    cost, l2, l3, l4 = rates.cost, rates.l2, rates.l3, rates.l4
    return (
        *(cost.per_token_s, cost.per_pair_s, cost.per_step_s, cost.per_sequence_s),
        rates.step_tokens,
        *(l2.latency_s, l3.latency_s, l3.latency_s),
        *(l2.bytes_per_s, l3.bytes_per_s, l3.bytes_per_s),
        *(l4.latency_s, l4.bytes_per_s),
    )


def speeds_of(rows: Any) -> NodeSpeeds:
    """Build speeds from columns of rates; [SPEED_ROWS and more, nodes]."""
    cost = StepCost(rows[0], rows[1], rows[2], rows[3])
    return NodeSpeeds(cost, rows[4], Line(rows[5:8], rows[8:11]), Line(rows[11], rows[12]))


def lone_speeds(rates: Rates) -> NodeSpeeds:
    """Return the speeds of a single node as columns."""
    return speeds_of(np.array(speed_row(rates))[:, None])


def typical_speeds(speeds: NodeSpeeds) -> NodeSpeeds:
    """Return the middle value of each figure; ``step_tokens`` stays each node's own."""
    cost, reads, rise = speeds.cost, speeds.reads, speeds.rise
    columns: Any = (cost.per_token_s, cost.per_pair_s, cost.per_step_s, cost.per_sequence_s)
    return NodeSpeeds(
        StepCost(*[float(typical(column)[0]) for column in columns]),
        speeds.step_tokens,
        _typical_line(reads),
        _typical_line(rise),
    )


def _typical_line(line: Any) -> Line:
    return Line(typical(line.latency_s), 1.0 / typical(1.0 / line.bytes_per_s))


class PathSeconds(NamedTuple):
    """[3, nodes] use of each path and seconds to read; seconds to promote blocks of L4."""

    used: Any
    read_s: Any
    rise_s: Any


class BlockPaths(NamedTuple):
    """Cost of moving blocks: the sizes of the lines are blocks, the reads are the tiers used."""

    reads: Line
    rise: Line

    def seconds(self, blocks: Any) -> PathSeconds:
        """Return the seconds to load [3, nodes] blocks of L2, L3 and L4."""
        # Turn every positive count into 1.0: cheaper than a comparison and a conversion.
        used = np.minimum(blocks, 1.0)
        rise_s = self.rise.seconds(blocks[2], reads=used[2]) if blocks[2].any() else 0.0
        return PathSeconds(used, self.reads.seconds(blocks, reads=used), rise_s)


def block_paths(speeds: NodeSpeeds, layout: BlockLayout) -> BlockPaths:
    """Convert a node's paths from bytes to blocks of a model."""
    reads, rise, size = speeds.reads, speeds.rise, layout.stored_bytes
    return BlockPaths(
        Line(layout.layers * reads.latency_s, reads.bytes_per_s / size),
        Line(rise.latency_s, rise.bytes_per_s / size),
    )


@dataclass(frozen=True, slots=True)
class Waits:
    """Start of computing and loading at each node, in seconds from now.

    Attributes:
        compute_s: the prompt's turn to be computed.
        paths_s: [3, nodes] the prompt's turn on the paths to L2, L3 and L4.
    """

    compute_s: Column
    paths_s: Grid


@dataclass(frozen=True, slots=True)
class Service:
    """The best plan at each node.

    Attributes:
        depth: blocks reused.
        reach: reusable blocks in L1, up to L2, up to L3 and up to L4; ascending.
        load_s: seconds to load the blocks outside L1.
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
        return by_tier(self.depth[node], self.reach[:3, node].tolist())


def by_tier(depth: float, ends: Sequence[float]) -> tuple[int, int, int, int]:
    """Split reused blocks by tier; ``ends`` are reusable blocks in L1, up to L2, up to L3."""
    blocks = int(depth)
    l1, l2, l3 = (min(blocks, int(end)) for end in ends)
    return l1, l2 - l1, l3 - l2, blocks - l3


def serve_one(
    prompt_tokens: int,
    prefix: CachedPrefix,
    speeds: NodeSpeeds,
    layout: BlockLayout,
    *,
    compute_s: float = 0.0,
    paths_s: Sequence[float] = (0.0, 0.0, 0.0),
) -> ServiceCost:
    """Find the fastest plan at one node of ``lone_speeds``; see ``serve`` and ``Waits``."""
    reach = np.array(
        [[prefix.l1_blocks], [prefix.l2_blocks], [prefix.l3_blocks], [prefix.l4_blocks]]
    )
    waits = Waits(np.array([compute_s]), np.array(paths_s)[:, None])
    best = serve(prompt_tokens, reach, speeds, layout, waits)
    return ServiceCost(
        int(best.depth[0]),
        float(best.load_s[0]),
        float(best.prefill_s[0]),
        float(best.ended_s[0]),
        best.tier_blocks(0),
    )


def serve(
    prompt_tokens: int, reach: NDArray[Any], speeds: NodeSpeeds, layout: BlockLayout, waits: Waits
) -> Service:
    """Find the fastest plan at each node.

    The candidates are: load nothing; load all blocks of each tier in reach; load only the part of a
    tier that hides behind computing the rest. A path that is slower than computing is not used. The
    last prompt token is always computed, because its logits are needed.

    Args:
        prompt_tokens: tokens of the prompt, at least 1.
        reach: [4, nodes] reusable blocks of each node in L1, up to L2, up to L3 and up to L4.
        speeds: the speeds of the nodes.
        layout: bytes per block and tokens per block.
        waits: start of computing and loading.
    """
    plans = _Plans(prompt_tokens, _ends(prompt_tokens, reach, layout), speeds, layout, waits)
    if not plans.can_load:
        return plans.best([plans.nothing_loaded()])
    whole = plans.whole_tiers()
    shares = _hiding_shares(whole)
    if not ((shares > 0.0) & (shares < 1.0)).any():
        return plans.best([whole])
    return plans.best([whole, plans.parts(whole, shares)])


def _ends(prompt_tokens: int, reach: NDArray[Any], layout: BlockLayout) -> Grid:
    """Return the blocks to reuse, cumulative over tiers: ascending, less than the prompt."""
    ends = np.empty(reach.shape)
    np.minimum(reach, (prompt_tokens - 1) // layout.block_tokens, out=ends)
    for tier in (1, 2, 3):
        np.maximum(ends[tier], ends[tier - 1], out=ends[tier])
    return ends


@dataclass(frozen=True, slots=True)
class _Evaluated:
    """Plans and their times.

    Attributes:
        depth: blocks reused.
        begins_s: when all paths that the plan uses are free.
        rise_s: seconds to promote blocks of L4, before any layer is read.
        load_s: seconds to read all layers.
        compute_s: seconds to compute the rest.
        ends: the three ends of the pipeline.
    """

    depth: Grid
    begins_s: Grid
    rise_s: Any
    load_s: Grid
    compute_s: Grid
    ends: PipelineEnds


class _Plans:
    """Evaluates plans for one prompt at all nodes.

    Attributes:
        ends: reusable blocks in L1, up to L2, up to L3 and up to L4.
        can_load: True if any node could reuse blocks outside its L1.
    """

    def __init__(
        self, tokens: int, ends: Grid, speeds: NodeSpeeds, layout: BlockLayout, waits: Waits
    ) -> None:
        self.ends = ends
        self._segments = ends[1:] - ends[:-1]
        self.can_load = bool(self._segments.any())
        self._tokens = tokens
        self._speeds = speeds
        self._layout = layout
        self._waits = waits
        self._in_one_step = tokens <= float(speeds.step_tokens.min())
        if self.can_load:
            self._paths = block_paths(speeds, layout)

    def best(self, tried: Sequence[_Evaluated]) -> Service:
        """Return each node's plan with the earliest end; among equals the plan that loads less."""
        ended_s = _stacked([x.ends.latest(np.maximum) for x in tried])
        at = (ended_s.argmin(axis=0), np.arange(ended_s.shape[1]))
        depth, load_s, compute_s = (
            _stacked(parts)[at]
            for parts in (
                [x.depth for x in tried],
                [x.load_s + x.rise_s for x in tried],
                [x.compute_s for x in tried],
            )
        )
        return Service(depth, self.ends, load_s, compute_s, ended_s[at])

    def nothing_loaded(self) -> _Evaluated:
        """Evaluate the plan that uses only the blocks in L1."""
        depth = self.ends[:1]
        nothing = np.zeros(depth.shape)
        return self._evaluated(depth, nothing, 0.0, nothing)

    def whole_tiers(self) -> _Evaluated:
        """Evaluate four plans: load nothing, all of L2, also all of L3, and also all of L4."""
        load_s, begins_s = np.zeros(self.ends.shape), np.zeros(self.ends.shape)
        paths = self._paths.seconds(self._segments)
        np.cumsum(paths.read_s, axis=0, out=load_s[1:])
        np.maximum.accumulate(paths.used * self._waits.paths_s, axis=0, out=begins_s[1:])
        rise_s = self._in_last_row(paths.rise_s, self.ends.shape)
        return self._evaluated(self.ends, begins_s, rise_s, load_s)

    def parts(self, whole: _Evaluated, shares: Grid) -> _Evaluated:
        """Evaluate plans that load all tiers before a tier, and a share of the tier."""
        blocks = np.floor(self._segments * shares)
        paths = self._paths.seconds(blocks)
        begins_s = np.maximum(whole.begins_s[:-1], paths.used * self._waits.paths_s)
        rise_s = self._in_last_row(paths.rise_s, blocks.shape)
        load_s = whole.load_s[:-1] + paths.read_s
        return self._evaluated(self.ends[:-1] + blocks, begins_s, rise_s, load_s)

    @staticmethod
    def _in_last_row(seconds: Any, shape: tuple[int, ...]) -> Any:
        """Return the promotion seconds in the row of L4; only plans that reach into L4 promote."""
        if isinstance(seconds, float):
            return seconds
        rows = np.zeros(shape)
        rows[-1] = seconds
        return rows

    def _evaluated(self, depth: Grid, begins_s: Grid, rise_s: Any, load_s: Grid) -> _Evaluated:
        computing: Any = self._computing(depth)
        load: Any = load_s
        compute_from_s: Any = self._waits.compute_s
        ends = pipeline_ends(
            load,
            computing.first_s,
            self._layout.layers,
            load_from_s=begins_s + rise_s,
            compute_from_s=compute_from_s,
        )
        if self._in_one_step:
            return _Evaluated(depth, begins_s, rise_s, load_s, computing.first_s, ends)
        ends = PipelineEnds(*[one + computing.later_s for one in ends])
        return _Evaluated(depth, begins_s, rise_s, load_s, sum(computing), ends)

    def _computing(self, depth: Grid) -> InSteps:
        at: Any = depth * self._layout.block_tokens
        cost = self._speeds.cost
        if self._in_one_step:  # The usual case, at half the cost.
            return InSteps(cost.causal_seconds(at, self._tokens - at), 0.0)
        step_tokens: Any = self._speeds.step_tokens
        return cost.in_steps(at, self._tokens - at, step_tokens, least=np.minimum)


def _stacked(parts: Sequence[Grid]) -> Grid:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _hiding_shares(whole: _Evaluated) -> Grid:
    """Return the share of L2, L3 and L4 whose load just hides behind the computation.

    With a larger share the delay of the last layer exceeds the saved computing. The share is found
    as if all times were linear between the ends of a tier; the caller evaluates the resulting plan
    exactly. Outside (0, 1) if one end is best.
    """
    ends: Any = whole.ends
    busy_s, first_s, last_s = ends
    shares = []
    for lead in (busy_s - last_s, first_s - last_s):
        fall = lead[:-1] - lead[1:]
        shares.append(lead[:-1] / np.maximum(fall, 1e-12))
    found: Grid = np.minimum(np.maximum(np.maximum(shares[0], shares[1]), 0.0), 1.0)
    return found


def taken_s(tokens: int, service: Service, usual: NodeSpeeds, layout: BlockLayout) -> Column:
    """Return the seconds that the plan at each node takes from other requests, for equal nodes.

    Only differences between plans count: tokens to compute and bytes to load. The measured speed of
    each node does not count, because the length of a batch's queue would multiply the noise of the
    measurement until noise decides.

    Args:
        tokens: tokens of the prompt.
        service: the plans.
        usual: speeds of a typical node.
        layout: bytes per block and tokens per block.
    """
    cached: Any = service.depth * layout.block_tokens
    step_tokens: Any = usual.step_tokens
    seconds: Column = usual.cost.own_passes_s(cached, tokens - cached, step_tokens, most=np.maximum)
    if service.load_s.any():
        ends = np.minimum(service.reach, service.depth)
        paths = block_paths(usual, layout).seconds(ends[1:] - ends[:-1])
        seconds = np.maximum(seconds, paths.read_s.sum(axis=0) + paths.rise_s)
    return seconds
