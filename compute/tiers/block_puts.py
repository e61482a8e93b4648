"""Blocks on their way to pool nodes: slots filled layer by layer, and frames that are put whole.

Only the publisher's thread calls this file. A failing node takes out its own blocks only; ``close``
seals a block and so makes it visible. Entropy-coded blocks are encoded whole and put after a pass,
because their size is not known before. The first block of a prompt holds the attention sinks and is
always stored at the finest level; ``adaptive`` stores all later blocks at two levels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from tierkv.compute.codec.entropy import LEVELS, CodecLevel
from tierkv.compute.l1.page_pool import FullBlock
from tierkv.compute.model.pages import L1Pages
from tierkv.compute.tiers.finder import Absorb, BlockFinder
from tierkv.dmp.pool_node import PoolNode, PutGrant, RangeWrite
from tierkv.kvcore.block import ROOT_PARENT, BlockSpec, Expectation, coarse_key, shared_ranges
from tierkv.kvcore.ids import BlockKey, NodeId
from tierkv.kvcore.layout import BlockLayout, KvCodec


@dataclass(frozen=True, slots=True, eq=False)
class PublishJob:
    """Blocks of one sequence, published or given up together.

    Attributes:
        seq_id: number of the sequence.
        blocks: in chain order; the job's owner holds a reference on their pages.
        codec: how the blocks are stored.
        must: queue the job even when the queue is full (a handoff waits for the job).
        handoff: another node reads the blocks as soon as they are sealed.
    """

    seq_id: int
    blocks: tuple[FullBlock, ...]
    codec: KvCodec
    must: bool = False
    handoff: bool = False


SaveDone = Callable[[PublishJob, Sequence[FullBlock]], None]
"""Takes an ended job and the blocks lost because their pool node was away or failed."""

ReadRanges = Callable[[int, Sequence[int], KvCodec], list[memoryview]]
"""One layer of several pages as ranges (``L1Pages.read_ranges``)."""


@dataclass(slots=True)
class _NodePuts:
    """The blocks for one node; ``failed`` ends the puts early."""

    node: PoolNode
    blocks: list[tuple[FullBlock, PublishJob]] = field(default_factory=list)
    granted: list[tuple[PutGrant, int, PublishJob]] = field(default_factory=list)
    failed: bool = False


class BlockPuts:
    """The blocks of several jobs, from reserve to seal; only blocks of a codec of fixed size."""

    def __init__(
        self,
        jobs: Sequence[PublishJob],
        finder: BlockFinder,
        layout: BlockLayout,
        *,
        absorb: Absorb,
    ) -> None:
        self._jobs = jobs
        self._finder = finder
        self._layout = layout
        self._absorb = absorb
        self._nodes: list[_NodePuts] = []
        self._homeless: list[BlockKey] = []
        self._layers = 0

    def reserve(self) -> None:
        """Ask for a slot per block; a block that the pool has, or is receiving, gets no slot."""
        by_node: dict[NodeId, _NodePuts] = {}
        for job in self._jobs:
            for block in job.blocks if job.codec.has_fixed_size else ():
                node = self._finder.place(block.spec.key)
                if node is None:
                    self._homeless.append(block.spec.key)
                    continue
                puts = by_node.setdefault(node.node_id, _NodePuts(node))
                puts.blocks.append((block, job))
        self._nodes = list(by_node.values())
        for puts in self._nodes:
            wanted = [self._request(block, job) for block, job in puts.blocks]
            with self._absorb() as attempt:
                grants = puts.node.reserve(wanted)
                puts.granted = [
                    (grant, block.page, job)
                    for grant, (block, job) in zip(grants, puts.blocks, strict=True)
                    if grant is not None
                ]
            puts.failed = not attempt.ok

    def _request(self, block: FullBlock, job: PublishJob) -> BlockSpec:
        range_bytes = replace(self._layout, codec=job.codec).stored_layer_bytes
        return put_request(block, job, self._layout, range_bytes)

    def write(self, stop: int, read_ranges: ReadRanges) -> None:
        """Write the layers up to ``stop`` not written yet, with one layer in memory at a time."""
        for layer in range(self._layers, stop):
            for puts in self._nodes:
                if puts.granted and not puts.failed:
                    self._write_layer(puts, layer, read_ranges)
        self._layers = max(self._layers, stop)

    def _write_layer(self, puts: _NodePuts, layer: int, read_ranges: ReadRanges) -> None:
        for codec, granted in _by_codec(puts.granted).items():
            ranges = read_ranges(layer, [page for _, page in granted], codec)
            with self._absorb() as attempt:
                puts.node.write_ranges(
                    [
                        RangeWrite(grant, layer, data)
                        for (grant, _), data in zip(granted, ranges, strict=True)
                    ]
                )
            puts.failed = puts.failed or not attempt.ok

    def close(self, kept: Sequence[PublishJob]) -> int:
        """Seal the blocks of kept jobs, abort the blocks of all other jobs.

        Returns:
            bytes in sealed slots.
        """
        whole = self._layers == self._layout.layers
        sealed_bytes = 0
        for puts in self._nodes:
            good = [g for g, _, job in puts.granted if whole and not puts.failed and job in kept]
            if good:
                with self._absorb() as attempt:
                    puts.node.seal(good)
                puts.failed = not attempt.ok
                good = good if attempt.ok else []
            kept_keys = {grant.block.key for grant in good}
            rest = [g for g, _, _ in puts.granted if g.block.key not in kept_keys]
            if rest:
                with self._absorb():
                    puts.node.abort(rest)
            sealed_bytes += sum(grant.block.ranges.payload_bytes for grant in good)
        return sealed_bytes

    def lost(self) -> set[BlockKey]:
        """Return the blocks whose node was away or failed; refused blocks are not lost."""
        failed = (block.spec.key for puts in self._nodes if puts.failed for block, _ in puts.blocks)
        return {*self._homeless, *failed}


def put_request(
    block: FullBlock, job: PublishJob, layout: BlockLayout, range_bytes: int
) -> BlockSpec:
    """Describe a block to a pool node; the rows of a handoff read the block at once."""
    spec, ranges = block.spec, shared_ranges(range_bytes, layout.layers)
    if not job.handoff:
        return replace(spec, ranges=ranges)
    outlook = replace(spec.outlook, expectation=Expectation.ROWS, expected_in_s=0.0)
    return replace(spec, ranges=ranges, outlook=outlook)


def _by_codec(
    granted: Sequence[tuple[PutGrant, int, PublishJob]],
) -> dict[KvCodec, list[tuple[PutGrant, int]]]:
    groups: dict[KvCodec, list[tuple[PutGrant, int]]] = {}
    for grant, page, job in granted:
        groups.setdefault(job.codec, []).append((grant, page))
    return groups


_BATCH_BLOCKS = 16
"""Blocks encoded in memory at a time."""

_Frame = tuple[PublishJob, FullBlock, BlockKey, CodecLevel]


@dataclass(frozen=True, slots=True)
class FramesPut:
    """Bytes in sealed slots, and blocks whose node was away or failed (``put_frames``)."""

    sealed_bytes: int
    lost: set[BlockKey]


def put_frames(
    jobs: Sequence[PublishJob],
    pages: L1Pages,
    finder: BlockFinder,
    *,
    absorb: Absorb,
) -> FramesPut:
    """Encode and store the blocks of jobs; blocks already in the pool are not encoded again."""
    lost: set[BlockKey] = set()
    by_node: dict[NodeId, tuple[PoolNode, list[_Frame]]] = {}
    for frame in (frame for job in jobs for frame in _frames(job)):
        node = finder.place(frame[1].spec.key)  # Both levels of a block are at one place.
        if node is None:
            lost.add(frame[1].spec.key)
        else:
            by_node.setdefault(node.node_id, (node, []))[1].append(frame)
    sealed_bytes = 0
    for node, frames in by_node.values():
        remaining = iter(frames)
        while some := list(islice(remaining, _BATCH_BLOCKS)):
            with absorb() as attempt:
                sealed_bytes += _put(node, some, pages)
            if not attempt.ok:
                lost.update(block.spec.key for _, block, _, _ in (*some, *remaining))
    return FramesPut(sealed_bytes, lost)


def _frames(job: PublishJob) -> Iterator[_Frame]:
    for block in job.blocks:
        key, first = block.spec.key, block.spec.parent == ROOT_PARENT
        level = LEVELS.get(job.codec, CodecLevel.FINE)
        yield job, block, key, CodecLevel.FINE if first else level
        if job.codec is KvCodec.ADAPTIVE and not first:
            yield job, block, coarse_key(key), CodecLevel.COARSE


def _put(node: PoolNode, frames: Sequence[_Frame], pages: L1Pages) -> int:
    known = node.lookup([key for _, _, key, _ in frames])
    puts, payloads = [], []
    for (job, block, key, level), place in zip(frames, known, strict=True):
        if place is None:
            encoded = pages.read_frames(block.page, level)
            layout = pages.layout
            put = put_request(block, job, layout, len(encoded) // layout.layers)
            coarse = key != put.key
            puts.append(replace(put, key=key, parent=coarse_key(put.parent)) if coarse else put)
            payloads.append(encoded)
    stored = node.put(puts, payloads) if puts else []
    return sum(place.length for place in stored if place is not None)
