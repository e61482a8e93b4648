"""Hot upgrade of a real DMP process under load: the new one takes the segment over from the old."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fix_dmp import block_key, fetch, make_put, make_range, store
from tierkv.dmp.pool_node import PoolNode
from tierkv.dmp.transport.select import connect_pool_node
from tierkv.kvcore.block import Location
from tierkv.kvcore.errors import CacheError, StaleEpochError
from tierkv.kvcore.ids import HostId, Incarnation, NodeId
from tierkv.kvcore.node import NodeInfo, NodeRole

pytestmark = pytest.mark.integration


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(f"/dev/shm/tierkv-test-{os.getpid()}")
    path.mkdir()
    yield path
    for file in path.iterdir():
        file.unlink()
    path.rmdir()


class Served:
    """``tierkv serve dmp`` in a process of its own, told nothing but where its segment lies."""

    def __init__(self, folder: Path, port: int) -> None:
        settings = {
            "dmp.segment_dir": folder,
            "dmp.capacity": "256MiB",
            "dmp.port": port,
            "dmp.attach_wait_s": 30,
            "dmp.drain_s": 1,
        }
        argv = [sys.executable, "-m", "tierkv", "serve", "dmp", "--node-id", "dmp-a"]
        for key, value in settings.items():
            argv += ["--set", f"{key}={value}"]
        self.child = subprocess.Popen(
            argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )

    def ready(self) -> dict[str, str]:
        assert self.child.stdout is not None
        told: dict[str, str] = json.loads(self.child.stdout.readline())
        return told

    def end(self, number: int = signal.SIGTERM) -> int:
        if self.child.poll() is None:
            self.child.send_signal(number)
        code = self.child.wait(30)
        if self.child.stdout is not None:
            self.child.stdout.close()
        return code


def connect(told: dict[str, str], host: str) -> PoolNode:
    info = NodeInfo(
        NodeId("dmp-a"), Incarnation(0), NodeRole.DMP, HostId("here"),
        data_address=told["address"], segment_path=told["segment"],
    )  # fmt: skip
    return connect_pool_node(info, host=HostId(host))


class Load:
    """A client that stores and reads without pause; a cache error is a miss, all else a failure."""

    def __init__(self, pool: PoolNode, name: str) -> None:
        self.pool = pool
        self.name = name
        self.sealed: list[str] = []
        self.misses = 0
        self.wrong: list[str] = []
        self.failure: BaseException | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        number = 0
        try:
            while not self._stop.is_set():
                name = f"{self.name}-{number}"
                number += 1
                try:
                    self._once(name)
                except CacheError:
                    self.misses += 1
                    self._stop.wait(0.02)
        except BaseException as error:  # noqa: BLE001 - reported by the test's own thread.
            self.failure = error

    def _once(self, name: str) -> None:
        parent = self.sealed[-1] if self.sealed else None
        payload = make_range(name, 0) + make_range(name, 1)
        (place,) = self.pool.put([make_put(name, parent)], [memoryview(payload)])
        if place is None:  # A node that drains gives no reservations.
            self.misses += 1
            self._stop.wait(0.02)
            return
        self.sealed.append(name)
        if b"".join(fetch(self.pool, place)) != payload:
            self.wrong.append(name)
        self._stop.wait(0.002)  # All blocks of the test fit into the segment.

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_new_process_takes_over_under_load(folder: Path, how: int) -> None:
    old = Served(folder, 0)
    told = old.ready()
    pools = [connect(told, host) for host in ("here", "elsewhere")]
    first: Location = store(pools[0], "first")
    loads = [Load(pool, f"load{i}") for i, pool in enumerate(pools)]
    new: Served | None = None
    try:
        wait_for_blocks(loads, 20)
        # "Start new, stop old": the new process waits for the segment.
        new = Served(folder, int(told["address"].rsplit(":", 1)[1]))
        assert old.child.poll() is None
        code = old.end(how)
        assert code == (0 if how == signal.SIGTERM else -signal.SIGKILL)
        assert new.ready()["segment"] == told["segment"]
        wait_for_blocks(loads, 20)
    finally:
        for load in loads:
            load.stop()
    assert [load.failure for load in loads] == [None, None]
    assert [load.wrong for load in loads] == [[], []]
    with pytest.raises(StaleEpochError):
        fetch(pools[0], first)
    names = ["first", *(name for load in loads for name in load.sealed)]
    for pool in pools:
        for name, place in zip(names, pool.lookup([block_key(n) for n in names]), strict=True):
            assert place is not None, f"{name} was sealed and is gone"
            assert fetch(pool, place) == [make_range(name, 0), make_range(name, 1)]
    assert pools[0].stats().slots_writing == 0
    for pool in pools:
        pool.close()
    assert new is not None and new.end() == 0


def wait_for_blocks(loads: list[Load], more: int) -> None:
    """Wait until every client has sealed so many more blocks; pytest-timeout is the deadline."""
    targets = [len(load.sealed) + more for load in loads]
    pause = threading.Event()
    while any(len(load.sealed) < goal for load, goal in zip(loads, targets, strict=True)):
        assert [load.failure for load in loads] == [None, None]
        pause.wait(0.02)
