"""A writer that dies between reserve and seal leaves no reservation behind, and no hold."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fix_dmp import Rig, block_key, fetch, make_put, make_range, store
from tierkv.dmp.pool_node import PoolNode
from tierkv.dmp.transport.connection import Peer
from tierkv.dmp.transport.shm import ShmPoolNode
from tierkv.dmp.transport.tcp import TcpPoolNode

pytestmark = pytest.mark.integration
MakeRig = Callable[..., Rig]

WRITER = """
import sys
from pathlib import Path
from tierkv.dmp.pool_node import RangeWrite
from tierkv.dmp.transport.connection import Peer
from tierkv.dmp.transport.shm import ShmPoolNode
from tierkv.dmp.transport.tcp import TcpPoolNode
from tests.fix_dmp import make_put, make_range, store
peer = Peer("dmp-a", sys.argv[1])
mapped = sys.argv[3] == "shm"
pool = (
    ShmPoolNode(peer, Path(sys.argv[2]), host="here") if mapped else TcpPoolNode(peer, host="here")
)
held = store(pool, "held")
assert pool.hold([held], ttl_s=600.0) == [True]
grants = pool.reserve([make_put(f"half-{i}") for i in range(3)], deadline_s=300.0)
pool.write_ranges([RangeWrite(g, 0, memoryview(make_range("half", 0))) for g in grants])
print("reserved", flush=True)
sys.stdin.read()
"""


def connect(rig: Rig, transport: str) -> PoolNode:
    peer, host = Peer(rig.node.node_id, rig.server.address), rig.node.host
    if transport == "shm":
        return ShmPoolNode(peer, rig.node.config.segment_file, host=host)
    return TcpPoolNode(peer, host=host)


def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition that another process brings about; a deadline of 10 s, no clock."""
    deadline = time.monotonic() + 10.0
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.002)


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_a_killed_writer_leaves_no_reservation(make_rig: MakeRig, transport: str) -> None:
    """The node's clock stands still: nothing expires, so it is the closed connection that frees."""
    rig = make_rig()
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, rig.server.address, str(rig.node.config.segment_file),
         transport],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert writer.stdin is not None and writer.stdout is not None
    with writer.stdin, writer.stdout:
        assert writer.stdout.readline() == "reserved\n"
        pool = connect(rig, transport)
        own = pool.reserve([make_put("own")])
        assert pool.stats().slots_writing == 4
        assert pool.reserve([make_put("half-0")]) == [None]
        os.kill(writer.pid, signal.SIGKILL)
        writer.wait(10)
    until(lambda: rig.node.reports.stats().slots_writing == 1)
    assert own[0] is not None and pool.lookup([block_key("half-0")]) == [None]
    place = store(pool, "half-0")
    assert fetch(pool, place) == [make_range("half-0", 0), make_range("half-0", 1)]
    pool.abort([own[0]])
    for i in range(25):
        store(pool, f"next-{i}")
    assert pool.lookup([block_key("held")]) == [None], "a dead client's hold kept its block"
    pool.close()


def test_a_client_with_several_connections_keeps_its_reservations(make_rig: MakeRig) -> None:
    rig = make_rig()
    first = TcpPoolNode(Peer("dmp-a", rig.server.address, client_id="ab"), host=rig.node.host)  # type: ignore[arg-type]
    second = TcpPoolNode(Peer("dmp-a", rig.server.address, client_id="ab"), host=rig.node.host)  # type: ignore[arg-type]
    other = TcpPoolNode(Peer(rig.node.node_id, rig.server.address), host=rig.node.host)
    (grant,) = first.reserve([make_put("a")])
    assert grant is not None
    second.stats()
    other.reserve([make_put("b")])
    assert other.stats().slots_writing == 2
    other.close()
    until(lambda: rig.node.reports.stats().slots_writing == 1)
    first.close()
    until(lambda: len(rig.server._sessions) == 1)
    assert second.stats().slots_writing == 1
    second.close()
    until(lambda: rig.node.reports.stats().slots_writing == 0)
