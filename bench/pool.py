"""The pool against hardware limits and peers, in one run across processes on loopback.

Run ``python -m bench.pool``. Measured are get and put of values of 64 KiB to 16 MiB, single and
sixteen at a time, by one and four threads. The contenders are our tcp and shm, a raw socket,
memcpy, Redis and Mooncake Store.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from bench import pool_table
from bench.line_plot import Panel, save_panels
from bench.pool_cell import size_name
from bench.pool_disk import FILL_BYTES, measure_disk
from bench.pool_run import ROOT, Plan, Results, measure
from bench.report import Report, finish, machine_facts, make_parser

SIZES_KIB: Final = (64, 256, 1024, 4096, 16384)
QUICK_KIB: Final = (64, 1024)
PAGE: Final = ROOT / "docs" / "performance.md"
PICTURE: Final = ROOT / "docs" / "pool-throughput.svg"
DRAWN: Final = {
    "memcpy": "memcpy",
    "shm": "TierKV shm",
    "raw": "raw socket",
    "tcp": "TierKV tcp",
    "redis": "Redis",
    "mooncake": "Mooncake TCP",
}
MARKS: Final = ("<!-- pool:begin -->", "<!-- pool:end -->")


def main(argv: Sequence[str] | None = None) -> None:
    """Run and print."""
    arguments = _parse(argv)
    plan = _plan(arguments)
    started = time.monotonic()
    with tempfile.TemporaryFile() as log:
        try:
            results = measure(plan, log)
            if not arguments.no_disk:
                measure_disk(plan, results, fill_bytes=FILL_BYTES >> 2 * arguments.quick)
        except RuntimeError:
            log.seek(0)
            print(log.read().decode(errors="replace")[-4000:], file=sys.stderr)
            raise
    text = _text(results, time.monotonic() - started)
    if arguments.format == "json":
        report = Report("pool", dict(pool_table.metrics(results)), results.notes)
        finish(report, "json")
    else:
        print(text)
    if arguments.plot or arguments.write_docs:
        panels = [_panel(results, op) for op in ("get", "put")]
        save_panels(Path(arguments.plot or PICTURE), panels)
    if arguments.write_docs:
        _write_docs(text)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__ or "")
    parser.add_argument("--no-peers", action="store_true", help="without Redis and Mooncake")
    parser.add_argument("--no-disk", action="store_true", help="without L4 and fio")
    parser.add_argument("--sizes", help="value sizes in KiB, such as 64,1024")
    parser.add_argument("--threads", default="1,4", help="client threads, such as 1,4")
    parser.add_argument("--rounds", type=int, help="per cell and contender; medians are taken")
    parser.add_argument("--seconds", type=float, help="of one round")
    parser.add_argument("--plot", metavar="FILE", help="write a picture")
    parser.add_argument("--write-docs", action="store_true", help=f"update {PAGE.name}")
    return parser.parse_args(argv)


def _panel(results: Results, op: str) -> Panel:
    """Show throughput by value size, of single values by one thread."""
    cells = [cell for cell in results.rounds if (cell.op, cell.batch, cell.threads) == (op, 1, 1)]
    cells.sort(key=lambda cell: cell.size)
    lines = {
        label: [
            (float(index), speed / 1e9)
            for index, cell in enumerate(cells)
            if (speed := results.speed(cell, name))
        ]
        for name, label in DRAWN.items()
    }
    ticks = {float(index): size_name(cell.size) for index, cell in enumerate(cells)}
    drawn = {name: points for name, points in lines.items() if points}
    return Panel(f"{op}, one value, one thread: GB/s", drawn, ticks)


def _plan(arguments: argparse.Namespace) -> Plan:
    quick = arguments.quick
    sizes = QUICK_KIB if quick else SIZES_KIB
    if arguments.sizes:
        sizes = tuple(map(int, arguments.sizes.split(",")))
    return Plan(
        sizes=[size << 10 for size in sizes],
        threads=[int(count) for count in arguments.threads.split(",")],
        rounds=arguments.rounds or (2 if quick else 4),
        seconds=arguments.seconds or (0.05 if quick else 0.1),
        seed=arguments.seed,
        peers=not arguments.no_peers,
        install_s=25.0 if quick else 600.0,
    )


def _text(results: Results, took_s: float) -> str:
    facts = ", ".join(f"{key} {value}" for key, value in machine_facts().items())
    parts = [
        f"{time.strftime('%Y-%m')}, one run of {took_s:.0f} s ({facts}).",
        "Aims:",
        pool_table.aims_table(results),
        "Throughput in GB/s, and our tcp as a multiple of the raw socket, Redis and Mooncake, our "
        "shm of memcpy (medians of rounds measured in turn):",
        pool_table.throughput_table(results),
        "Latency of one operation, one thread, p50 / p99 in us:",
        pool_table.latency_table(results),
    ]
    disk = pool_table.disk_table(results)
    if disk:
        parts += ["Disk, GB/s:", disk]
    if results.notes:
        parts.append("\n".join(f"- {note}" for note in results.notes))
    return "\n\n".join(parts)


def _write_docs(text: str) -> None:
    page = PAGE.read_text()
    before, begin, rest = page.partition(MARKS[0])
    _, end, after = rest.partition(MARKS[1])
    if not begin or not end:
        raise SystemExit(f"{PAGE} has no {MARKS[0]} ... {MARKS[1]}")
    picture = f"![Throughput by value size]({PICTURE.name})"
    PAGE.write_text(f"{before}{begin}\n{text}\n\n{picture}\n{end}{after}")


if __name__ == "__main__":
    main()
