"""Reading values from one node of a Pool: whole batches first, one by one where a batch fails.

Called by dmp/pool.py. A remembered place may be stale (evicted, restarted): then the node is asked
once more, and what still can't be read with the right checksum is not there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import BytesIO

from dmp.node_link import NodeLink
from dmp.pool_node import RangeRead
from dmp.stored import StoredBlock
from kvcore.ids import BlockKey

Place = Callable[[StoredBlock], Sequence[tuple[int, memoryview]]]
"""Says which ranges of a block are wanted and where their bytes go; may raise ValueError."""


@dataclass(frozen=True, slots=True)
class Want:
    """A block somebody wants to read.

    Attributes:
        key: which.
        place: where its bytes go; may be asked more than once, the last answer counts.
    """

    key: BlockKey
    place: Place


def fetch(link: NodeLink, wants: Sequence[Want]) -> set[BlockKey]:
    """Read what the node has; answer the keys that were read and verified."""
    known = {w.key: block for w in wants if (block := link.known(w.key)) is not None}
    unknown = [want.key for want in wants if want.key not in known]
    blocks = known | (link.find(unknown) if unknown else {})
    here = [want for want in wants if want.key in blocks]
    if not here or _read(link, here, blocks):
        return {want.key for want in here}
    return {want.key for want in here if _fetch_alone(link, want, blocks, again=len(here) == 1)}


def _fetch_alone(
    link: NodeLink, want: Want, blocks: dict[BlockKey, StoredBlock], *, again: bool
) -> bool:
    """Read one block of a failed batch; ``again`` if that place was tried alone already."""
    if not again and link.up and _read(link, [want], blocks):
        return True
    link.forget(want.key)
    fresh = link.find([want.key]) if link.up else {}
    return (
        want.key in fresh and fresh != {want.key: blocks[want.key]} and _read(link, [want], fresh)
    )


def _read(link: NodeLink, wants: Sequence[Want], blocks: dict[BlockKey, StoredBlock]) -> bool:
    reads = [
        RangeRead(blocks[want.key].location, index, view)
        for want in wants
        for index, view in want.place(blocks[want.key])
    ]
    done = False
    with link.absorb():
        link.opened.node.read_ranges(reads)
        done = True
    return done


def whole(buffer: memoryview, block: StoredBlock) -> list[tuple[int, memoryview]]:
    """Place all ranges of a block one after the other."""
    size = block.range_bytes
    return [(i, buffer[i * size : (i + 1) * size]) for i in range(block.range_count)]


def landing(size_bytes: int) -> BytesIO:
    """Return memory to be filled through ``getbuffer``, whose ``getvalue`` is then no copy.

    BytesIO lives in a bytes object and gives out that very object when nobody views it any more;
    ``bytes(n)`` is zeroed by the kernel only where it is written. Together that halves the time of
    a large get.
    """
    return BytesIO(bytes(size_bytes))
