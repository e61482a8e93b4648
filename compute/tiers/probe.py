"""Reads a little from a path that loads avoid, so that one that became fast again is seen.

Runs in a worker thread; no request waits for it and what it reads is thrown away. How much is
bounded in bytes and in predicted time (compute/tiers/load_figures.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from tierkv.compute.tiers.finder import Absorb, Source
from tierkv.compute.tiers.load_figures import LoadFigures
from tierkv.dmp.pool_node import RangeRead
from tierkv.kvcore.clock import Clock
from tierkv.kvcore.location import Location


def probe(
    sources: Sequence[tuple[Source, ...]], figures: LoadFigures, *, absorb: Absorb, clock: Clock
) -> None:
    """Measure the way to the first of these blocks: one small read and one that is not."""
    first = sources[0][0]
    if first.location is None:
        _promote(first, figures, absorb, clock)
        return
    alike = takewhile(lambda copies: _is_like(copies[0], first), sources)
    places = [at for copies in alike if (at := copies[0].location) is not None]
    count = figures.probe_blocks(sources[: len(places)])
    for some in (places[:1], places[:count]):
        _read(first, some, figures, absorb, clock)


def _is_like(source: Source, first: Source) -> bool:
    return source.node is first.node and source.tier is first.tier and source.location is not None


def _promote(source: Source, figures: LoadFigures, absorb: Absorb, clock: Clock) -> None:
    """Have one block brought into memory, where the next request finds it, too."""
    assert source.key is not None, "a resting copy names its block"
    began = clock.now()
    found: Sequence[Location | None] = ()
    with absorb():
        found = source.node.promote([source.key])
    size = sum(at.length for at in found if at is not None)
    figures.probed(source, size, clock.now() - began)


def _read(
    source: Source, places: list[Location], figures: LoadFigures, absorb: Absorb, clock: Clock
) -> None:
    """Read one layer of some blocks into memory that nobody looks at."""
    sizes = [figures.layer_bytes(at) for at in places]
    buffer = memoryview(bytearray(sum(sizes)))
    reads, at = [], 0
    for place, size in zip(places, sizes, strict=True):
        reads.append(RangeRead(place, 0, buffer[at : at + size]))
        at += size
    began = clock.now()
    with absorb():
        source.node.read_ranges(reads)
    figures.probed(source, at, clock.now() - began)
