"""Reads values of a Pool: from one node whole batches first, single values after a failed batch.

``PoolReads`` is the base class of dmp/client/pool.py. A remembered location may be stale (evicted,
restarted). Then the node is asked once more; a value that still can't be read with the right
checksum counts as missing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from io import BytesIO

from tierkv.dmp.client.node_link import Act, NodeLink
from tierkv.dmp.client.ring import Ring
from tierkv.dmp.client.values import (
    Key,
    PoolCounters,
    covering,
    to_block_key,
    to_writable_view,
)
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


class PoolReads:
    """The reading side of a Pool: values, ranges and spans of values, and which values exist."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._counters = PoolCounters()
        self._lock = threading.Lock()
        self._closing = threading.Event()

    def get(self, key: Key) -> bytes | None:
        """Return a value with verified checksums, or None."""
        return self.get_many([key])[0]

    def get_many(self, keys: Iterable[Key]) -> list[bytes | None]:
        """Return several values or Nones, in order; one batch per node."""
        named = [to_block_key(key) for key in keys]
        buffers: dict[BlockKey, BytesIO] = {}

        def place_for(key: BlockKey) -> Place:
            def place(block: DescribedBlock) -> Sequence[tuple[int, memoryview]]:
                buffers[key] = landing(block.ranges.payload_bytes)
                return whole(buffers[key].getbuffer(), block)

            return place

        got = self._fetch([Want(key, place_for(key)) for key in dict.fromkeys(named)])
        return [buffers[key].getvalue() if key in got else None for key in named]

    def get_into(self, key: Key, buffer: bytearray | memoryview) -> int | None:
        """Read a value straight into the caller's memory; the fastest way to copy a value.

        Returns:
            Size of the value; None if the value could not be read, and then the buffer may hold
            garbage.

        Raises:
            ValueError: the buffer is smaller than the value, read-only or not contiguous.
        """
        return self.get_many_into([(key, buffer)])[0]

    def get_many_into(
        self, items: Sequence[tuple[Key, bytearray | memoryview]]
    ) -> list[int | None]:
        """Read several values straight into the caller's memory, one batch per node.

        Returns:
            Size of each value; None if the value could not be read, and then its buffer may hold
            garbage.

        Raises:
            ValueError: a buffer is unfit, as for ``get_into``, or a key occurs twice.
        """
        targets = {to_block_key(key): to_writable_view(buffer) for key, buffer in items}
        if len(targets) != len(items):
            raise ValueError("a key is named twice")
        values = WholeInto(targets)
        got = self._fetch(values.wants)
        return [values.sizes[key] if key in got else None for key in targets]

    def get_ranges(self, key: Key, indices: Sequence[int]) -> list[bytes] | None:
        """Return ranges of a value, for example a few layers, or None.

        Raises:
            ValueError: a range does not exist.
        """
        parts: list[BytesIO] = []

        def place(block: DescribedBlock) -> Sequence[tuple[int, memoryview]]:
            if not all(0 <= index < block.ranges.count for index in indices):
                raise ValueError(f"the value has {block.ranges.count} ranges, not all of {indices}")
            parts[:] = [landing(block.ranges.size_bytes) for _ in indices]
            return [(index, p.getbuffer()) for index, p in zip(indices, parts, strict=True)]

        got = self._fetch([Want(to_block_key(key), place)])
        return [part.getvalue() for part in parts] if got else None

    def get_ranges_into(self, reads: Sequence[tuple[Key, int, memoryview]]) -> list[bool]:
        """Read ranges of several values straight into the caller's memory, one batch per node.

        Args:
            reads: key, number of the range, and a buffer of exactly the range's length. A key may
                occur once per wanted range.

        Returns:
            True for each filled buffer; other buffers may hold garbage. Ranges of another size than
            the buffer are not read, and counted in ``stats().misfits``.

        Raises:
            ValueError: a buffer is read-only or not contiguous.
        """
        named = [(to_block_key(key), index, to_writable_view(view)) for key, index, view in reads]
        scatter = Scatter(named)
        answer = scatter.answer(self._fetch(scatter.wants))
        with self._lock:
            self._counters.misfits += len(scatter.misfits)
        return answer

    def get_span(self, key: Key, offset: int, length: int) -> bytes | None:
        """Return bytes [offset, offset + length) of a value, or None.

        Reads and verifies the ranges that contain the span; a value stored without ``range_bytes``
        has one range.

        Raises:
            ValueError: the span is empty or leaves the value.
        """
        span = Span(offset, length)
        return span.cut() if self._fetch([Want(to_block_key(key), span.place)]) else None

    def exists(self, key: Key) -> bool:
        """Return True if a value is in the pool; a value on disk is loaded into memory."""
        return self.exists_many([key])[0]

    def exists_many(self, keys: Iterable[Key]) -> list[bool]:
        """Return for each key whether the value is in the pool."""
        named = [to_block_key(key) for key in keys]
        there: set[BlockKey] = set()

        def ask(link: NodeLink, wanted: list[BlockKey]) -> set[BlockKey]:
            found = set(link.find(wanted))
            there.update(found)
            return found

        self._seek(list(dict.fromkeys(named)), ask)
        return [key in there for key in named]

    def register(self, memory: memoryview) -> None:
        """Hint that ``get_into`` and ``put`` will often use this memory (RDMA registers it)."""
        for link in self._ring.links:
            with link.absorb():
                link.opened.register(memory)

    def _seek(self, keys: Sequence[BlockKey], act: Act) -> None:
        self._check_open()
        self._ring.seek(keys, act)

    def _fetch(self, wants: Sequence[Want]) -> set[BlockKey]:
        by_key = {want.key: want for want in wants}
        got: set[BlockKey] = set()

        def read(link: NodeLink, keys: list[BlockKey]) -> set[BlockKey]:
            read_now = fetch(link, [by_key[key] for key in keys])
            got.update(read_now)
            return read_now

        self._seek(list(by_key), read)
        with self._lock:
            self._counters.hits += len(got)
            self._counters.misses += len(by_key) - len(got)
        return got

    def _check_open(self) -> None:
        if self._closing.is_set():
            raise ValueError("the pool is closed")
