"""The answer cache: a statement that runs again, with it and without it, and what a miss costs.

Run ``python -m bench.answers``. A cluster of real processes (``tierkv up``, one compute node, the
shipped model) answers a question about each row of a table, over psycopg. The statement runs four
times: first, again without the answer cache (KV is reused), again with it, and once more after
``kill -9`` of the front, so that answers come from the file. All four must give the same answers.
Then new questions about fewer rows run in turn with the cache and without it: nothing is found, so
the ratio is what looking and keeping cost.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psycopg

from bench.batch import Session, cluster, connect
from bench.report import Report, finish, make_parser
from tierkv.compute.demo_model.data import INSTRUCTION

QUESTION = "What did the customer buy?"
_RESTART_S = 60.0


def main(argv: Sequence[str] | None = None) -> None:
    """Run and print."""
    parser = make_parser(__doc__ or "")
    parser.add_argument("--rows", type=int, default=0, help="rows of the table")
    arguments = parser.parse_args(argv)
    rows = arguments.rows or (600 if arguments.quick else 20_000)
    report = Report("answers")
    report.add("rows", rows)
    with tempfile.TemporaryDirectory(prefix="tierkv-answers-") as folder:
        file = Path(folder) / "answers"
        settings = (
            "front.max_calls=0",
            f"front.answer_cache={file}",
            f"front.database={folder}/tables.duckdb",
            f"cluster.run_dir={folder}/run",
        )
        with cluster(1, *settings) as (dsn, _):
            _again(report, dsn, f"{folder}/run", rows, arguments.seed)
            report.add("file_bytes_per_answer", file.stat().st_size / rows)
            few, rounds = (100, 2) if arguments.quick else (2_000, 5)
            _misses(report, dsn, min(few, rows), rounds, random.Random(arguments.seed))
    finish(report, arguments.format)


def _again(report: Report, dsn: str, run_dir: str, rows: int, seed: int) -> None:
    with connect(dsn, rows, seed) as session:
        _use(session, on=True)
        first_s, first = _run(session, QUESTION, rows)
        _use(session, on=False)
        without_s, without = _run(session, QUESTION, rows)
        _use(session, on=True)
        with_s, found = _run(session, QUESTION, rows)
    kill_front(run_dir)
    with connect_again(dsn) as session:
        _use(session, on=True)
        restarted_s, from_file = _run(session, QUESTION, rows)
        counts = session.execute("SELECT hits, misses FROM tierkv.answer_cache").fetchone()
    if not first == without == found == from_file:
        raise RuntimeError("an answer differs from the first one")
    hits, misses = counts or (0, 0)
    report.add("first_run_s", first_s)
    report.add("second_run_without_s", without_s)
    report.add("second_run_with_s", with_s)
    report.add("run_after_restart_s", restarted_s)
    report.add("second_run_without_to_with_ratio", without_s / with_s)
    report.add("second_run_without_to_restart_ratio", without_s / restarted_s)
    report.add("found_after_restart_share", hits / (hits + misses))


def _misses(report: Report, dsn: str, rows: int, rounds: int, rng: random.Random) -> None:
    """Ask new questions, with the cache and without it in turn."""
    found: dict[bool, list[float]] = {True: [], False: []}
    with psycopg.connect(dsn, autocommit=True) as session:
        for number in range(rounds):
            for on in rng.sample((True, False), 2):
                _use(session, on=on)
                question = f"Question {number} {on}: where does the customer live?"
                found[on].append(_run(session, question, rows)[0])
    report.add("miss_rows_per_s", rows / statistics.median(found[True]))
    pairs = [on / off for on, off in zip(found[True], found[False], strict=True)]
    report.add("miss_with_to_without_ratio", statistics.median(pairs))


def _use(session: Session, *, on: bool) -> None:
    session.execute(f"SET tierkv.answer_cache = {'tenant' if on else 'off'}")


def _run(session: Session, question: str, rows: int) -> tuple[float, str]:
    """Ask about the first rows; return the seconds, and a digest of all answers."""
    began_s = time.perf_counter()
    row = session.execute(
        "SELECT md5(string_agg(answer, ';' ORDER BY id)) FROM (SELECT id, ai_generate("
        "%s || note || %s, options => '{\"max_tokens\": 8}') AS answer FROM notes WHERE id < %s)",
        (INSTRUCTION + "\n", "\nQuestion: " + question, rows),
    ).fetchone()
    assert row is not None
    return time.perf_counter() - began_s, str(row[0])


def kill_front(run_dir: str) -> None:
    """Kill -9 the front; ``tierkv up`` starts another one."""
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = process.read_bytes().split(b"\0")
        except OSError:  # It has ended in the meantime.
            continue
        if b"front" in words and f"{run_dir}/cluster.toml".encode() in words:
            os.kill(int(process.parent.name), signal.SIGKILL)


def connect_again(dsn: str) -> psycopg.Connection[tuple[Any, ...]]:
    """Connect once the front has been started again."""
    end_s = time.monotonic() + _RESTART_S
    while True:
        try:
            return psycopg.connect(dsn, autocommit=True)
        except psycopg.OperationalError:
            if time.monotonic() > end_s:
                raise
            time.sleep(0.1)


if __name__ == "__main__":
    main()
