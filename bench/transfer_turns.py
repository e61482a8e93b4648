"""How a pool node's bytes are shared between namespaces, and what that costs a get.

Run ``python -m bench.transfer_turns``. One node in a process, and a process per namespace, whose
threads read blocks over TCP as fast as they can, in a network namespace whose loopback is a link of
2 Gbit/s (``--loopback``: without this limit). First, namespaces with weights 1, 2 and 4: the part
of all bytes of each, with turns and without (every connection then gets an equal part). Then
a quiet namespace with a single reader that pauses between gets, beside one with 16 readers: the
time of one of its gets in a hundred, alone, beside the loud one without turns, with turns, and with
turns and a limit of the loud one's bandwidth. Last, a get with and without a namespace that is
metered, in turn.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from bench.report import Report, finish, make_parser
from tierkv.dmp.config import DmpConfig
from tierkv.dmp.node.node import DmpNode
from tierkv.dmp.node.turns import Turns
from tierkv.dmp.pool_node import RangeRead
from tierkv.dmp.server.server import DmpServer
from tierkv.dmp.slots.accounts import Quota
from tierkv.dmp.transport.connection import Peer
from tierkv.dmp.transport.tcp import TcpPoolNode
from tierkv.kvcore.block import ROOT_PARENT, BlockSpec, Owner, RangeShape
from tierkv.kvcore.clock import SystemClock
from tierkv.kvcore.errors import CacheError
from tierkv.kvcore.ids import BlockKey, HostId, NodeId

_RANGES, _RANGE_BYTES = 16, 64 << 10
_BLOCK = _RANGES * _RANGE_BYTES
_BLOCKS = 8
_WEIGHTS = {"one": 1.0, "two": 2.0, "four": 4.0}
_READERS = 12
_LOUD_READERS = 16
_PAUSE_S = 0.005
_WARM_S = 0.5
"""Not counted: the buckets of limits are full, and some readers begin before others."""
_COLD_GETS = 5
"""Not timed, after a change of quotas."""
_NO_TURNS = 1 << 20
_NODE = NodeId("bench")
_LINK = "2gbit"
_IN_NETWORK = "TIERKV_BENCH_OWN_NETWORK"


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print; ``--quick`` measures for seconds."""
    parser = make_parser(__doc__)
    parser.add_argument("--loopback", action="store_true", help="without the link's limit")
    options = parser.parse_args(argv)
    if argv is None and not options.loopback and not os.environ.get(_IN_NETWORK):
        _enter_network()
    report = Report("transfer_turns")
    if not os.environ.get(_IN_NETWORK):
        report.note("Without a network of its own: the processors are the limit here.")
    seconds, rounds = (1.0, 1) if options.quick else (4.0, 3)
    with (
        tempfile.TemporaryDirectory(prefix="tierkv-turns-", dir="/dev/shm") as folder,
        _node(Path(folder)) as node,
    ):
        _shares(report, node, seconds, rounds)
        _neighbours(report, node, seconds, rounds)
        _metering(report, node, 300 if options.quick else 3_000)
    finish(report, options.format)


def _enter_network() -> None:
    """Go on in a network namespace whose loopback has the speed of a link, if that is allowed."""
    shape = (
        f"ip link set lo up && tc qdisc add dev lo root tbf rate {_LINK} burst 256kb latency 1s "
        "&& echo 131072 > /proc/sys/net/ipv4/tcp_limit_output_bytes"
    )
    probe = ["unshare", "--net", "sh", "-c", shape]
    try:
        if subprocess.run(probe, capture_output=True, check=False).returncode:
            return
    except OSError:
        return
    os.environ[_IN_NETWORK] = "1"
    words = shlex.join([sys.executable, "-m", "bench.transfer_turns", *sys.argv[1:]])
    os.execvp("unshare", [*probe[:-1], f"{shape} && exec {words}"])


