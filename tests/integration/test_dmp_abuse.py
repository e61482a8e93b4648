"""Peers that are slow, greedy, late or wrong: each is refused clearly, and the node serves on."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator

import pytest

from tests.fix_dmp import RANGE_BYTES, Rig, block_key, fetch, make_put, make_range, store
from tierkv.dmp.pool_node import RangeRead
from tierkv.dmp.server.server import DmpServer
from tierkv.dmp.transport.connection import Peer
from tierkv.dmp.transport.tcp import TcpPoolNode
from tierkv.dmp.wire import messages as m
from tierkv.dmp.wire.frame import FrameType, pack_header, parse_header
from tierkv.dmp.wire.range_codec import pack_ranges
from tierkv.kvcore.block import BlockSpec, Location, RangeShape
from tierkv.kvwire.frames import HEADER_BYTES

pytestmark = pytest.mark.integration
MakeRig = Callable[..., Rig]


def frame(kind: FrameType, head: bytes = b"", payload: bytes = b"") -> bytes:
    return pack_header(kind, 1, head_bytes=len(head), payload_bytes=len(payload)) + head + payload


HELLO = frame(FrameType.HELLO, m.Hello("", "c0ffee").pack())


def dial(address: str) -> socket.socket:
    host, port = address.split(":")
    return socket.create_connection((host, int(port)), timeout=10)


def answer(sock: socket.socket) -> tuple[str, bytes]:
    """The next frame's type name and what follows its header."""
    header = parse_header(exactly(sock, HEADER_BYTES))
    return header.type.name, exactly(sock, header.head_bytes + header.payload_bytes)


