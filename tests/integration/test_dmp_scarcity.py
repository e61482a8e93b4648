"""A node and its clients when the system runs out of something, or one side is away."""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.fix_dmp import Rig, fetch, make_range, store
from tierkv.dmp.transport.connection import Peer
from tierkv.dmp.transport.shm import ShmPoolNode
from tierkv.dmp.transport.tcp import TcpPoolNode

pytestmark = pytest.mark.integration
MakeRig = Callable[..., Rig]


@pytest.fixture
def rig(make_rig: MakeRig) -> Rig:
    return make_rig()


@pytest.fixture
def mapped(rig: Rig) -> Iterator[ShmPoolNode]:
    peer = Peer(rig.node.node_id, rig.server.address)
    made = ShmPoolNode(peer, Path(rig.node.config.segment_path), host=rig.node.host)
    yield made
    made.close()


def test_out_of_descriptors_the_door_waits_instead_of_spinning(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[float] = []
    tried = threading.Event()

    def refuse(listener: socket.socket) -> tuple[socket.socket, object]:
        tries.append(0.0)
        tried.set()
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr(socket.socket, "accept", refuse)
        pool = TcpPoolNode(Peer(rig.node.node_id, rig.server.address), host=rig.node.host)
        with socket.create_connection(("127.0.0.1", int(rig.server.address.split(":")[1]))):
            assert tried.wait(10)
            threading.Event().wait(0.3)
    assert len(tries) < 10
    place = store(pool, "a")
    assert fetch(pool, place)[0] == make_range("a", 0), "and is open again afterwards"
    pool.close()


def test_without_a_thread_for_it_a_connection_is_refused_and_the_door_stays_open(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", _no_thread)
        with socket.create_connection(
            ("127.0.0.1", int(rig.server.address.split(":")[1])), timeout=10
        ) as refused:
            assert refused.recv(1) == b""
    pool = TcpPoolNode(Peer(rig.node.node_id, rig.server.address), host=rig.node.host)
    assert fetch(pool, store(pool, "a"))[0] == make_range("a", 0)
    pool.close()
    assert len(rig.server._sessions) <= 1


def _no_thread(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_looking_at_petabytes_in_place_costs_no_connection(rig: Rig, mapped: ShmPoolNode) -> None:
    place = store(mapped, "a")
    assert mapped.hold([place], ttl_s=60.0) == [True]
    mapped.view(place, 0)
    mapped._touched_bytes = 1 << 50
    assert mapped.stats().memory.read_bytes > 1 << 39
    (slot,) = rig.node._state.table.store.sealed()
    assert slot.holders, "the connection lives, and what it holds is held"


def test_a_good_read_stays_good_when_the_node_can_not_be_told(
    rig: Rig, mapped: ShmPoolNode
) -> None:
    place = store(mapped, "a")
    rig.server.stop()
    mapped._touched = dict.fromkeys(range(-2_000, 0), place)
    assert fetch(mapped, place)[0] == make_range("a", 0)
    rig.server.start()
