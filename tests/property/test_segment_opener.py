"""Damaged segment files: refused with ConfigError, or attached and never a wrong block served."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fix_dmp import block_key, fetch, make_range, store
from tierkv.dmp.config import DmpConfig
from tierkv.dmp.node.node import DmpNode
from tierkv.dmp.segment import geometry as g
from tierkv.dmp.segment.geometry import Geometry
from tierkv.dmp.transport.inproc import InprocPoolNode
from tierkv.kvcore.block_event import NullReporter
from tierkv.kvcore.clock import ManualClock
from tierkv.kvcore.errors import CacheError
from tierkv.kvcore.ids import HostId, NodeId

SHAPE = Geometry.of(extent_count=2, extent_bytes=128 << 10)
NAMES = [f"n{i}" for i in range(4)]
FIRST_PAGE = g.FILE_HEADER.size
TABLES = range(SHAPE.extents_at, SHAPE.extents_at + 8 * SHAPE.extent_count)
HEADERS = range(SHAPE.headers_at, SHAPE.headers_at + g.SLOT_HEADER_BYTES * SHAPE.slot_count)
FIELDS = [
    SHAPE.headers_at + s * g.SLOT_HEADER_BYTES + at for s in range(8) for at in range(0, 96, 4)
]
PLACES = st.one_of(
    st.integers(0, FIRST_PAGE - 1),
    st.sampled_from(TABLES),
    st.sampled_from(HEADERS),
    st.sampled_from(FIELDS),
)
NUMBERS = st.sampled_from([0, 1, 2, 3, 4, 7, 24_000, 48_000, 1 << 15, 1 << 17, 1 << 32, 1 << 62])
BYTES = st.one_of(
    st.binary(min_size=1, max_size=16),
    NUMBERS.map(lambda n: n.to_bytes(8, "little")),
    NUMBERS.map(lambda n: (n & 0xFFFF_FFFF).to_bytes(4, "little")),
    st.just(b"\xff" * 8),
)


def config(path: Path) -> DmpConfig:
    return DmpConfig(
        node_id=NodeId("dmp-a"),
        host=HostId("here"),
        segment_path=str(path),
        capacity_bytes=SHAPE.extent_count * SHAPE.extent_bytes,
        extent_bytes=SHAPE.extent_bytes,
        attach_wait_s=0.0,
        scrub_rate_bytes_per_s=0,
        tick_interval_s=3600.0,
    )


def started(path: Path) -> DmpNode:
    node = DmpNode(config(path), NullReporter(), ManualClock())
    node.start()
    return node


@cache
def healthy() -> bytes:
    """A segment with four blocks in a chain."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "node.seg"
        node = started(path)
        for i, name in enumerate(NAMES):
            store(InprocPoolNode(node), name, NAMES[i - 1] if i else None)
        node.stop()
        return path.read_bytes()


def with_checks(raw: bytearray) -> bytearray:
    """Make all check numbers fit again, so that the fields behind them are what is tried."""
    start, count = SHAPE.headers_at, SHAPE.slot_count
    rows = np.frombuffer(raw, g.SLOT_DTYPE, count, start)
    lanes = np.frombuffer(raw, np.uint64, count * g.LANES, start).reshape(count, g.LANES)
    rows["check"] = g.header_checks(lanes, np.arange(count))
    return raw


def check_file(raw: bytes) -> list[str]:
    """Attach a file and return what it serves; that must be what was stored."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "node.seg"
        path.write_bytes(raw)
        node = started(path)
        try:
            names = list(served(node))
            node.scrubber.run_round()
            node.check_invariants()
            assert store(InprocPoolNode(node), "new").length == 48_000
        finally:
            node.stop()
    return names


def served(node: DmpNode) -> Iterator[str]:
    """Read every block under its name; whatever comes must be its own bytes."""
    pool = InprocPoolNode(node)
    node.check_invariants()
    for name, place in zip(NAMES, pool.lookup([block_key(n) for n in NAMES]), strict=True):
        if place is None:
            continue
        try:
            got = fetch(pool, place)
        except CacheError:
            continue
        assert got == [make_range(name, 0), make_range(name, 1)], f"{name} is served wrong"
        yield name


FUZZ = settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)


@FUZZ
@given(damage=st.lists(st.tuples(PLACES, BYTES), min_size=1, max_size=6), recheck=st.booleans())
def test_damage_never_serves_a_wrong_block(damage: list[tuple[int, bytes]], recheck: bool) -> None:
    raw = bytearray(healthy())
    for at, data in damage:
        raw[at : at + len(data)] = data
    check_file(bytes(with_checks(raw) if recheck else raw))


@FUZZ
@given(slots=st.permutations(range(SHAPE.slot_count)))
def test_swapped_headers_never_serve_a_wrong_block(slots: list[int]) -> None:
    raw = bytearray(healthy())
    source = bytes(raw)
    for here, there in enumerate(slots):
        at, of = SHAPE.header_offset(here), SHAPE.header_offset(there)
        raw[at : at + g.SLOT_HEADER_BYTES] = source[of : of + g.SLOT_HEADER_BYTES]
    check_file(bytes(raw))


@FUZZ
@given(raw=st.binary(max_size=8192), size=st.sampled_from([0, 100, 4096, SHAPE.file_bytes]))
def test_an_arbitrary_file_is_out_of_the_way_and_serves_nothing(raw: bytes, size: int) -> None:
    assert check_file(raw[:size].ljust(size, b"\0")) == []


@FUZZ
@given(cut=st.integers(0, SHAPE.file_bytes - 1))
def test_a_truncated_file_is_made_anew_and_serves_nothing(cut: int) -> None:
    assert check_file(healthy()[:cut]) == []


def test_the_healthy_file_serves_everything() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "node.seg"
        path.write_bytes(healthy())
        node = started(path)
        assert list(served(node)) == NAMES
        node.stop()
