"""A live session against any sequence of frames: it ends, the node is sound, nothing is left."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fix_dmp import Rig, block_key, make_put
from tierkv.dmp.node.node import DmpNode
from tierkv.dmp.server.client_connection import Clients, Session
from tierkv.dmp.wire import messages as m
from tierkv.dmp.wire.frame import FrameType, pack_header
from tierkv.dmp.wire.range_codec import pack_ranges
from tierkv.dmp.wire.socket_io import Wire
from tierkv.kvcore.block import Location
from tierkv.kvcore.ids import NodeId

NODE = NodeId("dmp-a")
SIZE = 5
names = st.sampled_from("abc")
few = st.integers(0, 3)
payloads = st.binary(max_size=40)


def serve(node: DmpNode, raw: bytes) -> None:
    """Say ``raw`` to a session and hang up; returns when the session has ended."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        server, _ = listener.accept()
    wire = Wire(server, timeout_s=5.0)
    session = Session(wire, node, Clients())
    client.settimeout(10.0)

    def run() -> None:
        with contextlib.closing(wire):
            session.run()

    thread = threading.Thread(target=run)
    thread.start()
    with client, contextlib.suppress(OSError):
        client.sendall(raw)
        client.shutdown(socket.SHUT_WR)
        while client.recv(1 << 16):
            pass
    thread.join(20)
    assert not thread.is_alive(), "the session did not end"


def frame(kind: FrameType, head: bytes, payload: bytes = b"") -> bytes:
    return pack_header(kind, 1, head_bytes=len(head), payload_bytes=len(payload)) + head + payload


def frames(incarnation: int) -> st.SearchStrategy[bytes]:
    """Frames that make sense by themselves, in no particular order, and some that don't."""
    places = st.builds(
        Location, st.just(NODE), st.just(incarnation), few.map(lambda n: n // 3), few, few, few
    )
    sums = st.lists(few, min_size=2, max_size=2).map(tuple)
    puts = names.map(lambda name: make_put(name, range_bytes=SIZE))
    blocks = st.lists(puts, max_size=2)
    refs = st.lists(
        st.tuples(st.just(incarnation), st.just(0), few, few, few, st.sampled_from([SIZE, 4])),
        min_size=1,
        max_size=3,
    )
    keys = st.lists(names.map(block_key), max_size=3)
    listed = st.lists(places, max_size=3)
    kind = st.sampled_from
    return st.one_of(
        st.builds(lambda k, m_: frame(k, m_), kind([FrameType.LOOKUP, FrameType.PROMOTE]),
                  keys.map(lambda k: m.BlockLookup(k).pack())),
        st.lists(puts, max_size=3).map(
            lambda p: frame(FrameType.RESERVE, m.Reserve(30.0, p).pack())),
        refs.map(lambda r: frame(FrameType.READ, pack_ranges(r))),
        refs.map(lambda r: frame(FrameType.WRITE, pack_ranges(r), b"x" * sum(x[5] for x in r))),
        st.builds(lambda r, p: frame(FrameType.WRITE, pack_ranges(r), p), refs, payloads),
        blocks.map(lambda b: frame(FrameType.PUT, m.Put(b).pack(), bytes(26 * len(b)))),
        st.builds(lambda b, p: frame(FrameType.PUT, m.Put(b).pack(), p), blocks, payloads),
        st.lists(st.builds(m.Sealing, places, sums), max_size=2).map(
            lambda i: frame(FrameType.SEAL, m.Seal(i).pack())),
        st.builds(
            lambda k, p: frame(k, m.Refs(p, 1.0).pack()),
            kind([FrameType.ABORT, FrameType.HOLD, FrameType.RELEASE, FrameType.TOUCH]),
            listed,
        ),
        listed.map(lambda p: frame(
            FrameType.SUSPECT, m.Ranges([m.RangeRef(x, 0) for x in p]).pack())),
        st.just(frame(FrameType.STATS, b"")),
        st.builds(lambda k, h: frame(k, h), kind(list(FrameType)), payloads),
        payloads,
    )  # fmt: skip


@pytest.fixture
def rig(make_rig: Callable[..., Rig]) -> Rig:
    return make_rig()


@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_any_conversation_ends_and_leaves_nothing_half_done(rig: Rig, data: st.DataObject) -> None:
    said = data.draw(st.lists(frames(rig.node.incarnation), max_size=12))
    hello = frame(FrameType.HELLO, m.Hello("", "c0ffee").pack())
    raw = hello + b"".join(said)
    cut = data.draw(st.one_of(st.just(len(raw)), st.integers(0, len(raw))))
    serve(rig.node, raw[:cut])
    rig.node.check_invariants()
    assert rig.node.reports.stats().slots_writing == 0


@pytest.mark.parametrize("raw", [b"", b"TKVD", b"\0" * 20, b"\xff" * 4096])
def test_what_is_no_frame_ends_the_session(rig: Rig, raw: bytes) -> None:
    serve(rig.node, raw)
    rig.node.check_invariants()
