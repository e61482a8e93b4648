"""Cost of one layer of one block: store, load and verify, as fractions of memcpy.

Run ``python -m bench.block_layers``. A DMP node runs in this process. Blocks of several layer sizes
are written and read through shared memory and TCP, and compared with plain copies of the same bytes
in memory.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence

import numpy as np
import xxhash

from bench.report import Report, finish, median_seconds, parse_arguments
from tierkv.dmp.config import DmpConfig
from tierkv.dmp.node.node import DmpNode
from tierkv.dmp.pool_node import PoolNode, RangeRead, RangeWrite
from tierkv.dmp.server.server import DmpServer
from tierkv.dmp.transport.connection import Peer
from tierkv.dmp.transport.select import connect_pool_node
from tierkv.dmp.transport.tcp import TcpPoolNode
from tierkv.kvcore.block import ROOT_PARENT, BlockSpec, Location, RangeShape
from tierkv.kvcore.block_event import NullReporter
from tierkv.kvcore.clock import SystemClock
from tierkv.kvcore.ids import BlockKey, HostId, NodeId

LAYERS = 16
BLOCKS = 16
HOST = HostId("bench")


def main(argv: Sequence[str] | None = None) -> None:
    """Run and print."""
    arguments = parse_arguments(__doc__ or "", argv)
    report = Report("block layers")
    sizes = (64 << 10, 256 << 10) if arguments.quick else (16 << 10, 64 << 10, 256 << 10, 1 << 20)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        node = DmpNode(
            DmpConfig(
                NodeId("dmp-bench"), HOST, segment_path=f"{folder}/segment", capacity_bytes=1 << 30
            ),
            NullReporter(),
            SystemClock(),
        )
        node.start()
        server = DmpServer(node)
        server.start()
        try:
            for size in sizes:
                _measure(report, node, server, size, repeats=5 if arguments.quick else 20)
        finally:
            server.stop()
            node.stop()
    report.note(f"{BLOCKS} blocks of {LAYERS} layers a run, one thread; read = copy and verify")
    finish(report, arguments.format)


def _measure(report: Report, node: DmpNode, server: DmpServer, size: int, *, repeats: int) -> None:
    source = np.random.default_rng(1).integers(0, 255, (BLOCKS * LAYERS, size), dtype=np.uint8)
    # A different page offset than the source: equal offsets make this CPU copy 20 times slower.
    target = np.zeros(source.nbytes + 4096, np.uint8)[1088 : 1088 + source.nbytes]
    target = target.reshape(source.shape)
    memcpy_s = median_seconds(
        lambda: [np.copyto(to, row) for to, row in zip(target, source, strict=True)],
        repeats=repeats,
        clock=time.perf_counter,
    )
    total = source.nbytes
    name = f"{size >> 10}KiB"
    report.add(f"memcpy_{name}_gb_per_s", total / memcpy_s / 1e9)
    verify_s = median_seconds(
        lambda: [xxhash.xxh3_64_intdigest(row) for row in source],
        repeats=repeats,
        clock=time.perf_counter,
    )
    report.add(f"verify_{name}_of_memcpy", memcpy_s / verify_s)
    info = node.reports.info(data_address=server.address)
    shm = connect_pool_node(info, host=HOST)
    tcp = TcpPoolNode(Peer(info.node_id, info.data_address, ""), host=HostId("elsewhere"))
    for transport, client in (("shm", shm), ("tcp", tcp)):
        store_s, load_s = _store_and_load(client, source, target, size, repeats=repeats)
        report.add(f"store_{transport}_{name}_of_memcpy", memcpy_s / store_s)
        report.add(f"load_{transport}_{name}_of_memcpy", memcpy_s / load_s)
        if not np.array_equal(source, target):
            raise AssertionError("bytes read differ from bytes written")
        client.close()


def _store_and_load(
    client: PoolNode, source: np.ndarray, target: np.ndarray, size: int, *, repeats: int
) -> tuple[float, float]:
    counter = iter(range(1, 1 << 30))
    locations: list[Location] = []

    def store() -> None:
        stamp = time.perf_counter_ns()
        puts = [
            BlockSpec(
                BlockKey(stamp.to_bytes(8, "little") + next(counter).to_bytes(8, "little")),
                ROOT_PARENT,
                64,
                RangeShape(size, LAYERS),
            )
            for _ in range(BLOCKS)
        ]
        grants = [grant for grant in client.reserve(puts) if grant is not None]
        client.write_ranges(
            [
                RangeWrite(grant, layer, memoryview(source[block * LAYERS + layer]))
                for layer in range(LAYERS)
                for block, grant in enumerate(grants)
            ]
        )
        locations[:] = [place for place in client.seal(grants) if place is not None]

    def load() -> None:
        client.read_ranges(
            [
                RangeRead(place, layer, memoryview(target[block * LAYERS + layer]))
                for block, place in enumerate(locations)
                for layer in range(LAYERS)
            ]
        )

    store_s = median_seconds(store, repeats=repeats, clock=time.perf_counter)
    load_s = median_seconds(load, repeats=repeats, clock=time.perf_counter)
    return store_s, load_s


if __name__ == "__main__":
    main()
