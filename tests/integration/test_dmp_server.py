"""The data plane against peers that misbehave, over real sockets."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fix_chaos import HOLE, ChaosProxy
from tests.fix_cluster import wait_for
from tests.fix_dmp import RANGE_BYTES, Rig, block_key, fetch, make_put, make_range, store
from tierkv.dmp.pool_node import RangeRead, RangeWrite
from tierkv.dmp.server.server import DmpServer
from tierkv.dmp.transport.connection import Peer
from tierkv.dmp.transport.select import connect_pool_node
from tierkv.dmp.transport.shm import ShmPoolNode
from tierkv.dmp.transport.tcp import TcpPoolNode
from tierkv.dmp.wire import messages as m
from tierkv.dmp.wire.frame import FrameType, pack_header, parse_header
from tierkv.dmp.wire.range_codec import pack_ranges
from tierkv.kvcore.block import Location
from tierkv.kvcore.errors import CacheError, ConfigError, TransportError
from tierkv.kvcore.ids import HostId, NodeId
from tierkv.kvwire.frames import HEADER_BYTES

pytestmark = pytest.mark.integration
MakeRig = Callable[..., Rig]


class RawPeer:
    """A client that says what it likes."""

    def __init__(self, rig: Rig, *, hello: bool = True) -> None:
        host, port = rig.server.address.split(":")
        self.sock = socket.create_connection((host, int(port)), timeout=10)
        if hello:
            assert self.ask(FrameType.HELLO, m.Hello(rig.node.config.token).pack())[0] == "REPLY"

    def send(self, kind: FrameType, head: bytes, payload: bytes = b"", *, id: int = 1) -> None:
        lead = pack_header(kind, id, head_bytes=len(head), payload_bytes=len(payload))
        self.sock.sendall(lead + head + payload)

    def receive(self) -> tuple[str, bytes]:
        """The next frame's type and everything in it."""
        header = parse_header(self._take(HEADER_BYTES))
        return header.type.name, self._take(header.head_bytes + header.payload_bytes)

    def ask(self, kind: FrameType, head: bytes, payload: bytes = b"") -> tuple[str, bytes]:
        self.send(kind, head, payload)
        return self.receive()

    def _take(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            part = self.sock.recv(size - len(data))
            if not part:
                raise EOFError
            data += part
        return data

    def is_dropped(self) -> bool:
        """Whether the server closed the connection, after at most an ERROR frame."""
        try:
            while self.receive():
                pass
        except (EOFError, ConnectionResetError):
            return True
        return False

    def close(self) -> None:
        self.sock.close()


@pytest.fixture
def rig(make_rig: MakeRig) -> Rig:
    return make_rig()


@pytest.fixture
def peer(rig: Rig) -> Iterator[RawPeer]:
    made = RawPeer(rig)
    yield made
    made.close()


def tcp(rig: Rig, token: str = "") -> TcpPoolNode:
    return TcpPoolNode(Peer(rig.node.node_id, rig.server.address, token), host=rig.node.host)


def assert_alive(rig: Rig) -> None:
    pool = tcp(rig, rig.node.config.token)
    try:
        pool.stats()
        place = pool.lookup([block_key("alive")])[0] or store(pool, "alive")
        assert fetch(pool, place)[0] == make_range("alive", 0)
    finally:
        pool.close()


@pytest.mark.parametrize(
    "raw",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"TKVD\x01\x01\0\0" + bytes(12),
        b"TKVD\x03\xee\0\0" + bytes(12),
        b"TKVD\x03\x02\0\0" + bytes(12),
        b"TKVD\x03\x01\0\0\0\0\0\0\xff\xff\xff\xff\0\0\0\0",
        b"TKVD\x03\x01\0\0\0\0\0\0\x02\0\0\0\xff\xff\xff\xff\0\0",
        b"TKVD\x03\x01\0\0\0\0\0\0\x02\0\0\0\0\0\0\0\xff\xff",
    ],
)
def test_a_stranger_that_breaks_the_rules_is_dropped(rig: Rig, raw: bytes) -> None:
    peer = RawPeer(rig, hello=False)
    peer.sock.sendall(raw)
    assert peer.is_dropped()
    peer.close()
    assert_alive(rig)


def one_range(place: Location, size: int, index: int = 0) -> bytes:
    return pack_ranges(
        [(place.incarnation, place.segment, place.slot, place.generation, index, size)]
    )


def nowhere(size: int = 10) -> bytes:
    place = Location(NodeId("dmp-a"), 1, 0, 1 << 40, 9, 10)  # type: ignore[arg-type]
    return one_range(place, size)


