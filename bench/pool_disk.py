"""The disk tier against fio: same block sizes, same queue depth, O_DIRECT, same file system.

Called by bench.pool after the memory cells. A get reads a random block completely and verifies the
block; a put computes checksums and appends. ``batch16`` gets and four threads of puts keep
``DEPTH`` requests in flight, and fio runs with as many threads.
"""

from __future__ import annotations

import itertools
import json
import mmap
import random
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np

from bench.pool_cell import BATCH, Cell, Operation, Round, Values, run_round, verify
from bench.pool_peers import cache_folder
from bench.pool_run import Plan, Results, say
from tierkv.kvcore.block import ROOT_PARENT, BlockSpec, RangeShape
from tierkv.kvcore.ids import BlockKey
from tierkv.storage.block_store import BlockRead
from tierkv.storage.disk.segment_store import SegmentStore

DEPTH: Final = 4
FILL_BYTES: Final = 512 << 20
SEGMENTS: Final = 8


def measure_disk(plan: Plan, results: Results, *, fill_bytes: int = FILL_BYTES) -> None:
    """Add the cells of ``l4`` and ``fio``."""
    fio = shutil.which("fio")
    if fio is None:
        say(results, "fio was not measured: it is not installed; try: apt-get install fio")
    for size in plan.sizes:
        with tempfile.TemporaryDirectory(dir=cache_folder(), prefix="disk-") as name:
            folder = Path(name)
            target = folder / "fio"
            area = max(fill_bytes, 4 * BATCH * size)
            with _filled(folder / "l4", size, area, plan.seed) as store:
                if not store.direct:
                    say(results, f"{cache_folder()} takes no O_DIRECT: L4 went through the cache")
                for cell in _cells(size):
                    rounds = _rounds(plan, cell, store, fio, target, area)
                    results.rounds[cell] = results.rounds.get(cell, {}) | rounds
                    results.tell(cell, rounds)


def _cells(size: int) -> Iterator[Cell]:
    """Yield puts first: when the log wraps round, the store keeps blocks that were read."""
    yield Cell("put", size, 1, 1)
    yield Cell("put", size, 1, DEPTH)
    yield Cell("get", size, 1, 1)
    yield Cell("get", size, BATCH, 1)


def _rounds(
    plan: Plan, cell: Cell, store: Store, fio: str | None, target: Path, area: int
) -> dict[str, list[Round]]:
    verify(store, cell, store.values)
    rounds: dict[str, list[Round]] = {}
    for _ in range(min(3, plan.rounds)):
        if fio:
            rounds.setdefault("fio", []).append(_fio(fio, cell, target, area, plan.seconds))
        rounds.setdefault("l4", []).append(run_round(store, cell, seconds=plan.seconds))
    return rounds


class Store:
    """A segment store that has wrapped round once, as in service; a contender of bench.pool_cell.

    Attributes:
        values: values to put; the key of a stored block names the value.
        direct: whether the file system supports O_DIRECT.
    """

    ops = ("get", "put")

    def __init__(self, folder: Path, size: int, area: int, seed: int) -> None:
        segment = max(area // SEGMENTS, 2 * size + (1 << 20))
        self._store = SegmentStore(
            folder, capacity_bytes=SEGMENTS * segment, segment_bytes=segment, io_threads=DEPTH
        )
        self.values = Values(size, threads=0, seed=seed)
        self._sources = _aligned(size)
        for to, row in zip(self._sources, self.values.source, strict=True):
            to[:] = memoryview(row)
        self.values.targets.append([np.frombuffer(view, np.uint8) for view in _aligned(size)])
        self._numbers = itertools.count()
        self._random = random.Random(seed)
        self._last: list[BlockKey] = []
        for i in range(SEGMENTS * segment // size + 1):
            self._put(i % BATCH)
        self.direct = self._store.stats().direct_io

    def _put(self, k: int) -> None:
        number = next(self._numbers)
        key = BlockKey(number.to_bytes(8, "little") + k.to_bytes(8, "little"))
        block = BlockSpec(key, ROOT_PARENT, 64, ranges=RangeShape(self.values.size, 1))
        self._store.put(block, self._sources[k])
        self._last = [key]

    def _keys_by_value(self) -> list[list[BlockKey]]:
        keys: list[list[BlockKey]] = [[] for _ in range(BATCH)]
        for block in self._store.blocks():
            keys[int.from_bytes(block.key[8:], "little")].append(block.key)
        return keys

    def store(self, values: Values) -> None:
        """Do nothing: the store is full from the start."""

    def operation(self, cell: Cell, thread: int) -> Operation:
        values, store = self.values, self._store
        keys = self._keys_by_value()
        for k in (k for k in range(BATCH) if not keys[k]):
            self._put(k)
            keys = self._keys_by_value()
        views = [memoryview(row) for row in values.targets[0]]
        draw = random.Random(self._random.random())

        def get(i: int) -> None:
            chosen = values.chosen(i, cell.batch)
            reads = [BlockRead(draw.choice(keys[k]), views[k]) for k in chosen]
            errors = [error for error in store.get_blocks(reads) if error]
            if errors:
                raise errors[0]

        def put(i: int) -> None:
            self._put(values.chosen(i, 1).start)

        return get if cell.op == "get" else put

    def stored(self) -> list[bytes]:
        buffers = [bytearray(self.values.size) for _ in self._last]
        for key, buffer in zip(self._last, buffers, strict=True):
            self._store.get_block(key, memoryview(buffer))
        return [bytes(buffer) for buffer in buffers]

    def tidy(self) -> None:
        """Do nothing: the store evicts."""

    def close(self) -> None:
        self._store.close()


@contextmanager
def _filled(folder: Path, size: int, area: int, seed: int) -> Iterator[Store]:
    store = Store(folder, size, area, seed)
    try:
        yield store
    finally:
        store.close()


def _aligned(size: int) -> list[memoryview]:
    """Return buffers on page borders, as in the slots of a DMP node."""
    view = memoryview(mmap.mmap(-1, BATCH * size))
    return [view[i * size : (i + 1) * size] for i in range(BATCH)]


def _fio(fio: str, cell: Cell, target: Path, area: int, seconds: float) -> Round:
    depth = DEPTH if cell.batch > 1 or cell.threads > 1 else 1
    share = area // depth // cell.size * cell.size
    done = subprocess.run(
        [
            fio, "--name=pool", f"--filename={target}", "--direct=1", "--ioengine=psync",
            f"--rw={'randread' if cell.op == 'get' else 'write'}", f"--bs={cell.size}",
            f"--numjobs={depth}", "--thread", "--group_reporting", "--time_based",
            f"--runtime={max(200, int(seconds * 1000))}ms", f"--size={share}",
            f"--offset_increment={share}", "--randrepeat=1", "--fallocate=none",
            "--output-format=json",
        ],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    job: dict[str, Any] = json.loads(done.stdout)["jobs"][0]
    side = job["read" if cell.op == "get" else "write"]
    percentiles = side["clat_ns"]["percentile"]
    return Round(
        side["bw_bytes"],
        percentiles["50.000000"] / 1e9,
        percentiles["99.000000"] / 1e9,
        side["total_ios"],
    )
