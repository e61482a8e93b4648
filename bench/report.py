"""Shared by all benchmarks: arguments, machine facts, and printing of numbers.

A script fills a Report with named metrics. ``--format json`` prints ``{metric: value}`` with the
machine's facts, ``--format text`` a table. Scripts never assert on time.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(slots=True)
class Report:
    """Metrics in the order of addition.

    Attributes:
        name: the script.
        metrics: name to value; the end of a name is the unit.
        notes: sentences printed under the table.
    """

    name: str
    metrics: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(self, metric: str, value: float) -> None:
        """Add one number and print the number on standard error, because benchmarks take long."""
        self.metrics[metric] = value
        print(f"  {metric} = {render_number(value)}", file=sys.stderr, flush=True)

    def note(self, sentence: str) -> None:
        """Add a sentence."""
        self.notes.append(sentence)


def machine_facts() -> dict[str, str | int]:
    """Return the facts of the machine."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count() or 0,
        "memory_gib": round(memory / (1 << 30)),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def parse_arguments(description: str, argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the options common to all benchmarks: --quick, --seed, --format."""
    return make_parser(description).parse_args(argv)


def make_parser(description: str) -> argparse.ArgumentParser:
    """Return a parser with the common options, for scripts with further options."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="under a minute, coarser")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--format", choices=("text", "json"), default="text")
    return parser


def finish(report: Report, output: str) -> None:
    """Print a report."""
    if output == "json":
        print(json.dumps(report.metrics | {"machine": machine_facts()}, indent=2))
        return
    print(f"\n{report.name}  ({', '.join(f'{k} {v}' for k, v in machine_facts().items())})")
    width = max(map(len, report.metrics), default=0)
    for metric, value in report.metrics.items():
        print(f"  {metric:<{width}}  {render_number(value)}")
    for sentence in report.notes:
        print(f"  {sentence}")


def render_number(value: float) -> str:
    """Return a number with three significant digits, in plain notation."""
    if value == 0 or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def median_seconds(
    action: Callable[[], object], *, repeats: int, clock: Callable[[], float]
) -> float:
    """Return the median duration of ``repeats`` runs after a run that does not count."""
    action()
    times = []
    for _ in range(repeats):
        started = clock()
        action()
        times.append(clock() - started)
    return statistics.median(times)
