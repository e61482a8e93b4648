"""Time from ``tierkv sql -c`` to the first row, beside a bare interpreter and a bare torch import.

Run ``python -m bench.start_time``.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence

from bench.report import Report, finish, median_seconds, parse_arguments

CASES = {
    "python": [sys.executable, "-c", "pass"],
    "import_torch": [sys.executable, "-c", "import torch"],
    "tierkv_help": [sys.executable, "-m", "tierkv", "--help"],
    "first_row": [sys.executable, "-m", "tierkv", "sql", "-q", "-c", "SELECT 1"],
    "first_answer": [sys.executable, "-m", "tierkv", "sql", "-q", "-c", "SELECT ai_generate('hi')"],
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run and print."""
    arguments = parse_arguments(__doc__ or "", argv)
    report = Report("start time")
    for name, command in CASES.items():
        report.add(f"{name}_s", _median(command, repeats=1 if arguments.quick else 5))
    finish(report, arguments.format)


def _median(command: list[str], *, repeats: int) -> float:
    def run() -> None:
        subprocess.run(command, check=True, capture_output=True)

    return median_seconds(run, repeats=repeats, clock=time.perf_counter)


if __name__ == "__main__":
    main()
