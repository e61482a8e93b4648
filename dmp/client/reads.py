"""Reads values from one node of a Pool: whole batches first, single values after a failed batch.

Called by dmp/client/pool.py. A remembered location may be stale (evicted, restarted). Then the node
is asked once more; a value that still can't be read with the right checksum counts as missing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from io import BytesIO

from tierkv.dmp.client.node_link import NodeLink
from tierkv.dmp.client.values import covering
from tierkv.dmp.pool_node import RangeRead
from tierkv.dmp.wire.range_codec import DescribedBlock
from tierkv.kvcore.ids import BlockKey

Place = Callable[[DescribedBlock], Sequence[tuple[int, memoryview]]]
"""Chooses the ranges of a block to read and the destinations of the bytes; may raise ValueError."""


@dataclass(frozen=True, slots=True)
class Want:
    """A block to read.

    Attributes:
        key: key of the block.
        place: chooses the destinations; may be called more than once, and the last result counts.
    """

    key: BlockKey
    place: Place


class WholeInto:
    """Reads of whole values into the caller's buffers.

    Attributes:
        wants: blocks to fetch.
        sizes: sizes of the values that were found.
    """

    def __init__(self, targets: Mapping[BlockKey, memoryview]) -> None:
        self.sizes: dict[BlockKey, int] = {}
        self.wants = [Want(key, partial(self._place, key, view)) for key, view in targets.items()]

    def _place(
        self, key: BlockKey, target: memoryview, block: DescribedBlock
    ) -> list[tuple[int, memoryview]]:
        size = self.sizes[key] = block.ranges.payload_bytes
        if size > target.nbytes:
            raise ValueError(f"a value of {size} bytes, a buffer of {target.nbytes}")
        return whole(target, block)


class Span:
    """Bytes [offset, offset + length) of a value, and the ranges that contain the span."""

    def __init__(self, offset: int, length: int) -> None:
        self._offset, self._length = offset, length
        self._buffer, self._start = bytearray(), 0

    def place(self, block: DescribedBlock) -> list[tuple[int, memoryview]]:
        """Allocate a buffer for the ranges.

        Raises:
            ValueError: the span is empty or leaves the value.
        """
        size, offset = block.ranges.size_bytes, self._offset
        held = covering(
            offset, self._length, range_bytes=size, size_bytes=block.ranges.payload_bytes
        )
        self._buffer, self._start = bytearray(size * len(held)), offset - held.start * size
        view = memoryview(self._buffer)
        return [(index, view[i * size : (i + 1) * size]) for i, index in enumerate(held)]

    def cut(self) -> bytes:
        """Return the span, once the ranges are read."""
        return bytes(memoryview(self._buffer)[self._start : self._start + self._length])


class Scatter:
    """Reads of ranges of several values into the caller's buffers.

    Attributes:
        wants: blocks to fetch, one per value.
        misfits: positions of reads whose range does not exist or has another size.
    """

    def __init__(self, reads: Sequence[tuple[BlockKey, int, memoryview]]) -> None:
        self.misfits: set[int] = set()
        self._reads = reads
        self._positions: dict[BlockKey, list[int]] = {}
        for position, (key, *_) in enumerate(reads):
            self._positions.setdefault(key, []).append(position)
        self.wants = [Want(key, partial(self._place, key)) for key in self._positions]

    def _place(self, key: BlockKey, block: DescribedBlock) -> list[tuple[int, memoryview]]:
        placed: list[tuple[int, memoryview]] = []
        for position in self._positions[key]:
            _, index, view = self._reads[position]
            if 0 <= index < block.ranges.count and view.nbytes == block.ranges.size_bytes:
                placed.append((index, view))
                self.misfits.discard(position)
            else:
                self.misfits.add(position)
        return placed

    def answer(self, got: set[BlockKey]) -> list[bool]:
        """Return which reads are done, given the fetched keys."""
        return [key in got and i not in self.misfits for i, (key, *_) in enumerate(self._reads)]


def fetch(link: NodeLink, wants: Sequence[Want]) -> set[BlockKey]:
    """Read the blocks that the node has; return the keys that were read and verified."""
    known = {w.key: block for w in wants if (block := link.known.get(w.key)) is not None}
    unknown = [want.key for want in wants if want.key not in known]
    blocks = known | (link.find(unknown) if unknown else {})
    here = [want for want in wants if want.key in blocks]
    if not here or _read(link, here, blocks):
        return {want.key for want in here}
    return {want.key for want in here if _fetch_alone(link, want, blocks, again=len(here) == 1)}


def _fetch_alone(
    link: NodeLink, want: Want, blocks: dict[BlockKey, DescribedBlock], *, again: bool
) -> bool:
    """Read one block of a failed batch; ``again`` if this location was tried alone already."""
    if not again and link.up and _read(link, [want], blocks):
        return True
    link.forget(want.key)
    fresh = link.find([want.key]) if link.up else {}
    return (
        want.key in fresh and fresh != {want.key: blocks[want.key]} and _read(link, [want], fresh)
    )


def _read(link: NodeLink, wants: Sequence[Want], blocks: dict[BlockKey, DescribedBlock]) -> bool:
    reads = [
        RangeRead(blocks[want.key].location, index, view)
        for want in wants
        for index, view in want.place(blocks[want.key])
    ]
    done = False
    with link.absorb():
        link.opened.read_ranges(reads)
        done = True
    return done


def whole(buffer: memoryview, block: DescribedBlock) -> list[tuple[int, memoryview]]:
    """Place all ranges of a block in sequence."""
    size = block.ranges.size_bytes
    return [(i, buffer[i * size : (i + 1) * size]) for i in range(block.ranges.count)]


def landing(size_bytes: int) -> BytesIO:
    """Return memory to be filled through ``getbuffer``, whose ``getvalue`` then makes no copy.

    BytesIO keeps a bytes object and returns the same object when no view exists any more. The
    kernel zeroes ``bytes(n)`` only on the first write to each page. Together, both halve the time
    of a large get.
    """
    return BytesIO(bytes(size_bytes))
