"""Measured costs of loading and computing on this node.

Loader threads and the engine add measurements, the loading controller reads them. An avoided path
gets no measurements any more; a probe measures the path now and then by a bounded read for which no
request waits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

from tierkv.compute.tiers.finder import Source
from tierkv.costing.fit import LineFit, Overlap, Rate, StepCostFit, TierMeter
from tierkv.costing.load_controller import Level, Run
from tierkv.costing.service_time import Line
from tierkv.kvcore.block import Location, Tier
from tierkv.kvcore.clock import Clock
from tierkv.kvcore.ids import HostId, NodeId
from tierkv.kvcore.layout import BlockLayout, KvCodec

ASSUMED = {Tier.L2: Line(0.0, 2e9), Tier.L3: Line(0.0, 5e8), Tier.L4: Line(0.0, 2e8)}
"""Assumed before any measurement: optimistic, to have a first load happen and be measured."""
PROBE_REFUSALS = 8
PROBE_PAUSE_S = 5.0
"""A path is probed after this many refusals, or this long, without a measurement."""
PROBE_BYTES = 1 << 20
PROBE_S = 0.05
"""Upper bounds of a probe in bytes and in predicted seconds; at least one layer of one block is
read.
"""
BLEND_ASSUMED = 1.5
"""Assumed time of a blended pass relative to steps, until a pass was measured."""
BLEND_PROBE_REFUSALS = 64
"""After this many refusals a pass is tried all the same: an avoided pass is not measured."""
_FORGET_PESSIMISM = 1.05
"""Decoding can't be probed: each refusal raises the assumed rate by this factor, until decoding is
tried.
"""


@dataclass(slots=True)
class _Path:
    """Reads of one kind, and the number of refusals since the last read."""

    fit: LineFit
    overlap: Overlap = field(default_factory=Overlap)
    refusals: int = 0
    probing: bool = False


@dataclass(frozen=True, slots=True)
class Way:
    """How a copy is reached: blocks with an equal way are loaded by the same calls."""

    node: NodeId
    tier: Tier
    read: Tier
    rests: bool


class LoadFigures:
    """Figures of one node. Each assignment is whole under the interpreter lock.

    Attributes:
        meters: tokens looked up in, and bytes loaded from, each tier; for the views.
        steps: cost of computing.
        blend_slower: measured time of a blended pass per second predicted from steps.
    """

    def __init__(
        self, layout: BlockLayout, *, host: HostId, clock: Clock, read_bytes: int = 0
    ) -> None:
        """Make figures without measurements.

        Args:
            layout: layout of the node's blocks.
            host: host whose pool nodes are L2.
            clock: dates measurements.
            read_bytes: one read brings as many layers as fit into this size, at least one.
        """
        self.meters = {tier: TierMeter() for tier in Tier}
        self.steps = StepCostFit()
        self.blend_slower = Rate(BLEND_ASSUMED)
        self._blend_refusals = 0
        self._chunk_refusals = 0
        self._layout = layout
        self._host = host
        self._read_bytes = read_bytes
        self._clock = clock
        self._reads = {tier: _Path(LineFit(reads_per_load=layout.layers)) for tier in Tier}
        self._promotions = _Path(LineFit())
        self._decodes: dict[KvCodec, Rate] = {}

    def blended(
        self, expected_s: float, seconds: float, *, scale: float = 1.0, to_the_end: bool = False
    ) -> None:
        """Learn from the duration of a blended pass.

        A pass never costs less than the same tokens in steps. A shorter pass shows that steps got
        faster while only passes ran: without a measured step, passes would be chosen for ever.

        Args:
            expected_s: predicted duration of the pass, from the cost of steps.
            seconds: measured duration.
            scale: ``steps.scale`` at the time of the prediction.
            to_the_end: True if ``seconds`` include the computing itself, not only its launch.
        """
        self.blend_slower.add(seconds, expected_s * self.steps.scale / scale)
        if self.blend_slower.value < 1.0:
            if to_the_end:
                self.steps.rescale(self.blend_slower.value)
            self.blend_slower.value = 1.0

    def blend_refused(self) -> bool:
        """Count a pass that was not worth its time; True: try this pass all the same.

        The trial measures blending. One pass at a time: a statement's calls are decided together,
        before any call ends.
        """
        self._blend_refusals += 1
        return self._blend_refusals % BLEND_PROBE_REFUSALS == 0

    def chunks_refused(self) -> bool:
        """Count a prompt whose missing chunks are not worth computing; True: compute them once.

        Passes are tried only with chunks, and chunks are computed only if passes are worth it.
        """
        self._chunk_refusals += 1
        return self._chunk_refusals % BLEND_PROBE_REFUSALS == 0

    def read(self, tier: Tier, size_bytes: int, seconds: float, *, layers: int = 1) -> None:
        """Record a read of ``layers`` layers of several blocks."""
        self.meters[tier].read(size_bytes, seconds)
        whole = layers == self._layout.layers
        self._learn(self._reads[tier], size_bytes, seconds, whole=whole)

    def lost(self, tier: Tier, size_bytes: int, seconds: float) -> None:
        """Record the duration of a failed read."""
        self._learn(self._reads[tier], size_bytes, seconds, whole=True, certain=True)

    def probed(self, source: Source, size_bytes: int, seconds: float) -> None:
        """Record the measurement of a probe of a copy's path."""
        self._learn(self._path(source), size_bytes, seconds, whole=True, certain=True)

    def gave_up(
        self, sources: Sequence[tuple[Source, ...]], seconds: float, *, layers_ready: int
    ) -> None:
        """Record an abandoned load: ``layers_ready`` layers arrived in ``seconds``."""
        ways: dict[int, tuple[_Path, int]] = {}
        for copies in sources:
            if copies:
                path, size = self._path(copies[0]), self._read_size(copies[0])
                ways[id(path)] = (path, ways.get(id(path), (path, 0))[1] + size)
        for path, size in ways.values():
            whole = path is self._promotions
            together = 1 if whole else self.layers_together(size)
            read_s = seconds / (1 + layers_ready // together)
            self._learn(path, size * together, read_s, whole=True, certain=True)

    def layers_together(self, layer_bytes: int) -> int:
        """Return how many layers one read brings, given the bytes of a layer over all blocks."""
        return min(max(1, self._read_bytes // max(1, layer_bytes)), self._layout.layers)

    def _read_size(self, source: Source) -> int:
        """Return the bytes moved by one read of a block: all of a resting block, else one layer."""
        if source.location is None:
            return self._layout.stored_bytes
        return self.layer_bytes(source.location)

    def stored_bytes(self, source: Source) -> int:
        """Return the stored size of a copy of a block."""
        return self._layout.stored_bytes if source.location is None else source.location.length

    def promoted(self, size_bytes: int, seconds: float) -> None:
        """Record a transfer of blocks from a node's disk into the node's memory."""
        self.meters[Tier.L4].read(size_bytes, seconds)
        self._learn(self._promotions, size_bytes, seconds)

    def decoded(self, codec: KvCodec, size_bytes: int, seconds: float) -> None:
        """Record that stored bytes were decoded, or copied to the pages."""
        self._decodes.setdefault(codec, Rate()).add(size_bytes, seconds)

    def _learn(
        self,
        path: _Path,
        size_bytes: int,
        seconds: float,
        *,
        whole: bool = False,
        certain: bool = False,
    ) -> None:
        now = self._clock.now()
        path.fit.add(size_bytes, seconds, now=now, whole=whole, certain=certain)
        path.overlap.add(seconds, ended_s=now)
        path.refusals = 0

    def line(self, tier: Tier) -> Line:
        """Return the cost of one read of layers of several blocks."""
        return self._reads[tier].fit.line or ASSUMED[tier]

    def path(self, tier: Tier) -> Line | None:
        """Return the cost of loading from a tier, however many loads share the path.

        Decoding of the layout's own codec is included; None until measured.
        """
        path = self._promotions if tier is Tier.L4 else self._reads[tier]
        line = path.fit.line
        if line is None:
            return None
        per_byte_s = 1 / (line.bytes_per_s * path.overlap.mean)
        decode = self._decodes.get(self._layout.codec)
        if tier is not Tier.L4 and decode is not None and decode.value:
            per_byte_s += 1 / decode.value
        return Line(line.latency_s, 1 / per_byte_s)

    def level(self, codec: KvCodec, sources: Sequence[tuple[Source, ...]]) -> Level:
        """Describe the stored form of blocks, by the lengths of their copies."""
        sizes = [self.layer_bytes(at) for copies in sources if (at := copies[0].location)]
        size = sum(sizes) / len(sizes) if sizes else self._layout.stored_layer_bytes
        rate = self._decodes.get(codec)
        decode = rate.value if rate and rate.value else math.inf
        return Level(codec, size, decode, self._read_bytes)

    def layer_bytes(self, location: Location) -> int:
        """Return the stored bytes of one layer of a block."""
        return location.length // self._layout.layers or self._layout.stored_layer_bytes

    def runs(self, sources: Sequence[tuple[Source, ...]]) -> list[Run]:
        """Group a chain by the place of each block's best copy."""
        groups = groupby((copies[0] for copies in sources), self.way)
        return [self._run(way, len(list(copies))) for way, copies in groups]

    def _run(self, way: Way, blocks: int) -> Run:
        promote = self._promotions.fit.line or ASSUMED[Tier.L4] if way.rests else None
        place = f"{way.node}/{way.tier}/{way.rests}"
        return Run(way.tier, blocks, self.line(way.read), promote, place)

    def way(self, source: Source) -> Way:
        """Return how a copy is reached.

        A copy that rests, or rested a moment ago, is read in its node's memory.
        """
        in_memory = Tier.L2 if source.node.host == self._host else Tier.L3
        read = source.tier if source.key is None else in_memory
        return Way(source.node.node_id, source.tier, read, source.location is None)

    def refused(self, sources: Sequence[tuple[Source, ...]]) -> bool:
        """Record blocks that were not worth loading; True: the first block is to be probed.

        The prober reports the measurement (``probed``) and the end of the probe (``probe_ended``).
        """
        source = sources[0][0]
        for rate in self._decodes.values():
            rate.value *= _FORGET_PESSIMISM
        path = self._path(source)
        path.refusals += 1
        age_s = self._clock.now() - path.fit.measured_at_s
        if path.probing or (path.refusals < PROBE_REFUSALS and age_s < PROBE_PAUSE_S):
            return False
        path.probing = True
        return True

    def probe_ended(self, source: Source) -> None:
        """Allow the next probe of a copy's path."""
        path = self._path(source)
        path.refusals = 0
        path.probing = False

    def _path(self, source: Source) -> _Path:
        way = self.way(source)
        return self._promotions if way.rests else self._reads[way.read]

    def probe_blocks(self, sources: Sequence[tuple[Source, ...]]) -> int:
        """Return how many of these blocks, one layer each, a probe may read."""
        line, level = self.line(self.way(sources[0][0]).read), self.level(KvCodec.NONE, sources)
        size_bytes = min(PROBE_BYTES, PROBE_S * line.bytes_per_s)
        return max(1, min(len(sources), int(size_bytes / level.layer_bytes)))
