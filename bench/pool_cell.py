"""One cell of the pool benchmark: the bytes, the contract of a contender, and one timed round.

Imported by the workers of bench.pool in different virtual environments, so only numpy is needed.
Every contender moves the same values from and to the same kind of buffers.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np

BATCH: Final = 16
GET_OFFSET: Final = 1088
PUT_OFFSET: Final = 2112
"""Offset of put buffers within a page. Pools keep values on page borders. Copies between equal page
offsets alias on several CPUs and are far slower; these offsets are fair to all contenders."""

PAGE: Final = 4096
ROUND_PUT_BYTES: Final = 1 << 30
"""Maximum number of bytes put in one round, so a pool of ``POOL_BYTES`` need not evict during the
round."""

POOL_BYTES: Final = 3 << 30

Array = np.ndarray[Any, np.dtype[np.uint8]]
Operation = Callable[[int], object]
"""Do the i-th get or put of a thread; the result is kept until the next operation."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A case: ``op`` is get or put, ``batch`` values per operation, client threads."""

    op: str
    size: int
    batch: int
    threads: int

    @property
    def name(self) -> str:
        """The name in metrics, for example ``get_64KiB_batch16_t4``."""
        many = f"batch{self.batch}" if self.batch > 1 else "single"
        return f"{self.op}_{size_name(self.size)}_{many}_t{self.threads}"


def size_name(size: int) -> str:
    """Return ``64KiB`` or ``4MiB``."""
    return f"{size >> 20}MiB" if size >= 1 << 20 else f"{size >> 10}KiB"


class Values:
    """The values of one size, and the destination buffers of gets.

    Attributes:
        size: bytes of one value.
        source: ``BATCH`` seeded values to store and put.
        targets: per thread, ``BATCH`` destinations.
    """

    def __init__(self, size: int, *, threads: int, seed: int) -> None:
        self.size = size
        self.source = _buffers(size, PUT_OFFSET)
        rng = np.random.default_rng(seed)
        for row in self.source:
            row[:] = np.frombuffer(rng.bytes(size), np.uint8)
        self.targets = [_buffers(size, GET_OFFSET) for _ in range(threads)]

    def chosen(self, i: int, batch: int) -> range:
        """Return the range of values that the i-th operation moves."""
        start = i * batch % BATCH
        return range(start, start + batch)


def _buffers(size: int, offset: int) -> list[Array]:
    whole = np.zeros(BATCH * size + 2 * PAGE, np.uint8)
    start = -whole.ctypes.data % PAGE + offset
    return [whole[start + i * size : start + (i + 1) * size] for i in range(BATCH)]


class Contender(Protocol):
    """A store of values; created by the worker, used by one thread per ``thread`` number.

    1. ``store`` drops the former values and stores ``values.source`` for gets.
    2. ``operation`` returns an action. The i-th get fills ``values.targets[thread]`` at
       ``values.chosen(i, batch)``, or returns the values as buffers. The i-th put stores the chosen
       values of ``source`` anew.
    3. ``stored`` returns the bytes that the last put of thread 0 left in the store.
    4. ``tidy`` makes room after a round of puts, outside of the measured time.
    """

    ops: tuple[str, ...]

    def store(self, values: Values) -> None: ...

    def operation(self, cell: Cell, thread: int) -> Operation: ...

    def stored(self) -> list[bytes]: ...

    def tidy(self) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Round:
    """Measurements of one round."""

    bytes_per_s: float
    p50_s: float
    p99_s: float
    operations: int


def run_round(contender: Contender, cell: Cell, *, seconds: float) -> Round:
    """Let all threads work for ``seconds`` (at least one operation each) and measure.

    Each thread does one operation before the clock starts: connections, page faults and code paths
    are warm.
    """
    most = 1 << 30
    if cell.op == "put":
        most = max(1, ROUND_PUT_BYTES // (cell.size * cell.batch * cell.threads) - 1)
    barrier = threading.Barrier(cell.threads)
    spans: list[tuple[float, float]] = []
    latencies: list[float] = []
    failures: list[BaseException] = []

    def work(thread: int) -> None:
        try:
            act = contender.operation(cell, thread)
            act(0)
            barrier.wait()
            times = _timed(act, seconds, most)
            spans.append((times[0], times[-1]))
            latencies.extend(np.diff(np.array(times)).tolist())
        except BaseException as error:  # noqa: BLE001 - raised again by the caller's thread
            failures.append(error)
            barrier.abort()

    _on_threads(work, cell.threads)
    if failures:
        raise next(e for e in failures if not isinstance(e, threading.BrokenBarrierError))
    if cell.op == "put":
        contender.tidy()
    wall = max(end for _, end in spans) - min(start for start, _ in spans)
    p50, p99 = np.percentile(latencies, (50, 99))
    moved = len(latencies) * cell.batch * cell.size
    return Round(moved / wall, float(p50), float(p99), len(latencies))


def _timed(act: Operation, seconds: float, most: int) -> list[float]:
    """Return the instants between operations; one clock call each."""
    now = time.perf_counter()
    times, deadline, i = [now], now + seconds, 0
    while now < deadline and i < most:
        i += 1
        act(i)
        now = time.perf_counter()
        times.append(now)
    return times


def _on_threads(work: Callable[[int], None], count: int) -> None:
    threads = [threading.Thread(target=work, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def verify(contender: Contender, cell: Cell, values: Values) -> None:
    """Do one operation and compare the bytes, because moving wrong bytes measures nothing.

    Raises:
        AssertionError: the bytes differ.
    """
    act = contender.operation(cell, 0)
    chosen = values.chosen(1, cell.batch)
    expected = [values.source[i] for i in chosen]
    if cell.op == "put":
        act(1)
        got: list[Any] = list(contender.stored())
        contender.tidy()
    else:
        for i in chosen:
            values.targets[0][i][:] = 0
        answer = act(1)
        got = list(answer) if isinstance(answer, (list, tuple)) else []
        got = got or [values.targets[0][i] for i in chosen]
    same = [
        np.array_equal(np.frombuffer(g, np.uint8), e) for g, e in zip(got, expected, strict=True)
    ]
    if not all(same):
        raise AssertionError(f"{cell.name}: bytes differ")