@pytest.mark.parametrize(
    ("kind", "head", "payload"),
    [
        (FrameType.REPLY, b"", b""),
        (FrameType.ERROR, b"", b""),
        (FrameType.LOOKUP, b"\xff\xff\xff\xff", b""),
        (FrameType.LOOKUP, b"", b""),
        (FrameType.STATS, b"x", b""),
        (FrameType.STATS, b"", b"payload"),
        (FrameType.RESERVE, b"\xff" * 40, b""),
        (FrameType.SEAL, b"\1\0\0\0", b""),
        (FrameType.WRITE, b"\0\0\0\0", b"12345"),
        (FrameType.HELLO, b"\xff", b""),
    ],
)
def test_a_client_that_breaks_the_rules_is_told_and_dropped(
    rig: Rig, peer: RawPeer, kind: FrameType, head: bytes, payload: bytes
) -> None:
    name, body = peer.ask(kind, head, payload)
    assert name == "ERROR"
    assert m.ErrorReply.unpack(body).code == "remote_protocol_error"
    assert peer.is_dropped()
    assert_alive(rig)


@settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    raw=st.binary(min_size=1, max_size=200),
    kind=st.sampled_from(list(FrameType)),
    framed=st.booleans(),
)
def test_noise_never_ends_the_server(rig: Rig, raw: bytes, kind: FrameType, framed: bool) -> None:
    peer = RawPeer(rig)
    lead = pack_header(kind, 1, head_bytes=len(raw)) if framed else b""
    with peer.sock, contextlib.suppress(OSError):
        peer.sock.sendall(lead + raw)
        peer.sock.shutdown(socket.SHUT_WR)
        assert peer.is_dropped()
    rig.node.check_invariants()


def test_what_the_node_refuses_leaves_the_connection_usable(rig: Rig, peer: RawPeer) -> None:
    name, body = peer.ask(FrameType.WRITE, nowhere(300_000), b"x" * 300_000)
    assert (name, m.ErrorReply.unpack(body).code) == ("ERROR", "stale_epoch")
    assert peer.ask(FrameType.READ, nowhere())[0] == "ERROR"
    (place,) = rig.node.puts.reserve([make_put("a")])
    assert place is not None
    name, body = peer.ask(FrameType.WRITE, one_range(place, 9), b"too short")
    assert (name, m.ErrorReply.unpack(body).code) == ("ERROR", "block_not_found")
    head = one_range(place, RANGE_BYTES)
    assert peer.ask(FrameType.WRITE, head, make_range("a", 0))[0] == "REPLY"
    assert peer.ask(FrameType.STATS, b"")[0] == "REPLY"


def test_requests_may_be_pipelined(rig: Rig, peer: RawPeer) -> None:
    pool = tcp(rig)
    places = [store(pool, f"n{i}") for i in range(5)]
    pool.close()
    for i, place in enumerate(places):
        peer.send(FrameType.READ, one_range(place, RANGE_BYTES, 1), id=i)
    for i in range(5):
        name, body = peer.receive()
        assert name == "REPLY"
        assert body.endswith(make_range(f"n{i}", 1))


def test_a_writer_that_dies_in_the_middle_leaves_nothing_readable(rig: Rig) -> None:
    (place,) = rig.node.puts.reserve([make_put("a")], deadline_s=5.0)
    assert place is not None
    peer = RawPeer(rig)
    head = one_range(place, RANGE_BYTES)
    lead = pack_header(FrameType.WRITE, 1, head_bytes=len(head), payload_bytes=RANGE_BYTES)
    peer.sock.sendall(lead + head + b"x" * 1000)
    peer.close()
    rig.clock.advance(6.0)  # type: ignore[attr-defined]
    while rig.node.reports.stats().slots_writing:  # pytest-timeout is the deadline
        rig.node.tick()
    assert rig.node.gets.lookup([block_key("a")]) == [None]
    assert_alive(rig)


def test_the_token_is_asked_for(make_rig: MakeRig) -> None:
    rig = make_rig(token="correct horse")
    for wrong in ("", "correct", "correct horsf"):
        pool = tcp(rig, wrong)
        with pytest.raises(TransportError, match="invalid_api_key"):
            pool.stats()
        pool.close()
    stranger = RawPeer(rig, hello=False)
    stranger.send(FrameType.STATS, b"")
    assert stranger.is_dropped()
    stranger.close()
    assert_alive(rig)


def test_connections_are_bounded(make_rig: MakeRig) -> None:
    rig = make_rig(max_connections=2)
    peers = [RawPeer(rig) for _ in range(2)]
    third = RawPeer(rig, hello=False)
    assert third.is_dropped()
    for peer in [*peers, third]:
        peer.close()


def test_another_node_at_the_address_is_noticed(rig: Rig) -> None:
    pool = TcpPoolNode(Peer(NodeId("dmp-z"), rig.server.address), host=rig.node.host)
    with pytest.raises(TransportError, match="is node dmp-a, not dmp-z"):
        pool.stats()
    pool.close()


