"""Rates of namespaces at a node, over real sockets and mapped memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fix_dmp import RANGE_BYTES, Rig, fetch, make_put, make_range, store
from tierkv.dmp.client.pool import Pool
from tierkv.dmp.node.turn_order import Turn
from tierkv.dmp.pool_node import PoolNode, RangeRead
from tierkv.dmp.server import client_connection
from tierkv.dmp.server.client_connection import pieces
from tierkv.dmp.slots.accounts import Quota
from tierkv.dmp.transport.connection import Peer
from tierkv.dmp.transport.shm import ShmPoolNode
from tierkv.dmp.transport.tcp import TcpPoolNode
from tierkv.kvcore.clock import ManualClock
from tierkv.kvcore.errors import ThrottledError
from tierkv.kvcore.node import NamespaceUsage

pytestmark = pytest.mark.integration
BLOCK = 2 * RANGE_BYTES
PIECE = 256 << 10


class Node:
    """A node with namespace ``red`` of tenant ``ann``, and clients."""

    def __init__(self, rig: Rig, clock: ManualClock) -> None:
        self.clock = clock
        self.rig = rig
        peer = Peer(rig.node.node_id, rig.server.address, rig.node.config.token)
        self.tcp = TcpPoolNode(peer, host=rig.node.host)
        self.shm = ShmPoolNode(peer, rig.node.config.segment_file, host=rig.node.host)

    def limit(self, **rates: float) -> None:
        self.rig.node.set_quotas([Quota("red", frozenset({"ann"}), **rates)])  # type: ignore[arg-type]

    def usage(self) -> NamespaceUsage:
        return self.rig.node.reports.report().namespaces[0]


@pytest.fixture
def node(make_rig: Callable[..., Rig]) -> Iterator[Node]:
    clock = ManualClock()
    made = Node(make_rig(clock=clock), clock)
    yield made
    made.tcp.close()
    made.shm.close()


def put(pool: PoolNode, name: str, tenant: str) -> bool:
    payload = make_range(name, 0) + make_range(name, 1)
    return pool.put([make_put(name, tenant=tenant)], [memoryview(payload)]) != [None]


def test_reads_beyond_the_rate_are_refused_and_others_are_served(node: Node) -> None:
    own, other = store(node.tcp, "a", tenant="ann"), store(node.tcp, "b", tenant="bob")
    node.limit(read_bytes_per_s=BLOCK / 4)
    assert fetch(node.tcp, own) == [make_range("a", 0), make_range("a", 1)]
    for _ in range(3):
        with pytest.raises(ThrottledError, match="namespace red has used its rate"):
            fetch(node.tcp, own)
        with pytest.raises(ThrottledError):
            fetch(node.tcp, own, indices=(0,))
        assert fetch(node.tcp, other)[0] == make_range("b", 0)
    assert (node.usage().read_bytes, node.usage().throttled) == (BLOCK, 6)
    node.clock.advance(3.0)
    assert fetch(node.tcp, own)[1] == make_range("a", 1)
    node.limit()
    assert [fetch(node.tcp, own) for _ in range(3)]
    assert node.usage().read_bytes == 5 * BLOCK


def test_requests_have_a_rate_too(node: Node) -> None:
    own = store(node.tcp, "a", tenant="ann")
    node.limit(requests_per_s=0.25)
    assert fetch(node.tcp, own)
    with pytest.raises(ThrottledError):
        fetch(node.tcp, own)
    node.clock.advance(3.0)
    assert fetch(node.tcp, own)


@pytest.mark.parametrize("way", ["tcp", "shm"])
def test_writes_beyond_the_rate_are_not_stored(node: Node, way: str) -> None:
    pool: PoolNode = getattr(node, way)
    node.limit(write_bytes_per_s=BLOCK / 4)
    assert put(pool, "a", "ann")
    assert not put(pool, "b", "ann")
    assert pool.reserve([make_put("c", tenant="ann")]) == [None]
    assert put(pool, "d", "bob")
    assert (node.usage().write_bytes, node.usage().throttled) == (BLOCK, 2)
    node.clock.advance(4.0)
    assert put(pool, "b", "ann")
    node.rig.node.check_invariants()


def test_bytes_of_mapped_memory_are_charged_afterwards(node: Node) -> None:
    own = store(node.tcp, "a", tenant="ann")
    node.limit(read_bytes_per_s=BLOCK / 4)
    assert fetch(node.shm, own, indices=(0,)) == [make_range("a", 0)]
    assert fetch(node.shm, own) == [make_range("a", 0), make_range("a", 1)]
    node.shm.stats()  # Reports what was read.
    assert node.usage().read_bytes == BLOCK + RANGE_BYTES
    with pytest.raises(ThrottledError):
        fetch(node.tcp, own)


def test_reads_ahead_are_named_and_served(node: Node) -> None:
    own = store(node.tcp, "a", tenant="ann")
    buffers = [bytearray(RANGE_BYTES) for _ in range(2)]
    reads = [RangeRead(own, i, memoryview(buffer), ahead=True) for i, buffer in enumerate(buffers)]
    kinds: list[str] = []
    take = node.rig.node.turns.take

    def noted(turn: Turn, *, timeout_s: float) -> None:
        kinds.append(turn.kind.name)
        take(turn, timeout_s=timeout_s)

    node.rig.node.turns.take = noted  # type: ignore[method-assign]
    node.tcp.read_ranges(reads)
    node.tcp.read_ranges(reads[:1])
    fetch(node.tcp, own)
    assert buffers == [make_range("a", 0), make_range("a", 1)]
    assert kinds == ["AHEAD", "AHEAD", "READ"]


def test_a_client_that_moves_blocks_is_of_the_last_class(node: Node) -> None:
    kinds: list[str] = []
    take = node.rig.node.turns.take

    def noted(turn: Turn, *, timeout_s: float) -> None:
        kinds.append(turn.kind.name)
        take(turn, timeout_s=timeout_s)

    node.rig.node.turns.take = noted  # type: ignore[method-assign]
    node.limit(read_bytes_per_s=BLOCK, write_bytes_per_s=BLOCK)
    with Pool.connect(
        node.rig.server.address, token=node.rig.node.config.token, transport="tcp", moves=True
    ) as mover:
        assert mover.put("a", b"moved") and mover.get("a") == b"moved"
        assert mover.put_many({"b": b"1", "c": b"2"}) == [True, True]
        assert mover.get_many(["b", "c"]) == [b"1", b"2"]
    with Pool.connect(
        node.rig.server.address, token=node.rig.node.config.token, transport="tcp"
    ) as other:
        assert other.get("a") == b"moved"
    assert set(kinds[:-1]) == {"MOVE_IN", "MOVE_OUT"} and kinds[-1] == "READ"


def test_a_long_reply_arrives_in_pieces_as_it_was(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_connection, "PIECE_BYTES", PIECE)
    names = [f"b{number}" for number in range(12)]
    places = [store(node.tcp, name, tenant="ann") for name in names]
    node.limit(weight=2.0)
    buffers = {(name, i): bytearray(RANGE_BYTES) for name in names for i in range(2)}
    assert sum(map(len, buffers.values())) > 2 * PIECE
    sizes: list[int] = []
    go_on = node.rig.node.turns.go_on

    def noted(turn: Turn, piece: int, *, timeout_s: float) -> None:
        sizes.append(piece)
        go_on(turn, piece, timeout_s=timeout_s)

    node.rig.node.turns.go_on = noted  # type: ignore[method-assign]
    node.tcp.read_ranges(
        [
            RangeRead(place, i, memoryview(buffers[name, i]))
            for name, place in zip(names, places, strict=True)
            for i in range(2)
        ]
    )
    assert all(buffer == make_range(*name) for name, buffer in buffers.items())
    assert sizes == [PIECE, sum(map(len, buffers.values())) - 2 * PIECE]
    assert node.usage().read_bytes == sum(map(len, buffers.values()))


@given(st.lists(st.binary(max_size=20), max_size=8), st.integers(1, 25))
def test_pieces_are_the_bytes_in_order(buffers: list[bytes], most: int) -> None:
    found = list(pieces([memoryview(buffer) for buffer in buffers], most))
    assert b"".join(view for piece in found for view in piece) == b"".join(buffers)
    sizes = [sum(map(len, piece)) for piece in found]
    assert all(size == most for size in sizes[:-1]) and all(0 < size <= most for size in sizes)
