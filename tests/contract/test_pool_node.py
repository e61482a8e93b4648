"""The numbered sentences of tierkv.dmp.pool_node.PoolNode, for every transport.

tests/hardware/rdma/test_contract.py runs the same sentences over RDMA: it takes everything here and
replaces the two fixtures ``transport`` and ``connect``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import pytest

from tests.fix_dmp import RANGE_BYTES, Rig, block_key, fetch, make_put, make_range, store
from tests.fix_tls import Certificates
from tierkv.dmp.pool_node import PoolNode, RangeRead, RangeWrite
from tierkv.dmp.slots.eviction import SAME_USE_S
from tierkv.dmp.transport.inproc import InprocPoolNode
from tierkv.dmp.transport.select import PathOptions, connect_pool_node
from tierkv.dmp.transport.shm import ShmPoolNode
from tierkv.dmp.transport.tcp import TcpPoolNode
from tierkv.dmp.wire.messages import RangeRef
from tierkv.dmp.wire.range_codec import as_ref
from tierkv.kvcore.block import Erased, Expectation
from tierkv.kvcore.block_event import HoldOrder, LeaseId
from tierkv.kvcore.clock import ManualClock
from tierkv.kvcore.errors import (
    BlockNotFoundError,
    CacheError,
    ChecksumError,
    LeaseExpiredError,
    StaleEpochError,
    TransportError,
)
from tierkv.kvcore.ids import HostId
from tierkv.kvwire.credentials import TlsFiles

TRANSPORTS = ("inproc", "shm", "tcp", "tcp+tls")

Connect = Callable[[Rig], PoolNode]
MakeRig = Callable[..., Rig]
GetCertificates = Callable[[], Certificates]


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def connect(transport: str, get_certificates: GetCertificates) -> Connect:
    tls = get_certificates().anonymous if transport == "tcp+tls" else None
    return lambda rig: open_pool(rig, transport, tls)


@pytest.fixture
def start(transport: str, make_rig: MakeRig, get_certificates: GetCertificates) -> MakeRig:
    """Start nodes that the transport can reach."""
    if transport != "tcp+tls":
        return make_rig
    return partial(make_rig, tls=get_certificates().server)


def open_pool(rig: Rig, transport: str, tls: TlsFiles | None = None) -> PoolNode:
    if transport == "inproc":
        return InprocPoolNode(rig.node)
    info = rig.node.reports.info(data_address=rig.server.address)
    host = rig.node.host if transport == "shm" else HostId("elsewhere")
    pool = connect_pool_node(info, host=host, options=PathOptions(tls=tls))
    assert isinstance(pool, ShmPoolNode if transport == "shm" else TcpPoolNode)
    return pool


@pytest.fixture
def rig(start: MakeRig) -> Rig:
    return start()


@pytest.fixture
def pool(connect: Connect, rig: Rig) -> Iterator[PoolNode]:
    node = connect(rig)
    yield node
    node.close()


def clock_of(rig: Rig) -> ManualClock:
    assert isinstance(rig.clock, ManualClock)
    return rig.clock


def test_0_says_who_and_where_it_is(pool: PoolNode, rig: Rig) -> None:
    assert (pool.node_id, pool.host) == (rig.node.node_id, rig.node.host)


def test_1_lookup_answers_one_entry_per_key(pool: PoolNode) -> None:
    location = store(pool, "a")
    assert pool.lookup([block_key("a"), block_key("b"), block_key("a")]) == [
        location,
        None,
        location,
    ]
    assert pool.lookup([]) == []


def test_2_reserve_refuses_what_is_sealed_or_being_written(pool: PoolNode) -> None:
    store(pool, "a")
    first = pool.reserve([make_put("a"), make_put("b"), make_put("b")])
    assert [grant is not None for grant in first] == [False, True, False]
    assert pool.reserve([make_put("b")]) == [None]


def test_2_what_is_known_of_a_block_arrives_with_it(pool: PoolNode, rig: Rig) -> None:
    known = {
        "session": "s-1",
        "expectation": Expectation.TURN,
        "expected_in_s": 2.5,
        "depth": 7,
        "tail": True,
    }
    puts = [make_put("a", **known), make_put("b", "a", expectation=Expectation.NONE)]
    grants = pool.reserve(puts)
    for grant in grants:
        assert grant is not None
        name = "a" if grant.block.key == block_key("a") else "b"
        pool.write_ranges([RangeWrite(grant, i, memoryview(make_range(name, i))) for i in range(2)])
    pool.seal([grant for grant in grants if grant is not None])
    whole = make_put("c", **known)
    payload = memoryview(make_range("c", 0) + make_range("c", 1))
    assert pool.put([whole], [payload]) != [None]
    for put in (*puts, whole):
        slot = rig.node._state.table.store.peek(put.key)
        assert slot is not None and slot.block == put
    stored = {event.key: event.block.owner.session for event in rig.node.reports.inventory()}
    assert [stored[block_key(name)] for name in "abc"] == ["s-1", "", "s-1"]


def test_2_reserve_refuses_what_does_not_fit_and_counts_it(pool: PoolNode) -> None:
    huge = make_put("huge", range_bytes=1 << 20)
    assert pool.reserve([huge, make_put("a")])[0] is None
    assert pool.stats().memory.alloc_failures == 1


def test_2_nothing_is_readable_before_seal(pool: PoolNode) -> None:
    (grant,) = pool.reserve([make_put("a")])
    assert grant is not None
    for index in (0, 1):
        pool.write_ranges([RangeWrite(grant, index, memoryview(make_range("a", index)))])
    assert pool.lookup([block_key("a")]) == [None]
    with pytest.raises(CacheError):
        fetch(pool, grant.location)
    (location,) = pool.seal([grant])
    assert location == grant.location
    assert fetch(pool, location) == [make_range("a", 0), make_range("a", 1)]


def test_3_write_range_refuses_a_wrong_size_index_or_grant(pool: PoolNode) -> None:
    (grant,) = pool.reserve([make_put("a")])
    assert grant is not None
    good = memoryview(make_range("a", 0))
    with pytest.raises(CacheError):
        pool.write_ranges([RangeWrite(grant, 0, good[:-1])])
    with pytest.raises(CacheError):
        pool.write_ranges([RangeWrite(grant, 2, good)])
    pool.abort([grant])
    with pytest.raises(LeaseExpiredError):
        pool.write_ranges([RangeWrite(grant, 0, good)])


def test_3_many_ranges_go_at_once_and_buffers_may_be_used_again(pool: PoolNode) -> None:
    names = [f"n{i}" for i in range(8)]
    grants = [grant for grant in pool.reserve([make_put(name) for name in names]) if grant]
    data = {(n, i): bytearray(make_range(n, i)) for n in names for i in (0, 1)}
    pool.write_ranges(
        [
            RangeWrite(grant, index, memoryview(data[name, index]))
            for index in (1, 0)
            for name, grant in zip(names, grants, strict=True)
        ]
    )
    for buffer in data.values():
        buffer[:] = bytes(RANGE_BYTES)
    places = pool.seal(grants)
    for name, place in zip(names, places, strict=True):
        assert place is not None
        assert fetch(pool, place) == [make_range(name, 0), make_range(name, 1)]


def test_3_one_bad_range_among_many_is_refused_and_the_node_serves_on(pool: PoolNode) -> None:
    grants = pool.reserve([make_put("a"), make_put("b")])
    assert grants[0] is not None and grants[1] is not None
    writes = [
        RangeWrite(g, i, memoryview(make_range(n, i)))
        for n, g in zip("ab", grants, strict=True)
        if g is not None
        for i in (0, 1)
    ]
    pool.abort([grants[1]])
    with pytest.raises(LeaseExpiredError):
        pool.write_ranges(writes)
    pool.write_ranges(writes[:2])
    assert pool.seal([grants[0]]) == [grants[0].location]
    assert fetch(pool, grants[0].location) == [make_range("a", 0), make_range("a", 1)]


def test_4_seal_answers_none_for_what_is_not_wholly_written(pool: PoolNode) -> None:
    (grant,) = pool.reserve([make_put("a")])
    assert grant is not None
    pool.write_ranges([RangeWrite(grant, 0, memoryview(make_range("a", 0)))])
    assert pool.seal([grant]) == [None]
    assert pool.lookup([block_key("a")]) == [None]
    store(pool, "a")


def test_4_seal_answers_none_for_a_grant_that_expired(pool: PoolNode, rig: Rig) -> None:
    early, late = pool.reserve([make_put("a"), make_put("b")], deadline_s=30.0)
    assert early is not None and late is not None
    for grant, name in ((early, "a"), (late, "b")):
        for index in (0, 1):
            pool.write_ranges([RangeWrite(grant, index, memoryview(make_range(name, index)))])
    assert pool.seal([early]) == [early.location]
    clock_of(rig).advance(31.0)
    assert pool.seal([late]) == [None]
    rig.node.tick()
    assert pool.stats().slots_writing == 0
    assert pool.lookup([block_key("a"), block_key("b")]) == [early.location, None]


def test_4_abort_and_expiry_free_grants(pool: PoolNode, rig: Rig) -> None:
    aborted, left = pool.reserve([make_put("a"), make_put("b")], deadline_s=30.0)
    assert aborted is not None and left is not None
    pool.abort([aborted])
    assert pool.stats().slots_writing == 1
    clock_of(rig).advance(31.0)
    rig.node.tick()
    assert pool.stats().slots_writing == 0
    assert pool.stats().memory.used_bytes == 0
    store(pool, "a")


def test_5_read_ranges_fills_every_destination(pool: PoolNode) -> None:
    places = [store(pool, "a"), store(pool, "b", "a")]
    buffers = [[bytearray(RANGE_BYTES) for _ in range(2)] for _ in places]
    pool.read_ranges(
        [
            RangeRead(place, index, memoryview(buffers[i][index]))
            for index in (1, 0)
            for i, place in enumerate(places)
        ]
    )
    assert buffers == [[bytearray(make_range(n, i)) for i in range(2)] for n in "ab"]
    stats = pool.stats().memory
    assert stats.read_bytes == stats.write_bytes == 4 * RANGE_BYTES


def test_5_a_reused_slot_is_stale(pool: PoolNode) -> None:
    first = store(pool, "first")
    for i in range(20):
        store(pool, f"next-{i}")
    assert pool.lookup([block_key("first")]) == [None]
    with pytest.raises((StaleEpochError, BlockNotFoundError)):
        fetch(pool, first)
    assert pool.stats().memory.evicted_blocks == 1


def test_5_a_reference_of_an_older_life_is_stale(pool: PoolNode, rig: Rig) -> None:
    location = store(pool, "a")
    older = type(location)(
        location.node, location.incarnation - 1, 0, location.slot, location.generation,
        location.length,
    )  # fmt: skip
    with pytest.raises(StaleEpochError):
        fetch(pool, older)
    assert pool.hold([older, location], ttl_s=1.0) == [False, True]


def test_5_a_range_or_slot_that_does_not_exist_is_not_found(pool: PoolNode) -> None:
    location = store(pool, "a")
    with pytest.raises(BlockNotFoundError):
        fetch(pool, location, [2])
    nowhere = type(location)(location.node, location.incarnation, 0, 1 << 40, 1, location.length)
    with pytest.raises(BlockNotFoundError):
        fetch(pool, nowhere)
    elsewhere = type(location)(
        location.node, location.incarnation, 7, location.slot, location.generation, 1
    )
    with pytest.raises(BlockNotFoundError):
        fetch(pool, elsewhere)


def test_5_a_range_of_another_length_is_not_found(pool: PoolNode) -> None:
    location = store(pool, "a")
    for size in (RANGE_BYTES - 1, RANGE_BYTES + 1):
        with pytest.raises(BlockNotFoundError):
            pool.read_ranges([RangeRead(location, 0, memoryview(bytearray(size)))])
    assert fetch(pool, location)[0] == make_range("a", 0)


def test_5_one_missing_block_among_many_fails_the_call_and_no_other(pool: PoolNode) -> None:
    places = [store(pool, name) for name in "abc"]
    gone = replace(places[1], generation=places[1].generation + 1)
    buffers = [bytearray(RANGE_BYTES) for _ in range(3)]
    reads = [
        RangeRead(place, 0, memoryview(buffer))
        for place, buffer in zip((places[0], gone, places[2]), buffers, strict=True)
    ]
    for _ in range(3):
        with pytest.raises((StaleEpochError, BlockNotFoundError)):
            pool.read_ranges(reads)
        assert fetch(pool, places[2]) == [make_range("c", 0), make_range("c", 1)]


def test_5_a_flipped_bit_is_found_and_the_slot_quarantined(pool: PoolNode, rig: Rig) -> None:
    location = store(pool, "a")
    healthy = store(pool, "b")
    flip_bit(rig, location.slot, at=RANGE_BYTES + 17)
    assert fetch(pool, location, [0]) == [make_range("a", 0)]
    with pytest.raises(ChecksumError):
        fetch(pool, location, [1])
    assert pool.stats().quarantined_slots == 1
    assert pool.lookup([block_key("a"), block_key("b")]) == [None, healthy]
    again = store(pool, "a")
    assert again.slot != location.slot
    assert fetch(pool, again) == [make_range("a", 0), make_range("a", 1)]


def flip_bit(rig: Rig, slot: int, *, at: int) -> None:
    segment = rig.node.segment
    assert segment is not None
    view = segment.payload(slot, 48 << 10, at, at + 1)
    view[0] ^= 4


def test_6_hold_keeps_blocks_until_release(pool: PoolNode) -> None:
    kept = store(pool, "kept")
    assert pool.hold([kept], ttl_s=60.0) == [True]
    for i in range(25):
        store(pool, f"next-{i}")
    assert fetch(pool, kept)[0] == make_range("kept", 0)
    pool.release([kept])
    for i in range(25):
        store(pool, f"more-{i}")
    assert pool.hold([kept], ttl_s=60.0) == [False]


def test_6_a_hold_ends_with_its_ttl(pool: PoolNode, rig: Rig) -> None:
    kept = store(pool, "kept")
    assert pool.hold([kept], ttl_s=60.0) == [True]
    clock_of(rig).advance(61.0)
    for i in range(25):
        store(pool, f"next-{i}")
    assert pool.lookup([block_key("kept")]) == [None]


def test_7_after_close_every_call_raises(pool: PoolNode) -> None:
    location = store(pool, "a")
    (grant,) = pool.reserve([make_put("b")])
    assert grant is not None
    pool.close()
    calls: list[Callable[[], object]] = [
        lambda: pool.lookup([block_key("a")]),
        lambda: pool.reserve([make_put("c")]),
        lambda: pool.write_ranges([RangeWrite(grant, 0, memoryview(make_range("b", 0)))]),
        lambda: pool.abort([grant]),
        lambda: fetch(pool, location),
        lambda: pool.hold([location], ttl_s=1.0),
        lambda: pool.release([location]),
        lambda: pool.put([make_put("c")], [whole("c")]),
        lambda: pool.promote([block_key("a")]),
        lambda: pool.erase([block_key("a")]),
        lambda: pool.stats(),
    ]
    for call in calls:
        with pytest.raises(TransportError):
            call()


def whole(name: str) -> memoryview:
    return memoryview(make_range(name, 0) + make_range(name, 1))


def test_8_put_stores_whole_blocks_in_one_go(pool: PoolNode) -> None:
    store(pool, "here")
    names = ["here", "a", "b", "b"]
    puts = [make_put(name, "a" if name == "b" else None) for name in names]
    places = pool.put(puts, [whole(name) for name in names])
    assert places[0] is None and places[3] is None
    assert pool.lookup([block_key("a"), block_key("b")]) == places[1:3]
    for name, place in zip("ab", places[1:3], strict=True):
        assert place is not None
        assert fetch(pool, place) == [make_range(name, 0), make_range(name, 1)]
    assert pool.stats().slots_writing == 0
    assert pool.put([], []) == []


def test_8_put_answers_none_where_no_slot_can_be_freed(pool: PoolNode) -> None:
    held = [store(pool, f"n{i}") for i in range(20)]
    assert pool.hold(held, ttl_s=60.0) == [True] * 20
    assert pool.put([make_put("late")], [whole("late")]) == [None]
    pool.release(held)
    (place,) = pool.put([make_put("late")], [whole("late")])
    assert place is not None
    assert fetch(pool, place) == [make_range("late", 0), make_range("late", 1)]


def test_8_put_of_what_is_being_written_is_none_and_of_a_wrong_size_an_error(
    pool: PoolNode,
) -> None:
    (grant,) = pool.reserve([make_put("a")])
    assert grant is not None
    assert pool.put([make_put("a")], [whole("a")]) == [None]
    with pytest.raises(CacheError):
        pool.put([make_put("b")], [whole("b")[:-1]])
    assert pool.stats().slots_writing == 1
    pool.abort([grant])


def test_9_promote_is_lookup_for_blocks_in_memory(pool: PoolNode) -> None:
    place = store(pool, "a")
    assert pool.promote([block_key("a"), block_key("b")]) == [place, None]


def test_10_register_changes_nothing_and_the_path_has_a_reason(
    pool: PoolNode, transport: str
) -> None:
    place = store(pool, "a")
    buffers = [bytearray(RANGE_BYTES) for _ in range(2)]
    for buffer in buffers:
        pool.register(memoryview(buffer))
    pool.read_ranges([RangeRead(place, i, memoryview(b)) for i, b in enumerate(buffers)])
    assert [bytes(b) for b in buffers] == [make_range("a", 0), make_range("a", 1)]
    assert pool.path.transport == transport.split("+")[0] and pool.path.reason


def test_12_erase_leaves_no_byte_of_held_and_leased_blocks(pool: PoolNode, rig: Rig) -> None:
    places = [store(pool, name) for name in ("gone", "held", "kept")]
    assert pool.hold([places[1]], ttl_s=60.0) == [True]
    rig.node.gets.lease(HoldOrder(LeaseId(1), (block_key("gone"),), 60.0))
    keys = [block_key("gone"), block_key("held"), block_key("never")]
    assert pool.erase(keys) == Erased(2, 4 * RANGE_BYTES)
    assert pool.lookup([*keys, block_key("kept")]) == [None, None, None, places[2]]
    with pytest.raises(CacheError):
        fetch(pool, places[0])
    raw = rig.node.segment.path.read_bytes()
    assert make_range("kept", 0) in raw
    assert make_range("gone", 0) not in raw and make_range("held", 1) not in raw
    assert pool.erase(keys) == Erased()
    again = store(pool, "gone")
    assert fetch(pool, again)[0] == make_range("gone", 0)


def test_12_erase_waits_for_transfers_and_ends_reservations(pool: PoolNode, rig: Rig) -> None:
    place = store(pool, "read")
    (grant,) = pool.reserve([make_put("written")])
    assert grant is not None
    ticket = rig.node.gets.begin_read([as_ref(RangeRef(place, 0))])
    erased: list[Erased] = []
    eraser = threading.Thread(
        target=lambda: erased.append(pool.erase([block_key("read"), block_key("written")]))
    )
    eraser.start()
    while pool.lookup([block_key("read")]) != [None]:
        """The test's deadline ends a block that stays."""
    assert bytes(ticket.views[0]) == make_range("read", 0) and not erased
    rig.node.gets.end_read(ticket)
    eraser.join()
    assert erased == [Erased(1, 2 * RANGE_BYTES)]
    assert make_range("read", 0) not in rig.node.segment.path.read_bytes()
    assert pool.seal([grant]) == [None]


def test_reads_make_a_block_young(connect: Connect, start: MakeRig) -> None:
    rig = start()
    pool = connect(rig)
    try:
        places = [store(pool, f"b{i}") for i in range(20)]
        clock_of(rig).advance(SAME_USE_S)  # Else they belong to the use that stored the block.
        fetch(pool, places[0])
        store(pool, "new")
        assert pool.lookup([block_key("b0"), block_key("b1")]) == [places[0], None]
    finally:
        pool.close()


def test_a_restarted_node_is_found_again(transport: str, connect: Connect, start: MakeRig) -> None:
    if transport == "inproc":
        pytest.skip("a client in the node's process ends with it")
    rig = start(port=0)
    port = int(rig.server.address.rpartition(":")[2])
    rig.stop()
    rig = start(port=port)
    pool = connect(rig)
    try:
        location = store(pool, "a")
        rig.restart()
        with pytest.raises(StaleEpochError):
            fetch(pool, location)
        (found,) = pool.lookup([block_key("a")])
        assert found is not None and found.incarnation > location.incarnation
        assert fetch(pool, found) == [make_range("a", 0), make_range("a", 1)]
        rig.stop()
        with pytest.raises(TransportError):
            pool.lookup([block_key("a")])
    finally:
        pool.close()
