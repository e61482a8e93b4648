"""Start time of commands, also as multiples of the unavoidable time, round by round.

Run ``python -m bench.start_time``. The lower bound for SQL is a bare interpreter that runs the SQL
in DuckDB. The lower bound for AI calls and for ``tierkv up`` is an interpreter that imports torch.
Compiled modules (.pyc) lie in a folder of this run and exist before the first round, regardless of
the environment. ``first_row_uncompiled_s`` and ``duckdb_uncompiled_s`` run without compiled
modules.
"""

from __future__ import annotations

import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from bench.report import Report, finish, parse_arguments

ROOT = Path(__file__).parents[1]
PYTHON = sys.executable
TIERKV = [PYTHON, "-m", "tierkv"]
SHORT = ["sql", "-q", "--set", "dmp.capacity=1GiB", "-c"]
ASK = "SELECT ai_generate('hi')"

COMMANDS: Mapping[str, list[str]] = {
    "python": [PYTHON, "-c", "pass"],
    "duckdb": [PYTHON, "-c", "import duckdb; print(duckdb.sql('SELECT 1'))"],
    "import_torch": [PYTHON, "-c", "import torch"],
    "tierkv_help": [*TIERKV, "--help"],
    "first_row": [*TIERKV, *SHORT, "SELECT 1"],
    "first_answer": [*TIERKV, *SHORT, ASK],
}
RATIOS = (
    ("tierkv_help", "duckdb"),
    ("first_row", "duckdb"),
    ("first_answer", "import_torch"),
    ("up_ready", "import_torch"),
)
IDLE = f"""
import tierkv
def mib():
    rows = [line.split() for line in open("/proc/self/status")]
    return next(int(row[1]) for row in rows if row[0] == "VmRSS:") >> 10
with tierkv.connect() as connection:
    print(mib())
    connection.execute({ASK!r})
    print(mib())
"""


def main(argv: Sequence[str] | None = None) -> None:
    """Run and print."""
    arguments = parse_arguments(__doc__ or "", argv)
    rounds = 1 if arguments.quick else 7
    report = Report("start time")
    with tempfile.TemporaryDirectory(prefix="tierkv-bench-") as folder:
        environment = compiled_in(Path(folder))
        cases: dict[str, Callable[[], float]] = {
            name: timed(command, environment) for name, command in COMMANDS.items()
        }
        cases["up_ready"] = lambda: up_ready_s(Path(folder), environment)
        for case in cases.values():
            case()  # Compiles the imported modules, and brings files into memory.
        # Round by round, so a busy moment of the machine affects both sides of a ratio.
        times = [{name: case() for name, case in cases.items()} for _ in range(rounds)]
        before, after = idle_mib(environment)
        bare = without_compiled(Path(folder))
        uncompiled = {
            name: statistics.median(timed(COMMANDS[name], bare)() for _ in range(min(3, rounds)))
            for name in ("duckdb", "first_row")
        }
    for name in cases:
        report.add(f"{name}_s", statistics.median(each[name] for each in times))
    for name, seconds in uncompiled.items():
        report.add(f"{name}_uncompiled_s", seconds)
    for name, floor in RATIOS:
        ratio = statistics.median(each[name] / each[floor] for each in times)
        report.add(f"{name}_of_{floor}", ratio)
    report.add("idle_before_first_call_mib", before)
    report.add("idle_after_first_call_mib", after)
    report.note(
        "Compiled modules (.pyc) of ours and of all libraries were there, but for *_uncompiled_s; "
        "a ratio is the median of the rounds' ratios."
    )
    finish(report, arguments.format)


def compiled_in(folder: Path) -> dict[str, str]:
    """Return an environment in which modules are compiled into a separate folder."""
    kept = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    return kept | {"PYTHONPYCACHEPREFIX": str(folder / "pyc")}


def without_compiled(folder: Path) -> dict[str, str]:
    """Return an environment in which no compiled module is read or written."""
    nowhere = {"PYTHONPYCACHEPREFIX": str(folder / "none"), "PYTHONDONTWRITEBYTECODE": "1"}
    return dict(os.environ) | nowhere


def timed(command: list[str], environment: Mapping[str, str]) -> Callable[[], float]:
    """Return a function that runs a command to the end and returns the seconds."""

    def run() -> float:
        started = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True, env=environment, cwd=ROOT)
        return time.perf_counter() - started

    return run


def up_ready_s(folder: Path, environment: Mapping[str, str]) -> float:
    """Start a default cluster; return the seconds until the cluster reports that it is up."""
    with tempfile.TemporaryDirectory(dir=folder) as run_dir, tempfile.TemporaryFile() as errors:
        settings = [f"cluster.run_dir={run_dir}", "dmp.remove_on_stop=true"]
        ports = ["--pg-port", str(free_port()), "--http-port", str(free_port())]
        command = [*TIERKV, "up", *ports, *(w for s in settings for w in ("--set", s))]
        started = time.perf_counter()
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, env=environment, cwd=ROOT, text=True
        ) as process:
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    if line.startswith("TierKV is up"):
                        return time.perf_counter() - started
            finally:
                process.send_signal(signal.SIGINT)
        errors.seek(0)
        raise RuntimeError(f"tierkv up did not start: {errors.read().decode()}")


def free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def idle_mib(environment: Mapping[str, str]) -> tuple[int, int]:
    """Return an idle embedded process's resident MiB before and after the first AI call."""
    done = subprocess.run(
        [PYTHON, "-c", IDLE], check=True, capture_output=True, text=True, env=environment, cwd=ROOT
    )
    before, after = map(int, done.stdout.split())
    return before, after


if __name__ == "__main__":
    main()
