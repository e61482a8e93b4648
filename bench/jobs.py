"""AI jobs and AI tables: what batches cost, what a killed front costs, what a refresh saves.

Run ``python -m bench.jobs``. A cluster of real processes (``tierkv up``, one compute node, the
shipped model) answers a question about each row of a table. Four ways take turns, each round with
questions of its own: one INSERT ... SELECT, a job, a job with batches of a fifth of the size, and a
job whose front is killed with ``kill -9`` at half of the rows and that is then resumed. All must
write the same number of rows, each key once. Calls asked twice are counted at the compute node,
which outlives the front: by prompt tokens, because prompts of a round are equally long. Then an AI
table is filled, and refreshed after a hundredth of the rows changed; its answers must be those of
its SELECT.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence

import psycopg

from bench.answers import connect_again, kill_front
from bench.batch import Session, cluster, connect
from bench.report import Report, finish, make_parser
from tierkv.compute.demo_model.data import INSTRUCTION

_WAYS = ("statement", "job", "small_batches", "killed")
_REFRESHES = 3
_LOOK_S = 0.02
_INTO_BATCH_S = 0.15
"""The kill comes this long after a checkpoint, in the middle of a batch."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run and print."""
    parser = make_parser(__doc__ or "")
    parser.add_argument("--rows", type=int, default=0, help="rows of the table")
    parser.add_argument("--rounds", type=int, default=0, help="rounds of the four ways")
    arguments = parser.parse_args(argv)
    rows = arguments.rows or (400 if arguments.quick else 4_000)
    rounds = arguments.rounds or (1 if arguments.quick else 3)
    rng = random.Random(arguments.seed)
    report = Report("jobs")
    batch = max(rows // 10, 10)
    report.add("rows", rows)
    report.add("batch_rows", batch)
    seconds: dict[str, list[float]] = {way: [] for way in _WAYS}
    tokens: dict[str, list[float]] = {way: [] for way in _WAYS}
    with tempfile.TemporaryDirectory(prefix="tierkv-jobs-") as folder:
        settings = (
            "front.max_calls=0",
            f"front.database={folder}/tables.duckdb",
            f"cluster.run_dir={folder}/run",
        )
        with cluster(1, *settings) as (dsn, _):
            with connect(dsn, rows, arguments.seed):
                pass
            for number in range(rounds):
                for way in rng.sample(_WAYS, len(_WAYS)):
                    run = _Run(dsn, f"{folder}/run", way, number, rows, batch)
                    seconds[way].append(run.measure())
                    tokens[way].append(run.prompt_tokens)
            _refresh(report, dsn, rows, rng)
    for way in _WAYS:
        report.add(f"{way}_rows_per_s", rows / statistics.median(seconds[way]))
    for way in _WAYS[1:]:
        pairs = zip(seconds[way], seconds["statement"], strict=True)
        report.add(f"{way}_to_statement_time_ratio", statistics.median(a / b for a, b in pairs))
    pairs = zip(tokens["killed"], tokens["job"], strict=True)
    more = [rows * (killed - job) / job for killed, job in pairs]
    report.add("calls_asked_again_after_a_kill", max(more))
    report.add("calls_asked_again_per_batch", max(more) / batch)
    finish(report, arguments.format)


def _refresh(report: Report, dsn: str, rows: int, rng: random.Random) -> None:
    """Fill an AI table, change a hundredth of the rows, and refresh: all answers must be right."""
    select = _question("refresh")
    with psycopg.connect(dsn, autocommit=True) as session:
        began_s = time.perf_counter()
        session.execute(
            f"CREATE AI TABLE kept AS {select} WHERE id <= {rows} WITH (key = id)".encode()
        )
        full_s = time.perf_counter() - began_s
        seconds: list[float] = []
        for number in range(_REFRESHES):
            changed = ", ".join(map(str, rng.sample(range(1, rows + 1), max(rows // 100, 1))))
            session.execute(
                f"UPDATE notes SET note = note || ' {number}.' WHERE id IN ({changed})".encode()
            )
            began_s = time.perf_counter()
            session.execute("REFRESH AI TABLE kept")
            seconds.append(time.perf_counter() - began_s)
        began_s = time.perf_counter()
        session.execute("REFRESH AI TABLE kept")
        nothing_s = time.perf_counter() - began_s
        wrong = session.execute(
            f"SELECT count(*) FROM (SELECT id, answer FROM kept EXCEPT {select} "
            f"WHERE id <= {rows})".encode()
        ).fetchone()
    if wrong != (0,):
        raise RuntimeError(f"{wrong} answers of the AI table are not those of its SELECT")
    report.add("ai_table_full_s", full_s)
    report.add("ai_table_refresh_of_a_hundredth_s", statistics.median(seconds))
    report.add("ai_table_refresh_of_nothing_s", nothing_s)
    report.add("ai_table_refresh_to_full_ratio", statistics.median(seconds) / full_s)


def _question(text: str) -> str:
    prompt = f"'{INSTRUCTION}\n' || note || '\nQuestion {text}: where does the customer live?'"
    options = "options => '{\"max_tokens\": 8}'"
    return f"SELECT id, ai_generate({prompt}, {options}) AS answer FROM notes"


class _Run:
    """One way of one round."""

    def __init__(
        self, dsn: str, run_dir: str, way: str, number: int, rows: int, batch: int
    ) -> None:
        self.prompt_tokens = 0.0
        self._dsn = dsn
        self._run_dir = run_dir
        self._way = way
        self._rows = rows
        self._batch = batch // 5 if way == "small_batches" else batch
        self._table = f"made_{way}_{number}"
        # Equally long for every way, and new to the cache.
        self._select = f"{_question(f'{number}{_WAYS.index(way)}')} WHERE id <= {rows}"

    def measure(self) -> float:
        """Run to the end; return the seconds."""
        with psycopg.connect(self._dsn, autocommit=True) as session:
            before = _prompt_tokens(session)
            session.execute(f"CREATE TABLE {self._table} (id bigint, answer text)".encode())
        began_s = time.perf_counter()
        if self._way == "statement":
            self._execute(f"INSERT INTO {self._table} {self._select}")
        else:
            self._job()
        took_s = time.perf_counter() - began_s
        with psycopg.connect(self._dsn, autocommit=True) as session:
            self.prompt_tokens = _prompt_tokens(session) - before
            count = session.execute(
                f"SELECT count(*), count(DISTINCT id) FROM {self._table}".encode()
            ).fetchone()
        if count != (self._rows, self._rows):
            raise RuntimeError(f"{self._way}: {count} rows and keys instead of {self._rows}")
        return took_s

    def _job(self) -> None:
        text = (
            f"CREATE AI JOB {self._table} AS INSERT INTO {self._table} {self._select} "
            f"WITH (key = id, batch = {self._batch})"
        )
        if self._way != "killed":
            self._execute(text)
            return
        killer = threading.Thread(target=self._kill_at_half)
        killer.start()
        try:
            self._execute(text)
        except psycopg.OperationalError:
            pass
        else:
            raise RuntimeError("the front was not killed in time")
        killer.join()
        with connect_again(self._dsn) as session:
            session.execute(f"RESUME JOB {self._table}".encode())

    def _kill_at_half(self) -> None:
        with psycopg.connect(self._dsn, autocommit=True) as session:
            done = 0
            while done < self._rows / 2:
                time.sleep(_LOOK_S)
                row = session.execute(
                    "SELECT done FROM tierkv.jobs WHERE job = %s", (self._table,)
                ).fetchone()
                done = 0 if row is None else int(row[0])
            time.sleep(_INTO_BATCH_S)
            kill_front(self._run_dir)

    def _execute(self, text: str) -> None:
        with psycopg.connect(self._dsn, autocommit=True) as session:
            session.execute(text.encode())


def _prompt_tokens(session: Session) -> float:
    row = session.execute("SELECT max(query_tokens) FROM tierkv.stat_kvcache").fetchone()
    return float(row[0] or 0) if row is not None else 0.0


if __name__ == "__main__":
    main()
