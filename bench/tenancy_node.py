"""What namespaces cost and share at one pool node, over TCP: the part of bench.tenancy below calls.

The node is in this process; each namespace reads from a process of its own. Measured are the shares
of three busy namespaces with the weights 1, 2 and 4, the cost of metering a get, and a quiet
namespace's gets alone, beside a neighbour, and beside a neighbour with a bandwidth and less weight.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.synchronize import Event
from pathlib import Path
from statistics import median, quantiles

from bench.report import Report
from tierkv.dmp.client.pool import Pool
from tierkv.dmp.client.values import PutNotes
from tierkv.dmp.config import DmpConfig
from tierkv.dmp.node.node import DmpNode
from tierkv.dmp.server.server import DmpServer
from tierkv.dmp.slots.accounts import Quota
from tierkv.kvcore.block import Owner
from tierkv.kvcore.block_event import NullReporter
from tierkv.kvcore.clock import SystemClock
from tierkv.kvcore.ids import HostId, NodeId

_WEIGHTS = {"one": 1.0, "two": 2.0, "four": 4.0}
_LARGE, _SMALL = 4 << 20, 64 << 10
_READERS = 4
_COLD_GETS = 5
_START_S = 60.0


def measure(report: Report, seconds: float) -> None:
    """Measure each thing for some seconds, and add the results."""
    with tempfile.TemporaryDirectory(prefix="tierkv-tenancy-node-") as folder:
        config = DmpConfig(
            node_id=NodeId("dmp"), host=HostId("here"), segment_path=str(Path(folder) / "segment"),
            capacity_bytes=256 << 20, extent_bytes=32 << 20, scrub_rate_bytes_per_s=0,
        )  # fmt: skip
        node = DmpNode(config, NullReporter(), SystemClock())
        server = DmpServer(node)
        node.start()
        server.start()
        try:
            with Pool.connect(server.address, transport="tcp") as pool:
                for name in (*_WEIGHTS, "quiet"):
                    notes = [PutNotes(owner=Owner(tenant=name))]
                    assert pool.put_many([(f"{name} large", bytes(_LARGE))], notes=notes) == [True]
                    assert pool.put_many([(f"{name} small", bytes(_SMALL))], notes=notes) == [True]
                _metering(report, node, pool, seconds)
                _neighbour(report, node, pool, server.address, seconds)
            _shares(report, node, server.address, seconds)
        finally:
            server.stop()
            node.stop()


def _quota(name: str, **values: float) -> Quota:
    return Quota(name, frozenset({name}), **values)  # type: ignore[arg-type]


def _metering(report: Report, node: DmpNode, pool: Pool, seconds: float) -> None:
    """Get the same value with and without a namespace, in turns of fifty gets.

    Each way goes first in half of the pairs, and the first gets after a change are not counted.
    """
    metered = [_quota("quiet", read_bytes_per_s=1e12, requests_per_s=1e9, weight=2.0)]
    costs: dict[str, list[float]] = {"free": [], "metered": []}
    until = time.perf_counter() + 2 * seconds
    order: list[tuple[str, list[Quota]]] = [("free", []), ("metered", metered)]
    while time.perf_counter() < until:
        for name, quotas in order:
            node.set_quotas(quotas)
            _gets(pool, _COLD_GETS)
            costs[name] += _gets(pool, 50)
        order.reverse()
    for name, times in costs.items():
        report.add(f"get_64k_{name}_us", 1e6 * median(times))
    report.add("get_metered_of_free", median(costs["metered"]) / median(costs["free"]))


def _gets(pool: Pool, count: int) -> list[float]:
    times = []
    for _ in range(count):
        began = time.perf_counter()
        assert pool.get("quiet small") is not None
        times.append(time.perf_counter() - began)
    return times


def _neighbour(report: Report, node: DmpNode, pool: Pool, address: str, seconds: float) -> None:
    """Time a quiet namespace's gets beside a process that reads as fast as it can."""
    quiet, loud = _quota("quiet", weight=4.0), _quota("four", read_bytes_per_s=50e6)
    for name, quotas in (("alone", []), ("without_limit", []), ("with_limit", [quiet, loud])):
        node.set_quotas(quotas)
        busy = [] if name == "alone" else ["four"]
        with _reading(address, busy):
            times: list[float] = []
            until = time.perf_counter() + seconds
            while time.perf_counter() < until or len(times) < 200:
                times += _gets(pool, 10)
        report.add(f"quiet_get_p99_{name}_ms", 1e3 * quantiles(times, n=100)[98])


def _shares(report: Report, node: DmpNode, address: str, seconds: float) -> None:
    node.set_quotas([_quota(name, weight=weight) for name, weight in _WEIGHTS.items()])
    with _reading(address, list(_WEIGHTS)):
        before = node.turns.moved()
        threading.Event().wait(seconds)
        after = node.turns.moved()
    moved = {name: after[name].read_bytes - before[name].read_bytes for name in _WEIGHTS}
    for name, weight in _WEIGHTS.items():
        share = moved[name] / max(1, sum(moved.values()))
        report.add(f"weight_{name}_share", share)
        report.add(f"weight_{name}_share_of_due", share / (weight / sum(_WEIGHTS.values())))


@contextlib.contextmanager
def _reading(address: str, names: Sequence[str]) -> Iterator[None]:
    """Read large values as some namespaces, each in a process, until the block ends."""
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    began = [context.Event() for _ in names]
    processes = [
        context.Process(target=_read, args=(address, name, event, stop), daemon=True)
        for name, event in zip(names, began, strict=True)
    ]
    for process in processes:
        process.start()
    try:
        assert all(event.wait(_START_S) for event in began), "a reader did not start"
        yield
    finally:
        stop.set()
        for process in processes:
            process.join(_START_S)


def _read(address: str, name: str, began: Event, stop: Event) -> None:
    def run(_: int) -> None:
        with Pool.connect(address, transport="tcp", op_timeout_s=30.0) as pool:
            while not stop.is_set():
                # A refused read was beyond the rate; a caller computes then.
                if pool.get(f"{name} large") is None:
                    stop.wait(0.01)
                began.set()

    with ThreadPoolExecutor(_READERS) as threads:
        list(threads.map(run, range(_READERS)))
