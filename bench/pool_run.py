"""Run the pool benchmark: start the workers and measure cell by cell, all contenders in turn.

Called by bench.pool. The contenders of a cell are measured round-robin and compared round by round,
so the noise of a shared machine affects all contenders alike.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, Final

from bench.pool_cell import BATCH, Cell, Round
from bench.pool_peers import PeerMissingError, peer_python

ROOT: Final = Path(__file__).parent.parent
PEERS: Final = ("redis", "mooncake")


@dataclass(frozen=True, slots=True)
class Plan:
    """Amount of measurements."""

    sizes: Sequence[int]
    threads: Sequence[int]
    rounds: int
    seconds: float
    seed: int
    peers: bool
    install_s: float

    def rounds_of(self, size: int) -> int:
        """Return the number of rounds of a size: large values take longest and vary least."""
        return self.rounds if size <= 1 << 20 else max(1, self.rounds // 2)

    def cells(self, size: int) -> Iterator[Cell]:
        """Yield the cells of one size."""
        for op in ("get", "put"):
            for batch in (1, BATCH):
                for threads in self.threads:
                    yield Cell(op, size, batch, threads)


@dataclass(slots=True)
class Results:
    """Rounds by cell and contender, in measured order."""

    rounds: dict[Cell, dict[str, list[Round]]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def speed(self, cell: Cell, name: str) -> float | None:
        """Return the median bytes per second; None if not measured."""
        rounds = self.rounds.get(cell, {}).get(name)
        return statistics.median(r.bytes_per_s for r in rounds) if rounds else None

    def latency(self, cell: Cell, name: str, which: str) -> float | None:
        """Return the median over rounds of ``p50_s`` or ``p99_s``."""
        rounds = self.rounds.get(cell, {}).get(name)
        return statistics.median(getattr(r, which) for r in rounds) if rounds else None

    def ratio(self, cell: Cell, name: str, other: str, which: str = "bytes_per_s") -> float | None:
        """Return the median over rounds of one contender's value over another's."""
        rounds = self.rounds.get(cell, {})
        pairs = zip(rounds.get(name, ()), rounds.get(other, ()), strict=False)
        ratios = [getattr(a, which) / getattr(b, which) for a, b in pairs]
        return statistics.median(ratios) if ratios else None

    def tell(self, cell: Cell, names: Iterable[str]) -> None:
        """Print the latest measurement, because a run takes minutes."""
        speeds = ", ".join(f"{n} {(self.speed(cell, n) or 0) / 1e9:.3g}" for n in names)
        print(f"  {cell.name} GB/s: {speeds}", file=sys.stderr, flush=True)

    def best(self, cell: Cell, names: Sequence[str]) -> str:
        """Return the fastest of several ways to use a peer."""
        return max(names, key=lambda name: self.speed(cell, name) or 0.0)


class WorkerProcess:
    """A bench.pool_worker process and the pipe to the process."""

    def __init__(self, kind: str, python: Path, log: IO[bytes]) -> None:
        self.kind = kind
        self._process = subprocess.Popen(
            [str(python), "-m", "bench.pool_worker", kind],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, cwd=ROOT,
        )  # fmt: skip
        self.ops: dict[str, list[str]] = self.ask(do="names")["ops"]

    def ask(self, **command: Any) -> dict[str, Any]:
        """Send a command and return the answer.

        Raises:
            RuntimeError: the worker or a contender failed.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            print(json.dumps(command), file=self._process.stdin, flush=True)
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise RuntimeError(f"the {self.kind} worker ended")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer

    def close(self) -> None:
        """Let the worker stop all servers and exit."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


def measure(plan: Plan, log: IO[bytes]) -> Results:
    """Measure every cell of a plan; cells that can't be measured become notes."""
    results = Results()
    workers: list[WorkerProcess] = []
    try:
        workers.append(WorkerProcess("house", Path(sys.executable), log))
        for peer in PEERS if plan.peers else ():
            try:
                python = peer_python(peer, timeout_s=plan.install_s)
                workers.append(WorkerProcess(peer, python, log))
            except (PeerMissingError, RuntimeError) as error:
                say(results, f"{peer} was not measured: {error}")
        for size in plan.sizes:
            lame = _take_size(plan, workers, size, results)
            for cell in plan.cells(size):
                _measure_cell(plan, workers, cell, lame, results)
    finally:
        for worker in workers:
            worker.close()
    return results


def _take_size(plan: Plan, workers: list[WorkerProcess], size: int, results: Results) -> set[str]:
    lame: set[str] = set()
    for worker in workers:
        ask = {"do": "size", "size": size, "threads": max(plan.threads), "seed": plan.seed}
        for name, why in worker.ask(**ask)["failed"].items():
            say(results, f"{name} was not measured with {size} bytes: {why}")
            lame.add(name)
    return lame


def _measure_cell(
    plan: Plan, workers: list[WorkerProcess], cell: Cell, lame: set[str], results: Results
) -> None:
    taking_part = [
        (worker, name)
        for worker in workers
        for name, ops in worker.ops.items()
        if name not in lame
        and {cell.op, f"{cell.op}_{'batch' if cell.batch > 1 else 'one'}"} & {*ops}
    ]
    rounds: dict[str, list[Round]] = {}
    for worker, name in list(taking_part):
        if not _tried(worker, name, cell, results):
            taking_part.remove((worker, name))
    for turn in range(1 + plan.rounds_of(cell.size)):
        for worker, name in list(taking_part):
            try:
                answer = worker.ask(do="round", name=name, cell=asdict(cell), seconds=plan.seconds)
            except RuntimeError as error:
                say(results, f"{name} failed in {cell.name}: {error}")
                taking_part.remove((worker, name))
                rounds.pop(name, None)
                continue
            # The first round does not count: the window of a connection that was idle, or carried
            # bytes the other way, needs about 0.1 s to open (measured on Linux 6.18, loopback).
            if turn:
                rounds.setdefault(name, []).append(Round(**answer))
    results.rounds[cell] = rounds
    results.tell(cell, rounds)


def _tried(worker: WorkerProcess, name: str, cell: Cell, results: Results) -> bool:
    """Do one operation and compare the bytes; the operation also warms up."""
    try:
        worker.ask(do="verify", name=name, cell=asdict(cell))
    except RuntimeError as error:
        say(results, f"{name} was not measured in {cell.name}: {error}")
        return False
    return True


def say(results: Results, sentence: str) -> None:
    """Add a note and print the note immediately."""
    results.notes.append(sentence)
    print(f"  {sentence}", file=sys.stderr, flush=True)
