"""kill -9 of a real DMP process in the middle of a put: what was sealed comes back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fix_dmp import block_key, fetch, make_put, make_range, store
from tierkv.dmp.config import DmpConfig
from tierkv.dmp.node.node import DmpNode
from tierkv.dmp.pool_node import PoolNode, RangeWrite
from tierkv.dmp.server.server import DmpServer
from tierkv.dmp.transport.select import connect_pool_node
from tierkv.dmp.transport.shm import ShmPoolNode
from tierkv.kvcore.block_event import NullReporter
from tierkv.kvcore.clock import SystemClock
from tierkv.kvcore.errors import StaleEpochError, TransportError
from tierkv.kvcore.ids import HostId, Incarnation, NodeId
from tierkv.kvcore.node import NodeInfo, NodeRole

pytestmark = pytest.mark.integration

PROGRAM = """
import sys
from tierkv.dmp.config import DmpConfig
from tierkv.dmp.node.node import DmpNode
from tierkv.dmp.server.server import DmpServer
from tierkv.kvcore.block_event import NullReporter
from tierkv.kvcore.clock import SystemClock
config = DmpConfig("dmp-a", "here", segment_path=sys.argv[1], port=int(sys.argv[2]),
                   capacity_bytes=1 << 20, extent_bytes=256 << 10)
node = DmpNode(config, NullReporter(), SystemClock())
node.start()
server = DmpServer(node)
server.start()
print(server.address, flush=True)
sys.stdin.read()
server.stop()
node.stop()
"""


class Process:
    """A DMP node in a process of its own."""

    def __init__(self, segment: Path, port: int = 0) -> None:
        self.child = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(segment), str(port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.child.stdout is not None
        self.address = self.child.stdout.readline().strip()
        assert self.address, "the DMP process did not start"

    @property
    def port(self) -> int:
        return int(self.address.split(":")[1])

    def kill(self) -> None:
        os.kill(self.child.pid, signal.SIGKILL)
        self.end()

    def end(self) -> int:
        if self.child.poll() is None:
            assert self.child.stdin is not None
            self.child.stdin.close()
        code = self.child.wait(20)
        for pipe in (self.child.stdin, self.child.stdout):
            if pipe is not None:
                pipe.close()
        return code


@pytest.fixture
def segment() -> Iterator[Path]:
    path = Path(f"/dev/shm/tierkv-test-{os.getpid()}.seg")
    yield path
    path.unlink(missing_ok=True)


def connect(process: Process, segment: Path, host: str) -> PoolNode:
    info = NodeInfo(
        NodeId("dmp-a"), Incarnation(0), NodeRole.DMP, HostId("here"),
        data_address=process.address, segment_path=str(segment),
    )  # fmt: skip
    return connect_pool_node(info, host=HostId(host))


@pytest.mark.parametrize("host", ["here", "elsewhere"])
def test_sealed_blocks_survive_kill_9_and_half_written_ones_do_not(
    segment: Path, host: str
) -> None:
    first = Process(segment)
    pool = connect(first, segment, host)
    sealed = [store(pool, f"n{i}", f"n{i - 1}" if i else None) for i in range(4)]
    (half,) = pool.reserve([make_put("half", "n3")])
    assert half is not None
    pool.write_ranges([RangeWrite(half, 0, memoryview(make_range("half", 0)))])
    first.kill()

    if isinstance(pool, ShmPoolNode):  # The memory is there while nobody owns it.
        assert fetch(pool, sealed[0]) == [make_range("n0", 0), make_range("n0", 1)]
    with pytest.raises(TransportError):
        pool.lookup([block_key("n0")])

    second = Process(segment, first.port)
    with pytest.raises(StaleEpochError):
        fetch(pool, sealed[0])
    assert pool.hold(sealed, ttl_s=5.0) == [False] * 4
    assert pool.seal([half]) == [None]
    found = pool.lookup([block_key(name) for name in ("n0", "n1", "n2", "n3", "half")])
    assert [place is not None for place in found] == [True] * 4 + [False]
    for i, place in enumerate(found[:4]):
        assert place is not None and place.incarnation > sealed[i].incarnation
        assert fetch(pool, place) == [make_range(f"n{i}", 0), make_range(f"n{i}", 1)]
    assert pool.stats().slots_writing == 0
    store(pool, "half", "n3")
    pool.close()
    assert second.end() == 0


def test_another_process_may_attach_after_a_clean_end(segment: Path) -> None:
    process = Process(segment)
    pool = connect(process, segment, "here")
    store(pool, "a")
    pool.close()
    assert process.end() == 0
    config = DmpConfig(
        NodeId("dmp-a"), HostId("here"), segment_path=str(segment),
        capacity_bytes=1 << 20, extent_bytes=256 << 10,
    )  # fmt: skip
    node = DmpNode(config, NullReporter(), SystemClock())
    node.start()
    server = DmpServer(node)
    server.start()
    assert [stored.key for stored in node.reports.inventory()] == [block_key("a")]
    server.stop()
    node.stop()
