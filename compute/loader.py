"""Loads blocks from the pool into L1 pages, layer by layer, behind the computation.

Runs in the tiers' worker threads. Layer l of all blocks arrives before layer l + 1 starts, and an
event per layer lets the engine compute behind it. A block that can't be read shortens the load.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from compute.finder import Absorb, Source
from compute.pages import L1Pages
from dmp.pool_node import PoolNode, RangeRead
from kvcore.clock import Clock
from kvcore.errors import TransportError
from kvcore.ids import NodeId
from kvcore.location import Location, Tier

_HOLD_TTL_S = 30.0


@dataclass(slots=True, eq=False)
class LoadJob:
    """One load in progress; the loader writes it, the engine waits on its events.

    Attributes:
        pages: where blocks go, in order.
        sources: per block, copies to try; the first is the best.
        layer_ready: set when that layer is in the pages (or never will be).
        good: leading blocks that are complete so far; final once ``ended`` is set.
        tiers: tier each of the leading blocks came from.
        ended: set when no thread writes into the pages any more.
    """

    pages: tuple[int, ...]
    sources: list[tuple[Source, ...]]
    layer_ready: list[threading.Event]
    good: int
    tiers: list[Tier]
    ended: threading.Event = field(default_factory=threading.Event)
    lost_nodes: set[NodeId] = field(default_factory=set)


def make_job(pages: Sequence[int], sources: Sequence[tuple[Source, ...]], layers: int) -> LoadJob:
    """Prepare a load of one block per page."""
    events = [threading.Event() for _ in range(layers)]
    tiers = [copies[0].tier for copies in sources]
    return LoadJob(tuple(pages), list(sources), events, len(pages), tiers)


class Loader:
    """Executes load jobs. Thread-safe: jobs share nothing but the counters behind ``measured``.

    Attributes:
        measured: called with (tier, bytes, seconds) after each read.
    """

    def __init__(
        self,
        pages: L1Pages,
        *,
        absorb: Absorb,
        clock: Clock,
        measured: Callable[[Tier, int, float], None],
    ) -> None:
        self.measured = measured
        self._pages = pages
        self._absorb = absorb
        self._clock = clock

    def run(self, job: LoadJob, *, first_layer: Callable[[], None]) -> None:
        """Load all layers; always ends with every event set."""
        held: list[tuple[PoolNode, list[Location]]] = []
        try:
            held = self._hold(job)
            for layer, ready in enumerate(job.layer_ready):
                if job.good:
                    job.good = self._read_layer(job, layer)
                ready.set()
                if layer == 0 and job.good:
                    first_layer()
        except BaseException:
            job.good = 0  # Before the events: who waits on them reads it at once.
            raise
        finally:
            for ready in job.layer_ready:
                ready.set()
            for node, locations in held:
                with self._absorb():
                    node.release(locations)

    def _hold(self, job: LoadJob) -> list[tuple[PoolNode, list[Location]]]:
        """Keep the best copies from eviction while they are read; drops invalid ones."""
        by_node: dict[NodeId, list[int]] = {}
        for block, copies in enumerate(job.sources):
            by_node.setdefault(copies[0].node.node_id, []).append(block)
        held = []
        for blocks in by_node.values():
            node = job.sources[blocks[0]][0].node
            locations = [job.sources[b][0].location for b in blocks]
            valid = [False] * len(blocks)
            with self._absorb() as attempt:
                valid = node.hold(locations, ttl_s=_HOLD_TTL_S)
            if isinstance(attempt.error, TransportError):
                job.lost_nodes.add(node.node_id)
            for block, ok in zip(blocks, valid, strict=True):
                if not ok:
                    job.sources[block] = job.sources[block][1:]
            held.append((node, [at for at, ok in zip(locations, valid, strict=True) if ok]))
        job.good = next((i for i, copies in enumerate(job.sources) if not copies), job.good)
        return held

    def _read_layer(self, job: LoadJob, layer: int) -> int:
        """Read one layer of all blocks, one call per node; returns how many blocks are good."""
        count = job.good
        window = self._pages.window(layer, job.pages[:count])
        by_node: dict[NodeId, list[int]] = {}
        for block in range(count):
            by_node.setdefault(job.sources[block][0].node.node_id, []).append(block)
        good = count
        for blocks in by_node.values():
            if not self._read_together(job, layer, blocks, window.ranges):
                good = min(good, self._read_singly(job, layer, blocks, window.ranges))
        window.commit()
        return good

    def _read_together(
        self, job: LoadJob, layer: int, blocks: Sequence[int], ranges: Sequence[memoryview]
    ) -> bool:
        source = job.sources[blocks[0]][0]
        if source.node.node_id in job.lost_nodes:
            return False
        reads = [RangeRead(job.sources[b][0].location, layer, ranges[b]) for b in blocks]
        began = self._clock.now()
        with self._absorb() as attempt:
            source.node.read_ranges(reads)
        if isinstance(attempt.error, TransportError):
            job.lost_nodes.add(source.node.node_id)
        if attempt.ok:
            size = sum(len(read.destination) for read in reads)
            self.measured(source.tier, size, self._clock.now() - began)
        return attempt.ok

    def _read_singly(
        self, job: LoadJob, layer: int, blocks: Sequence[int], ranges: Sequence[memoryview]
    ) -> int:
        """Find the first block that no copy can give; the blocks before it are good."""
        for block in blocks:
            if not self._read_one(job, layer, block, ranges[block]):
                return block
        return len(job.pages)

    def _read_one(self, job: LoadJob, layer: int, block: int, target: memoryview) -> bool:
        for source in job.sources[block]:
            if source.node.node_id in job.lost_nodes:
                continue
            with self._absorb() as attempt:
                source.node.read_ranges([RangeRead(source.location, layer, target)])
            if attempt.ok:
                job.tiers[block] = source.tier
                return True
            if isinstance(attempt.error, TransportError):
                job.lost_nodes.add(source.node.node_id)
        return False