class Node:
    """The node's process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.address = str(self._told())

    def _told(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def obey(self, quotas: Sequence[dict[str, Any]], *, turns: bool = True) -> None:
        """Have the node take quotas, and give turns or none."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"quotas": list(quotas), "turns": turns}) + "\n")
        self._process.stdin.flush()
        assert self._told() == "obeyed"


@contextmanager
def _node(folder: Path) -> Iterator[Node]:
    process = _started("node", str(folder))
    try:
        node = Node(process)
        pool = TcpPoolNode(Peer(_NODE, node.address), host=HostId("client"))
        for name in (*_WEIGHTS, "quiet", "loud"):
            _store(pool, name)
        pool.close()
        yield node
    finally:
        process.kill()
        process.wait()


def _started(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "bench.transfer_turns", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def _key(name: str, number: int) -> BlockKey:
    return BlockKey(f"{name}{number}".ljust(16, "-").encode())


def _store(pool: TcpPoolNode, name: str) -> None:
    blocks = [
        BlockSpec(
            _key(name, number), ROOT_PARENT, 64,
            ranges=RangeShape(_RANGE_BYTES, _RANGES), owner=Owner(tenant=name),
        )
        for number in range(_BLOCKS)
    ]  # fmt: skip
    payload = memoryview(np.random.default_rng(0).bytes(_BLOCK))
    assert all(pool.put(blocks, [payload] * _BLOCKS))


def _quota(name: str, **rates: float) -> dict[str, Any]:
    return {"name": name, "tenants": [name], **rates}


# -- the three measurements


def _shares(report: Report, node: Node, seconds: float, rounds: int) -> None:
    quotas = [_quota(name, weight=weight) for name, weight in _WEIGHTS.items()]
    for label, turns in (("turns", True), ("sockets", False)):
        node.obey(quotas, turns=turns)
        shares: dict[str, list[float]] = {name: [] for name in _WEIGHTS}
        rates = []
        for _ in range(rounds):
            moved = _read_together(node, dict.fromkeys(_WEIGHTS, _READERS), seconds)
            total = sum(sum(each) for each in moved.values())
            rates.append(total / seconds)
            for name in _WEIGHTS:
                shares[name].append(sum(moved[name]) / total)
        wanted = {name: weight / sum(_WEIGHTS.values()) for name, weight in _WEIGHTS.items()}
        for name, found in shares.items():
            report.add(f"{label}_share_of_{name}", median(found))
        worst = max(abs(median(found) / wanted[name] - 1) for name, found in shares.items())
        report.add(f"{label}_worst_error", worst)
        report.add(f"{label}_gb_per_s", median(rates) / 1e9)


def _neighbours(report: Report, node: Node, seconds: float, rounds: int) -> None:
    quiet, loud = _quota("quiet", weight=4.0), _quota("loud", weight=1.0)
    limited = loud | {"read_bytes_per_s": 50e6}
    for label, quotas, turns, readers in (
        ("alone", [quiet], True, 0),
        ("beside_sockets", [quiet, loud], False, _LOUD_READERS),
        ("beside_turns", [quiet, loud], True, _LOUD_READERS),
        ("beside_turns_and_limit", [quiet, limited], True, _LOUD_READERS),
    ):
        node.obey(quotas, turns=turns)
        found = []
        for _ in range(rounds):
            times = _read_together(
                node, {"quiet": -1} | ({"loud": readers} if readers else {}), seconds
            )["quiet"]
            found.append(1e3 * float(np.quantile(times, 0.99)))
        report.add(f"quiet_p99_{label}_ms", median(found))


def _read_together(node: Node, readers: dict[str, int], seconds: float) -> dict[str, list[float]]:
    """Have processes read; return each one's bytes by thread, or times of gets (-1 readers)."""
    processes = {
        name: _started("read", node.address, name, str(count), str(seconds))
        for name, count in readers.items()
    }
    for process in processes.values():
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    for process in processes.values():
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    return {name: json.loads(process.communicate()[0]) for name, process in processes.items()}


def _metering(report: Report, node: Node, gets: int) -> None:
    pool = TcpPoolNode(Peer(_NODE, node.address), host=HostId("client"))
    metered = [_quota("quiet", read_bytes_per_s=1e12, requests_per_s=1e9)]
    for label, ranges in (("64KiB", 1), ("1MiB", _RANGES)):
        times: dict[bool, list[float]] = {False: [], True: []}
        for turn in range(100):
            # Each way goes first in half of the pairs: the machine may be slower for a while.
            for is_metered in (False, True) if turn % 2 else (True, False):
                node.obey(metered if is_metered else [])
                times[is_metered] += _gets(pool, "quiet", ranges, _COLD_GETS + gets // 50)[
                    _COLD_GETS:
                ]
        report.add(f"get_{label}_us", 1e6 * median(times[False]))
        report.add(f"metered_get_{label}_ratio", median(times[True]) / median(times[False]))
    pool.close()


def _gets(pool: TcpPoolNode, name: str, ranges: int, count: int) -> list[float]:
    places = [place for place in pool.lookup([_key(name, n) for n in range(_BLOCKS)]) if place]
    buffers = [memoryview(bytearray(_RANGE_BYTES)) for _ in range(ranges)]
    times = []
    for number in range(count):
        place = places[number % len(places)]
        began = time.perf_counter()
        pool.read_ranges([RangeRead(place, i, buffer) for i, buffer in enumerate(buffers)])
        times.append(time.perf_counter() - began)
    return times


# -- the other processes


def serve(folder: str) -> None:
    """Be the node: obey lines of quotas from stdin until it ends."""
    config = DmpConfig(
        _NODE, HostId("node"), segment_path=f"{folder}/segment", capacity_bytes=256 << 20
    )
    node = DmpNode(config, _Silent(), SystemClock())
    node.start()
    server = DmpServer(node)
    server.start()
    print(json.dumps(server.address), flush=True)
    state = node._state
    turns = {
        True: state.turns,
        False: Turns(SystemClock(), pinned_bytes=config.capacity_bytes // 2, places=_NO_TURNS),
    }
    for line in sys.stdin:
        wanted = json.loads(line)
        state.turns = turns[wanted["turns"]]
        node.set_quotas(
            [Quota(**each | {"tenants": frozenset(each["tenants"])}) for each in wanted["quotas"]]
        )
        print('"obeyed"', flush=True)
    server.stop()
    node.stop()


class _Silent:
    def report(self, events: Sequence[object]) -> None:
        """Nobody keeps a directory."""


def read(address: str, name: str, readers: int, seconds: float) -> None:
    """Be the readers of a namespace: print the bytes of each thread, or one reader's times."""
    pool = TcpPoolNode(Peer(_NODE, address, connections=32), host=HostId("client"))
    _gets(pool, name, _RANGES, _BLOCKS)
    print("ready", flush=True)
    sys.stdin.readline()
    begins = time.perf_counter() + _WARM_S
    ends = begins + seconds
    if readers < 0:
        times = []
        while time.perf_counter() < ends:
            times += _gets_or_none(pool, name)
            time.sleep(_PAUSE_S)
        print(json.dumps(times))
        return
    moved = [0] * readers

    def run(thread: int) -> None:
        while time.perf_counter() < ends:
            size = _BLOCK * len(_gets_or_none(pool, name))
            if begins <= time.perf_counter() < ends:
                moved[thread] += size

    threads = [threading.Thread(target=run, args=(number,)) for number in range(readers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(json.dumps(moved))


def _gets_or_none(pool: TcpPoolNode, name: str) -> list[float]:
    try:
        return _gets(pool, name, _RANGES, 1)
    except CacheError:
        time.sleep(0.01)
        return []


if __name__ == "__main__":
    if sys.argv[1:2] == ["node"]:
        serve(sys.argv[2])
    elif sys.argv[1:2] == ["read"]:
        read(sys.argv[2], sys.argv[3], int(sys.argv[4]), float(sys.argv[5]))
    else:
        main()
