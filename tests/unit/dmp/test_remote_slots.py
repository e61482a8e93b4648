from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import xxhash

from tests.fix_dmp import RANGE_BYTES, Rig, make_range, store
from tierkv.dmp.segment.geometry import Geometry
from tierkv.dmp.segment.segment import STAMP_BYTES, Stamp, parse_stamp
from tierkv.dmp.segment.slots import SlotState
from tierkv.dmp.transport.inproc import InprocPoolNode
from tierkv.dmp.transport.remote_slots import check_stamp, range_span, ranges_in, remote_of
from tierkv.dmp.wire.rdma_messages import QpAddress, RdmaAccept, RemoteArea
from tierkv.kvcore.block import Location, RangeShape
from tierkv.kvcore.errors import BlockNotFoundError, StaleEpochError
from tierkv.kvcore.ids import Incarnation, NodeId

SHAPE = Geometry.of(extent_count=4, extent_bytes=256 << 10)
ACCEPT = RdmaAccept(
    QpAddress("::1", 0, 1, 2, 5, 16),
    Incarnation(5),
    SHAPE,
    headers=RemoteArea(1 << 40, 7),
    payload=RemoteArea(1 << 41, 8),
)
SEALED = Stamp(SlotState.SEALED, 1, b"k" * 16, 2 * RANGE_BYTES, RANGE_BYTES, 2)


def place(slot: int = 0, *, length: int = 2 * RANGE_BYTES, segment: int = 0) -> Location:
    return Location(NodeId("dmp-a"), Incarnation(5), segment, slot, 1, length)


def test_the_computed_offsets_are_where_the_node_puts_things(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    pool = InprocPoolNode(rig.node)
    for name in "abcdefg":
        location = store(pool, name)
        segment = rig.node.segment
        for index in (0, 1):
            span = range_span(segment.geometry, location, RangeShape(RANGE_BYTES, 2), index)
            data = segment.memory[span.payload_at : span.payload_at + RANGE_BYTES]
            assert data == make_range(name, index)
            stored = segment.memory[span.checksum_at : span.checksum_at + 8]
            assert int.from_bytes(stored, "little") == xxhash.xxh3_64_intdigest(data)
            stamp = parse_stamp(segment.memory[span.header_at : span.header_at + STAMP_BYTES])
            check_stamp(location, stamp, range_bytes=RANGE_BYTES)


@pytest.mark.parametrize(
    ("location", "index", "count"),
    [
        (place(SHAPE.slot_count), 0, 2),
        (place(-1), 0, 2),
        (place(segment=1), 0, 2),
        (place(), 2, 2),
        (place(), -1, 2),
        (place(), 0, 1 << 20),
        (place(SHAPE.slots_per_extent - 1), 0, 2),
    ],
)
def test_what_does_not_exist_is_not_found(location: Location, index: int, count: int) -> None:
    with pytest.raises(BlockNotFoundError):
        range_span(SHAPE, location, RangeShape(RANGE_BYTES, count), index)


def test_ranges_in_a_block() -> None:
    assert ranges_in(SHAPE, place(), RANGE_BYTES) == 2
    for size in (0, 7_777):
        with pytest.raises(BlockNotFoundError):
            ranges_in(SHAPE, place(), size)


def test_a_header_read_afterwards_decides() -> None:
    check_stamp(place(), SEALED, range_bytes=RANGE_BYTES)
    with pytest.raises(StaleEpochError):
        check_stamp(place(), SEALED._replace(generation=2), range_bytes=RANGE_BYTES)
    for state in SlotState:
        if state is not SlotState.SEALED:
            with pytest.raises(BlockNotFoundError):
                check_stamp(place(), SEALED._replace(state=state), range_bytes=RANGE_BYTES)
    with pytest.raises(BlockNotFoundError):
        check_stamp(place(), SEALED, range_bytes=RANGE_BYTES // 2)
    with pytest.raises(BlockNotFoundError):
        check_stamp(place(length=RANGE_BYTES), SEALED, range_bytes=RANGE_BYTES)


def test_addresses_stay_inside_one_of_the_two_areas() -> None:
    split, end = SHAPE.payload_at, SHAPE.file_bytes
    assert remote_of(ACCEPT, 8, 4) == ((1 << 40) + 8, 7)
    assert remote_of(ACCEPT, split - 4, 4) == ((1 << 40) + split - 4, 7)
    assert remote_of(ACCEPT, split, 4) == (1 << 41, 8)
    assert remote_of(ACCEPT, end - 4, 4) == ((1 << 41) + end - split - 4, 8)
    for at, size in ((-1, 4), (split - 2, 4), (end - 2, 4), (0, 0), (1 << 60, 1)):
        with pytest.raises(BlockNotFoundError):
            remote_of(ACCEPT, at, size)


def test_keys_stay_out_of_reprs() -> None:
    accept = replace(ACCEPT, payload=RemoteArea(1, 987_654_321))
    assert "987654321" not in repr(accept)