def test_a_server_that_talks_nonsense_is_a_transport_error() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    with ThreadPoolExecutor(1) as threads:

        def answer() -> None:
            sock, _ = listener.accept()
            with sock:
                sock.recv(100)
                sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        done = threads.submit(answer)
        pool = TcpPoolNode(Peer(NodeId("dmp-a"), address), host=HostId("here"))
        with pytest.raises(TransportError):
            pool.stats()
        done.result()
    pool.close()
    listener.close()
    with pytest.raises(TransportError):
        TcpPoolNode(Peer(NodeId("dmp-a"), address), host=HostId("here")).stats()


def test_a_silent_server_is_a_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        peer = Peer(NodeId("dmp-a"), address, connect_timeout_s=0.05)
        pool = TcpPoolNode(peer, host=HostId("here"))
        with pytest.raises(TransportError, match="timed out"):
            pool.stats()
        pool.close()


def test_a_silent_server_costs_one_timeout_until_it_answers_again(rig: Rig) -> None:
    with ChaosProxy(rig.server.address) as proxy:
        peer = Peer(rig.node.node_id, proxy.address, connect_timeout_s=0.2, op_timeout_s=0.2)
        pool = TcpPoolNode(peer, host=rig.node.host)
        pool.stats()
        proxy.both(HOLE)
        with pytest.raises(TransportError, match="timed out"):
            pool.stats()
        for _ in range(100):
            with pytest.raises(TransportError, match="left alone until it answers again"):
                pool.stats()
        probes = proxy.accepted
        wait_for(lambda: proxy.accepted > probes, what="another probe")
        proxy.heal()
        wait_for(lambda: answers(pool), what="the node is used again")
        pool.close()


def answers(pool: TcpPoolNode) -> bool:
    try:
        pool.stats()
    except TransportError:
        return False
    return True


def test_a_port_in_use_says_what_to_do(rig: Rig, make_rig: MakeRig) -> None:
    port = int(rig.server.address.split(":")[1])
    with pytest.raises(ConfigError, match=r"another dmp\.port"):
        make_rig("dmp-b", port=port)


def test_a_segment_that_does_not_map_falls_back_to_tcp(rig: Rig, tmp_path: object) -> None:
    info = rig.node.reports.info(data_address=rig.server.address)
    same = connect_pool_node(info, host=rig.node.host)
    assert isinstance(same, ShmPoolNode)
    same.close()
    gone = type(info)(
        info.node_id, info.incarnation, info.role, info.host,
        data_address=info.data_address, segment_path=f"{tmp_path}/nothing",
    )  # fmt: skip
    pool = connect_pool_node(gone, host=rig.node.host)
    assert isinstance(pool, TcpPoolNode)
    pool.close()


def test_many_threads_under_eviction_never_see_wrong_bytes(rig: Rig) -> None:
    """Writers and readers of all transports share 20 slots for 40 blocks."""
    info = rig.node.reports.info(data_address=rig.server.address)
    pools = [connect_pool_node(info, host=HostId(name)) for name in ("here", "elsewhere")]

    def work(worker: int) -> int:
        pool, hits = pools[worker % 2], 0
        for i in range(60):
            name = f"n{(worker * 7 + i * 3) % 40}"
            try:
                (place,) = pool.lookup([block_key(name)])
                if place is None:
                    put_if_possible(name, pool)
                    continue
                buffers = [bytearray(RANGE_BYTES) for _ in range(2)]
                pool.read_ranges(
                    [RangeRead(place, j, memoryview(b)) for j, b in enumerate(buffers)]
                )
            except CacheError:
                continue
            assert [bytes(b) for b in buffers] == [make_range(name, 0), make_range(name, 1)]
            hits += 1
        return hits

    with ThreadPoolExecutor(4) as threads:
        hits = sum(threads.map(work, range(4)))
    assert hits > 0
    assert pools[0].stats().quarantined_slots == 0
    rig.node.check_invariants()
    for pool in pools:
        pool.close()


def put_if_possible(name: str, pool: object) -> None:
    (grant,) = pool.reserve([make_put(name)])  # type: ignore[attr-defined]
    if grant is not None:
        for index in range(2):
            pool.write_ranges([RangeWrite(grant, index, memoryview(make_range(name, index)))])  # type: ignore[attr-defined]
        pool.seal([grant])  # type: ignore[attr-defined]


def test_stop_is_clean_with_clients_connected(rig: Rig) -> None:
    peers = [RawPeer(rig) for _ in range(3)]
    rig.server.stop()
    assert all(peer.is_dropped() for peer in peers)
    for peer in peers:
        peer.close()
    again = DmpServer(rig.node)
    again.start()
    again.stop()