def exactly(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = sock.recv(size - len(data))
        if not part:
            raise EOFError
        data += part
    return data


def is_dropped(sock: socket.socket) -> bool:
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            answer(sock)
    return True


@pytest.fixture
def rig(make_rig: MakeRig) -> Rig:
    return make_rig()


@pytest.fixture
def hasty(make_rig: MakeRig) -> Rig:
    """A node that waits only a moment for a frame's end."""
    return make_rig("dmp-h", frame_timeout_s=0.2)


@pytest.fixture
def pool(rig: Rig) -> Iterator[TcpPoolNode]:
    made = TcpPoolNode(Peer(rig.node.node_id, rig.server.address), host=rig.node.host)
    yield made
    made.close()


@pytest.fixture
def peer(rig: Rig) -> Iterator[socket.socket]:
    with greeted(rig.server.address) as sock:
        yield sock


def greeted(address: str) -> socket.socket:
    sock = dial(address)
    sock.sendall(HELLO)
    assert answer(sock)[0] == "REPLY"
    return sock


def one_range(place: Location, *, size: int = RANGE_BYTES, **changes: int) -> bytes:
    values = {
        "incarnation": int(place.incarnation), "segment": place.segment, "slot": place.slot,
        "generation": place.generation, "index": 0, "size": size,
    } | changes  # fmt: skip
    return pack_ranges([tuple(values.values())])  # type: ignore[list-item]


def small_put(name: str) -> tuple[bytes, bytes]:
    """A PUT of two ranges of five bytes, as head and payload (with checksums)."""
    put = make_put(name, range_bytes=5)
    return m.Put([put]).pack(), b"0123456789" + bytes(16)


def test_a_peer_that_stops_inside_a_frame_is_dropped(hasty: Rig) -> None:
    with greeted(hasty.server.address) as peer:
        peer.sendall(HELLO[:7])
        assert is_dropped(peer)


@pytest.mark.parametrize("inside", ["header", "head", "payload"])
def test_dripping_bytes_gains_no_time(hasty: Rig, inside: str) -> None:
    put = make_put("a", range_bytes=500)
    head, payload = m.Put([put]).pack(), bytes(1016)
    whole = frame(FrameType.PUT, head, payload)
    sent = {"header": 0, "head": HEADER_BYTES, "payload": HEADER_BYTES + len(head)}[inside]
    with greeted(hasty.server.address) as peer:
        peer.sendall(whole[:sent])
        with contextlib.suppress(ConnectionError):
            # Each byte comes inside the deadline of a single read; the frame's is what ends it.
            while not select.select([peer], [], [], 0.02)[0]:
                peer.sendall(whole[sent : sent + 1])
                sent += 1
                assert sent < len(whole), "the whole frame was taken, one byte after the other"
        assert is_dropped(peer)
    assert hasty.node.reports.stats().slots_writing == 0


def test_dripping_a_refused_payload_gains_no_time(hasty: Rig) -> None:
    place = Location(hasty.node.node_id, hasty.node.incarnation, 0, 1, 99, 10)
    piece = bytes(256 << 10)
    head = one_range(place, size=40 * len(piece))
    lead = pack_header(FrameType.WRITE, 1, head_bytes=len(head), payload_bytes=40 * len(piece))
    with greeted(hasty.server.address) as peer:
        peer.sendall(lead + head)
        with contextlib.suppress(ConnectionError):
            for _ in range(20):
                # Each piece comes inside the deadline of a single read; the frame's ends it.
                peer.sendall(piece)
                if select.select([peer], [], [], 0.1)[0]:
                    break
            else:
                raise AssertionError("the node goes on listening")
        assert is_dropped(peer)


def test_a_stranger_has_a_moment_to_say_hello(rig: Rig) -> None:
    server = DmpServer(rig.node, hello_timeout_s=0.15)
    server.start()
    with dial(server.address) as silent, dial(server.address) as slow:
        slow.sendall(HELLO[:9])
        assert is_dropped(silent) and is_dropped(slow)
    server.stop()


def test_strangers_are_few_and_keep_nobody_out_for_long(rig: Rig) -> None:
    server = DmpServer(rig.node, hello_timeout_s=0.3, max_strangers=3)
    server.start()
    with contextlib.ExitStack() as stack:
        known = stack.enter_context(dial(server.address))
        known.sendall(HELLO)
        assert answer(known)[0] == "REPLY"
        strangers = [stack.enter_context(dial(server.address)) for _ in range(6)]
        assert is_dropped(strangers[-1])
        known.sendall(frame(FrameType.STATS))
        assert answer(known)[0] == "REPLY"
        assert all(is_dropped(sock) for sock in strangers)
        late = stack.enter_context(dial(server.address))
        late.sendall(HELLO)
        assert answer(late)[0] == "REPLY"
    server.stop()


def test_a_peer_that_does_not_read_blocks_only_itself_and_not_for_long(
    make_rig: MakeRig,
) -> None:
    rig = make_rig(frame_timeout_s=0.3, capacity_bytes=64 << 20, extent_bytes=32 << 20)
    pool = TcpPoolNode(Peer(rig.node.node_id, rig.server.address), host=rig.node.host)
    data = memoryview(bytes(16 << 20))
    put = BlockSpec(block_key("big"), block_key("root"), 64, ranges=RangeShape(len(data), 1))
    (place,) = pool.put([put], [data])
    assert place is not None
    with dial(rig.server.address) as greedy:
        greedy.sendall(HELLO)
        assert answer(greedy)[0] == "REPLY"
        ask = frame(FrameType.READ, one_range(place, size=len(data)))
        greedy.sendall(ask * 4)
        small = store(pool, "small")
        assert fetch(pool, small)[0] == make_range("small", 0)
        while len(rig.server._sessions) > 1:  # pytest-timeout is the deadline
            threading.Event().wait(0.01)
    buffer = bytearray(len(data))
    pool.read_ranges([RangeRead(place, 0, memoryview(buffer))])
    assert buffer == data
    pool.close()


def test_a_stop_waits_for_nobody_who_waits_for_a_greedy_peer(make_rig: MakeRig) -> None:
    rig = make_rig(frame_timeout_s=20.0, capacity_bytes=64 << 20, extent_bytes=32 << 20)
    pool = TcpPoolNode(Peer(rig.node.node_id, rig.server.address), host=rig.node.host)
    data = memoryview(bytes(31 << 20))
    put = BlockSpec(block_key("big"), block_key("root"), 64, ranges=RangeShape(len(data), 1))
    (place,) = pool.put([put], [data])
    assert place is not None
    pool.close()
    ask = frame(FrameType.READ, one_range(place, size=len(data)))
    with greeted(rig.server.address) as patient, greeted(rig.server.address) as greedy:
        greedy.sendall(ask)
        while not rig.node.turns.pinned_bytes:  # pytest-timeout is the deadline
            threading.Event().wait(0.01)
        patient.sendall(ask)
        while not rig.node.turns.waiting:
            threading.Event().wait(0.01)
        began = time.monotonic()
        rig.server.stop()
        assert time.monotonic() - began < 10.0


def test_a_refused_payload_takes_no_memory(rig: Rig, peer: socket.socket) -> None:
    size = 64 << 20
    place = Location(rig.node.node_id, rig.node.incarnation, 0, 1, 99, 10)
    head = one_range(place, size=size)
    lead = pack_header(FrameType.WRITE, 1, head_bytes=len(head), payload_bytes=size)
    block = bytes(1 << 20)
    tracemalloc.start()
    try:
        peer.sendall(lead + head)
        for _ in range(size // len(block)):
            peer.sendall(block)
        name, body = answer(peer)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (name, m.ErrorReply.unpack(body).code) == ("ERROR", "block_not_found")
    assert peak < 4 << 20
    peer.sendall(frame(FrameType.STATS))
    assert answer(peer)[0] == "REPLY"


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"incarnation": 1}, "stale_epoch"),
        ({"segment": 1}, "block_not_found"),
        ({"slot": 1 << 62}, "block_not_found"),
        ({"slot": 3}, "block_not_found"),
        ({"generation": 1 << 62}, "stale_epoch"),
        ({"index": 2}, "block_not_found"),
        ({"size": RANGE_BYTES + 1}, "block_not_found"),
        ({"size": 0}, "block_not_found"),
    ],
)
def test_what_does_not_exist_is_named_and_the_connection_lives(
    rig: Rig, pool: TcpPoolNode, peer: socket.socket, changes: dict[str, int], code: str
) -> None:
    place = store(pool, "a")
    peer.sendall(frame(FrameType.READ, one_range(place, **changes)))
    name, body = answer(peer)
    assert (name, m.ErrorReply.unpack(body).code) == ("ERROR", code)
    (slot,) = rig.node.puts.reserve([make_put("b")])
    assert slot is not None
    payload = bytes(changes.get("size", RANGE_BYTES))
    peer.sendall(frame(FrameType.WRITE, one_range(slot, **changes), payload))
    assert answer(peer)[0] == "ERROR"
    peer.sendall(frame(FrameType.READ, one_range(place)))
    name, body = answer(peer)
    assert name == "REPLY" and body.endswith(make_range("a", 0))


