"""What goes wrong on an RDMA network, made to go wrong: a read never fails while TCP works."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import xxhash

from tests.fix_dmp import RANGE_BYTES, Rig, block_key, fetch, make_put, make_range, store
from tests.fix_rdma import CABLES, RDMA, SERVED, SMALL, USED, OpenVerbs
from tierkv.dmp.pool_node import RangeRead, RangeWrite
from tierkv.dmp.segment.segment_place import PAGE
from tierkv.dmp.transport.connection import Peer
from tierkv.dmp.transport.verbs.device import Op
from tierkv.dmp.transport.verbs.fabric import Bounce, address_of, local_fabric
from tierkv.dmp.transport.verbs.lane import MemorySpan, VerbsSettings
from tierkv.dmp.transport.verbs.link import LinkSettings, RailLink, TransferJob, run_jobs
from tierkv.dmp.transport.verbs.node import Landing, VerbsPoolNode
from tierkv.dmp.transport.verbs.rails import Piece
from tierkv.kvcore.block import Location
from tierkv.kvcore.clock import ManualClock, SystemClock
from tierkv.kvcore.errors import BlockNotFoundError, CacheError, TransportError

pytestmark = RDMA
BOTH = [make_range("a", 0), make_range("a", 1)]
STRIPED = replace(SMALL, stripe_bytes=1, chunk_bytes=8 << 10)
SetCable = Callable[[str, bool], None]


@pytest.fixture
def rig(make_rig: Callable[..., Rig]) -> Rig:
    return make_rig(rdma_devices=SERVED)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


def wait_until(condition: Callable[[], bool], *, deadline_s: float = 30.0) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, "not in time"
        threading.Event().wait(0.05)


def sent_bytes(interface: str) -> int:
    return int(Path(f"/sys/class/net/{interface}/statistics/tx_bytes").read_text())


# Rails


def test_a_transfer_is_striped_over_both_cables(rig: Rig, open_verbs: OpenVerbs) -> None:
    pool = open_verbs(rig, settings=STRIPED)
    before = [sent_bytes(name) for name in CABLES]
    location = store(pool, "a")
    assert fetch(pool, location) == BOTH
    moved = [sent_bytes(name) - b for name, b in zip(CABLES, before, strict=True)]
    # Written bytes leave from our side of each cable.
    assert min(moved) > RANGE_BYTES / 2, moved
    assert pool.path.transport == "rdma" and pool.path.reason == "rxe0-rxe1, rxe2-rxe3"


def test_a_cut_cable_trips_its_rail_and_traffic_moves_on(
    rig: Rig, open_verbs: OpenVerbs, cables: SetCable, clock: ManualClock
) -> None:
    pool = open_verbs(rig, settings=STRIPED, clock=clock)
    location = store(pool, "a")
    cables("rdma0", False)
    for _ in range(3):
        assert fetch(pool, location) == BOTH
    assert pool.path.transport == "rdma"
    assert pool.path.reason.startswith("rxe0-rxe1 down (") and "rxe2-rxe3" in pool.path.reason
    cables("rdma0", True)
    clock.advance(31.0)
    before = sent_bytes("rdma0")
    assert fetch(pool, location) == BOTH
    assert sent_bytes("rdma0") > before
    assert pool.path.reason == "rxe0-rxe1, rxe2-rxe3"


def test_without_any_rail_bytes_go_over_tcp_which_is_said_once(
    rig: Rig,
    open_verbs: OpenVerbs,
    cables: SetCable,
    clock: ManualClock,
    caplog: pytest.LogCaptureFixture,
) -> None:
    pool = open_verbs(rig, devices=("rxe0",), clock=clock)
    location = store(pool, "a")
    cables("rdma0", False)
    with caplog.at_level(logging.INFO):
        for _ in range(4):
            assert fetch(pool, location) == BOTH
        assert store(pool, "b")
    said = [record.message for record in caplog.records if "bytes go over TCP" in record.message]
    assert len(said) == 1, said
    assert pool.path.transport == "tcp" and "no RDMA rail works" in pool.path.reason
    cables("rdma0", True)
    clock.advance(31.0)
    with caplog.at_level(logging.INFO):
        assert fetch(pool, location) == BOTH
    assert "bytes go over RDMA again" in caplog.text
    assert pool.path.transport == "rdma"


def test_a_node_without_a_door_is_reached_over_tcp(
    make_rig: Callable[..., Rig], open_verbs: OpenVerbs, rig: Rig
) -> None:
    closed = make_rig("dmp-b", rdma="off")
    assert open_verbs(rig).board.ask() == ""
    peer = Peer(closed.node.node_id, closed.server.address)
    fabric = local_fabric(USED)
    assert not isinstance(fabric, str)
    refused = VerbsPoolNode(peer, fabric, host=closed.node.host)
    assert refused.board.ask() == "dmp-b: the node is configured without RDMA"
    assert refused.path.transport == "tcp"
    refused.close()


# Access: what the node's device lets a peer do


@pytest.fixture
def direct(rig: Rig):
    """One link of our own to the node, and registered memory; past all checks of VerbsPoolNode."""
    fabric = local_fabric(("rxe0",))
    assert not isinstance(fabric, str)
    bounce = Bounce(fabric, 64 << 10)
    peer = Peer(rig.node.node_id, rig.server.address)
    links: list[RailLink] = []

    def connect() -> RailLink:
        links.append(RailLink(fabric.devices[0], 0, peer, "rxe1", LinkSettings()))
        return links[-1]

    def run(link: RailLink, op: Op, at: int, size: int = 64) -> TransportError | None:
        job = TransferJob(Piece(bounce.memory.start, at, size), bounce.memory)
        return run_jobs(op, [(link, [job])], SystemClock()).get(link)

    yield connect, run
    for link in links:
        link.close()
    bounce.close()


def test_headers_can_be_read_but_not_written(rig: Rig, direct) -> None:
    connect, run = direct
    link = connect()
    at = link.accept.geometry.header_offset(0)
    before = bytes(rig.node.segment.memory[: link.accept.geometry.payload_at])
    assert run(link, Op.READ, at) is None
    assert "refused" in str(run(link, Op.WRITE, at))
    assert bytes(rig.node.segment.memory[: link.accept.geometry.payload_at]) == before


def test_a_wrong_key_and_bytes_outside_the_segment_are_refused(rig: Rig, direct) -> None:
    connect, run = direct
    link = connect()
    payload = link.accept.payload
    at = link.accept.geometry.payload_at
    assert run(link, Op.WRITE, at) is None
    link.accept = replace(link.accept, payload=replace(payload, rkey=payload.rkey ^ 0x55))
    assert "refused" in str(run(link, Op.READ, at))
    link = connect()
    beyond = replace(payload, address=payload.address + link.accept.geometry.file_bytes)
    link.accept = replace(link.accept, payload=beyond)
    assert "refused" in str(run(link, Op.WRITE, at))


def test_a_wrong_key_costs_a_new_connection_not_the_read(rig: Rig, open_verbs: OpenVerbs) -> None:
    pool = open_verbs(rig, devices=("rxe0",))
    location = store(pool, "a")
    (lane,) = pool._lanes._idle
    (link,) = lane._links.values()
    payload = link.accept.payload
    link.accept = replace(link.accept, payload=replace(payload, rkey=payload.rkey ^ 0x55))
    assert fetch(pool, location) == BOTH
    assert pool.path.transport == "rdma"
    assert link not in lane._links.values()


def test_deregistered_memory_is_reached_over_tcp(rig: Rig, open_verbs: OpenVerbs) -> None:
    pool = open_verbs(rig, devices=("rxe0",))
    location = store(pool, "a")
    assert rig.server._rdma is not None
    hall = rig.server._rdma._halls["rxe1"]
    hall._regions.pop().close()
    assert fetch(pool, location) == BOTH
    assert pool.path.transport == "tcp" and "refused by the peer" in pool.path.reason


def test_a_connection_ends_its_queue_pair(rig: Rig, direct) -> None:
    connect, run = direct
    link = connect()
    at = link.accept.geometry.payload_at
    assert run(link, Op.READ, at) is None
    link._control.close()
    door = rig.server._rdma
    assert door is not None
    wait_until(lambda: not door._guests)
    assert "no answer" in str(run(link, Op.READ, at))


def test_keys_are_not_in_any_repr(direct) -> None:
    link = direct[0]()
    for area in (link.accept.headers, link.accept.payload):
        assert str(area.rkey) not in repr(link.accept)


# Memory


def test_registered_memory_is_filled_without_a_copy(rig: Rig, open_verbs: OpenVerbs) -> None:
    pool = open_verbs(rig)
    location = store(pool, "a")
    buffer = bytearray(4 * PAGE + 2 * RANGE_BYTES)
    whole = memoryview(buffer)
    pool.register(whole)
    parts = [whole[PAGE:][i * RANGE_BYTES :][:RANGE_BYTES] for i in (0, 1)]
    with pool._lanes.one() as lane:
        (wave,) = lane.waves(
            [MemorySpan(address_of(part), len(part), PAGE, part) for part in parts]
        )
        assert not wave.copies
    pool.read_ranges([RangeRead(location, i, part) for i, part in enumerate(parts)])
    assert [bytes(part) for part in parts] == BOTH


def test_ranges_larger_than_the_bounce_buffer(
    make_rig: Callable[..., Rig], open_verbs: OpenVerbs
) -> None:
    size = 600_000
    rig = make_rig("big", rdma_devices=SERVED, capacity_bytes=4 << 20, extent_bytes=4 << 20)
    settings = VerbsSettings(lanes=1, bounce_bytes=256 << 10, chunk_bytes=100_000)
    pool = open_verbs(rig, settings=settings)
    (grant,) = pool.reserve([make_put("a", range_bytes=size)])
    assert grant is not None
    data = [make_range("a", i, size) for i in (0, 1)]
    pool.write_ranges([RangeWrite(grant, i, memoryview(d)) for i, d in enumerate(data)])
    (location,) = pool.seal([grant])
    assert location is not None
    found = [bytearray(size) for _ in data]
    pool.read_ranges([RangeRead(location, i, memoryview(b)) for i, b in enumerate(found)])
    assert found == data


def test_many_ranges_in_one_call(make_rig: Callable[..., Rig], open_verbs: OpenVerbs) -> None:
    rig = make_rig("many", rdma_devices=SERVED)
    pool = open_verbs(rig)
    put = make_put("a", range_bytes=64, range_count=40)
    (grant,) = pool.reserve([put])
    assert grant is not None
    data = [make_range("a", i, 64) for i in range(40)]
    pool.write_ranges([RangeWrite(grant, i, memoryview(d)) for i, d in enumerate(data)])
    (location,) = pool.seal([grant])
    assert location is not None
    order = [i * 7 % 40 for i in range(600)]
    found = [bytearray(64) for _ in order]
    pool.read_ranges(
        [RangeRead(location, i, memoryview(b)) for i, b in zip(order, found, strict=True)]
    )
    assert found == [data[i] for i in order]


# Races


def test_readers_beside_writers_get_the_right_bytes_or_a_miss(
    rig: Rig, open_verbs: OpenVerbs
) -> None:
    pool = open_verbs(rig)
    places: dict[str, Location] = {}
    wrong: list[str] = []
    misses = [0]

    def write(names: Sequence[str]) -> None:
        for name in names:
            places[name] = store(pool, name)

    def read() -> None:
        for _ in range(40):
            for name, location in list(places.items())[-3:]:
                try:
                    if fetch(pool, location) != [make_range(name, 0), make_range(name, 1)]:
                        wrong.append(name)
                except CacheError:
                    misses[0] += 1

    names = [f"n{i}" for i in range(40)]
    threads = [threading.Thread(target=write, args=(names,))]
    threads += [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and len(places) == 40
    assert rig.node.reports.stats().quarantined_slots == 0
    assert rig.node.reports.stats().memory.evicted_blocks > 0


def test_bytes_land_in_memory_only_the_device_reaches(rig: Rig, open_verbs: OpenVerbs) -> None:
    # Host memory stands in for a GPU's: the path is the same but for its registration.
    pool = open_verbs(rig)
    location = store(pool, "a")
    buffer = bytearray(2 * RANGE_BYTES)
    start = address_of(memoryview(buffer))
    targets = [Landing(location, i, start + i * RANGE_BYTES, RANGE_BYTES) for i in (0, 1)]
    with pytest.raises(TransportError, match="registered before"):
        pool.land(targets)
    pool.register(memoryview(buffer))
    assert pool.land(targets) == [xxhash.xxh3_64_intdigest(data) for data in BOTH]
    assert buffer == b"".join(BOTH)


def test_gpu_memory_without_a_gpu_is_refused_in_words() -> None:
    fabric = local_fabric(("rxe0",))
    assert not isinstance(fabric, str)
    with pytest.raises(TransportError, match="GPU"):
        fabric.register_gpu(1 << 40, PAGE, pci_address="0000:3b:00.0")


def test_work_that_fails_half_way_leaves_nothing_in_flight(rig: Rig, open_verbs: OpenVerbs) -> None:
    pool = open_verbs(rig)
    location = store(pool, "a")
    with pool._lanes.one() as lane:
        link = lane.link(location.incarnation)
        end = link.accept.geometry.file_bytes
        good = Piece(lane.bounce.memory.start, PAGE, 64)
        beyond = Piece(lane.bounce.memory.start, end, 64)
        with pytest.raises(BlockNotFoundError):
            lane.move(
                Op.READ,
                [TransferJob(good, lane.bounce.memory), TransferJob(beyond, lane.bounce.memory)],
                location.incarnation,
                SystemClock(),
            )
        assert not lane._links
    assert fetch(pool, location) == BOTH


def test_a_node_that_was_away_is_reached_over_rdma_at_once(rig: Rig, open_verbs: OpenVerbs) -> None:
    port = int(rig.server.address.rpartition(":")[2])
    rig.node.config = replace(rig.node.config, port=port)
    rig.restart()
    pool = open_verbs(rig)
    location = store(pool, "a")
    rig.stop()
    for _ in range(3):
        with pytest.raises(TransportError):
            fetch(pool, location)
    rig.__init__(rig.node.config, rig.clock)  # type: ignore[misc]
    (found,) = pool.lookup([block_key("a")])
    assert found is not None
    assert fetch(pool, found) == BOTH
    assert pool.path.transport == "rdma"


def test_a_client_that_leaves_frees_what_it_reserved(rig: Rig, open_verbs: OpenVerbs) -> None:
    pool = open_verbs(rig)
    store(pool, "a")
    (grant,) = pool.reserve([make_put("b")])
    assert grant is not None and pool.stats().slots_writing == 1
    pool.close()
    wait_until(lambda: rig.node.reports.stats().slots_writing == 0)


def test_nodes_share_bounce_buffers(
    rig: Rig, make_rig: Callable[..., Rig], open_verbs: OpenVerbs
) -> None:
    other = make_rig("dmp-b", rdma_devices=SERVED)
    pools = [open_verbs(rig), open_verbs(other)]
    fabric = pools[0]._fabric
    for pool in pools:
        store(pool, "a")
    assert pools[1]._fabric is fabric
    assert len([b for b in fabric._bounces if len(b.view) > SMALL.bounce_bytes]) <= 2
