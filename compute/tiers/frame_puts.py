"""Entropy-coded blocks to the pool: encoded whole, then put, for their size is not known before.

Called in the publisher's thread, after a pass. A prompt's first block, where attention's sinks are,
is always stored at the finest level. With ``adaptive`` the others are stored at two levels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from tierkv.compute.batching.batch_plan import FullBlock
from tierkv.compute.codec.frame import LEVELS, Level
from tierkv.compute.model.pages import L1Pages
from tierkv.compute.tiers.block_puts import PublishJob, put_request
from tierkv.compute.tiers.finder import Absorb, BlockFinder
from tierkv.dmp.pool_node import PoolNode, PutRequest
from tierkv.kvcore.block_key import ROOT_PARENT, coarse_key
from tierkv.kvcore.ids import BlockKey, NodeId
from tierkv.kvcore.layout import KvCodec

_BATCH_BLOCKS = 16
"""Blocks that are encoded in memory at a time."""

_Frame = tuple[PublishJob, FullBlock, BlockKey, Level]


@dataclass(frozen=True, slots=True)
class FramesPut:
    """What came of it: bytes in sealed slots, and blocks whose node was away or failed."""

    sealed_bytes: int
    lost: set[BlockKey]


def put_frames(
    jobs: Sequence[PublishJob],
    pages: L1Pages,
    finder: BlockFinder,
    *,
    model: str,
    absorb: Absorb,
) -> FramesPut:
    """Encode and store the blocks of jobs; what the pool has already is not encoded again."""
    lost: set[BlockKey] = set()
    by_node: dict[NodeId, tuple[PoolNode, list[_Frame]]] = {}
    for frame in (frame for job in jobs for frame in _frames(job)):
        node = finder.place(frame[1].key)  # Both levels of a block are at one place.
        if node is None:
            lost.add(frame[1].key)
        else:
            by_node.setdefault(node.node_id, (node, []))[1].append(frame)
    sealed_bytes = 0
    for node, frames in by_node.values():
        remaining = iter(frames)
        while some := list(islice(remaining, _BATCH_BLOCKS)):
            with absorb() as attempt:
                sealed_bytes += _put(node, some, pages, model)
            if not attempt.ok:
                lost.update(block.key for _, block, _, _ in (*some, *remaining))
    return FramesPut(sealed_bytes, lost)


def _frames(job: PublishJob) -> Iterator[_Frame]:
    for block in job.blocks:
        first = block.parent == ROOT_PARENT
        level = LEVELS.get(job.codec, Level.FINE)
        yield job, block, block.key, Level.FINE if first else level
        if job.codec is KvCodec.ADAPTIVE and not first:
            yield job, block, coarse_key(block.key), Level.COARSE


def _put(node: PoolNode, frames: Sequence[_Frame], pages: L1Pages, model: str) -> int:
    known = node.lookup([key for _, _, key, _ in frames])
    puts, payloads = [], []
    for (job, block, key, level), place in zip(frames, known, strict=True):
        if place is None:
            encoded = pages.read_frames(block.page, level)
            puts.append(
                _request(job, block, key, len(encoded) // pages.layout.layers, pages, model)
            )
            payloads.append(encoded)
    stored = node.put(puts, payloads) if puts else []
    return sum(place.length for place in stored if place is not None)


def _request(
    job: PublishJob, block: FullBlock, key: BlockKey, range_bytes: int, pages: L1Pages, model: str
) -> PutRequest:
    put = put_request(block, job, pages.layout, range_bytes=range_bytes, model=model)
    return put if key == block.key else replace(put, key=key, parent=coarse_key(block.parent))