def test_a_sealed_slot_can_not_be_written(rig: Rig, pool: TcpPoolNode, peer: socket.socket) -> None:
    place = store(pool, "a")
    peer.sendall(frame(FrameType.WRITE, one_range(place), bytes(RANGE_BYTES)))
    assert answer(peer)[0] == "ERROR"
    assert fetch(pool, place)[0] == make_range("a", 0)


@pytest.mark.parametrize("payload", [b"", b"012345678", b"01234567890"])
def test_a_put_as_long_as_it_says_or_none(rig: Rig, peer: socket.socket, payload: bytes) -> None:
    head, _ = small_put("a")
    peer.sendall(frame(FrameType.PUT, head, payload))
    name, body = answer(peer)
    assert (name, m.ErrorReply.unpack(body).code) == ("ERROR", "remote_protocol_error")
    assert is_dropped(peer)
    assert rig.node.reports.stats().slots_writing == 0


def test_a_connection_may_end_after_any_byte(rig: Rig) -> None:
    (place,) = rig.node.puts.reserve([make_put("grant", range_bytes=5)])
    assert place is not None
    head, payload = small_put("put")
    talk = (
        HELLO
        + frame(FrameType.LOOKUP, m.BlockLookup([block_key("a")]).pack())
        + frame(FrameType.RESERVE, m.Reserve(30.0, [make_put("b", range_bytes=5)]).pack())
        + frame(FrameType.WRITE, one_range(place, size=5), b"12345")
        + frame(FrameType.PUT, head, payload)
    )
    for cut in range(len(talk)):
        with dial(rig.server.address) as sock:
            sock.sendall(talk[:cut])
            sock.shutdown(socket.SHUT_WR)
            assert is_dropped(sock)
    while rig.server._sessions:  # pytest-timeout is the deadline
        threading.Event().wait(0.005)
    assert rig.node.reports.stats().slots_writing == 1, (
        "only the grant of nobody's connection is left"
    )
    assert rig.node.gets.lookup([block_key("put")]) == [None]
    rig.node.check_invariants()
