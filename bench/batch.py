"""Batch of a statement on a cluster of real processes: placement of calls, and delay of a chat.

Run ``python -m bench.batch``. In the first part several equal compute nodes answer questions about
the same rows, a statement after the other. Measured are the distribution of the calls over the
nodes, the share of a later question's rows that go to the node with the rows' KV, and the share of
rows placed without any known KV: medians over several new clusters, and the worst. In the second
part a single node answers a large statement during a chat. Measured are the chat's time to the
first token with and without the statement, and the statement's seconds, alternating between the
default ``tierkv.bulk_calls`` and 0.
"""

from __future__ import annotations

import json
import signal
import statistics
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import psycopg
from openai import OpenAI

from bench.report import Report, finish, make_parser
from bench.start_time import ROOT, TIERKV, free_port
from tierkv.compute.demo_model.data import INSTRUCTION, make_records

QUESTIONS = ("What did the customer buy?", "Where does the customer live?", "Who is it?")
CHAT = "Question {number}: where does Jonas Ortiz live? He lives in Vienna."
PAUSE_S = 0.3
"""Seconds between two turns of the chat."""

Session = psycopg.Connection[tuple[Any, ...]]


@contextmanager
def cluster(nodes: int, *settings: str, pool_nodes: int = 1) -> Iterator[tuple[str, str]]:
    """Run ``tierkv up`` with further settings; yield the addresses for SQL and REST."""
    pg_port, http_port = free_port(), free_port()
    with tempfile.TemporaryDirectory(prefix="tierkv-bench-") as folder:
        command = [
            *TIERKV, "up", "--compute", str(nodes), "--dmp", str(pool_nodes),
            "--pg-port", str(pg_port), "--http-port", str(http_port),
            "--set", f"cluster.run_dir={folder}",
            "--set", "dmp.remove_on_stop=true", "--set", "compute.threads=1",
            *(word for setting in settings for word in ("--set", setting)),
        ]  # fmt: skip
        with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT, text=True) as process:
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    if line.startswith("TierKV is up"):
                        break
                else:
                    raise RuntimeError("tierkv up did not start")
                dsn = f"host=127.0.0.1 port={pg_port} user=tierkv dbname=main"
                yield dsn, f"http://127.0.0.1:{http_port}/v1"
            finally:
                process.send_signal(signal.SIGINT)


def connect(dsn: str, rows: int, seed: int) -> Session:
    """Connect and create the table of notes."""
    session = psycopg.connect(dsn, autocommit=True)
    session.execute("CREATE TABLE IF NOT EXISTS notes (id INTEGER, note VARCHAR)")
    with session.cursor() as cursor, cursor.copy("COPY notes FROM STDIN") as copy:
        for record in make_records(rows, seed):
            copy.write_row((record.record_id, record.text))
    return session


def ask(session: Session, question: str) -> float:
    """Ask about every note; return the seconds."""
    began_s = time.perf_counter()
    session.execute(
        "SELECT ai_generate(%s || note || %s, options => '{\"max_tokens\": 8}') FROM notes",
        (INSTRUCTION + "\n", "\nQuestion: " + question),
    ).fetchall()
    return time.perf_counter() - began_s


def placements(nodes: int, rows: int, seed: int) -> Iterator[tuple[int, dict[str, float]]]:
    """Ask each question of a new cluster; yield its number and the distribution of its calls."""
    with cluster(nodes) as (dsn, _), connect(dsn, rows, seed) as session:
        for number, question in enumerate(QUESTIONS, 1):
            seconds = ask(session, question)
            log = session.execute(
                "SELECT node_id, candidates FROM tierkv.routing_log"
                " ORDER BY decided_at DESC LIMIT %s",
                (rows,),
            ).fetchall()
            weighed = [json.loads(c) if isinstance(c, str) else c for _, c in log]
            counts = Counter(node for node, _ in log)
            near = [[c["reused_blocks"].get("L1", 0) for c in each] for each in weighed]
            figures = {
                "s": seconds,
                "most_of_mean": max(counts.values()) * nodes / rows,
                "least_of_mean": min(counts.values()) * nodes / rows * (len(counts) == nodes),
            }
            if number > 1:
                figures["rows_to_their_kv"] = sum(b[0] == max(b) for b in near) / rows
                figures["decided_blind"] = sum(not any(b) for b in near) / rows
            yield number, figures


def share(report: Report, *, nodes: int, rows: int, rounds: int, seed: int) -> None:
    """Report the distribution of each statement's calls over the nodes."""
    found: dict[str, list[float]] = {}
    for at in range(rounds):
        for number, figures in placements(nodes, rows, seed + at):
            for name, figure in figures.items():
                found.setdefault(f"{nodes}_nodes_question_{number}_{name}", []).append(figure)
    for name, each in found.items():
        report.add(name, statistics.median(each))
        if rounds > 1 and not name.endswith("_s"):
            worst = min if name.endswith(("least_of_mean", "to_their_kv")) else max
            report.add(f"{name}_worst", worst(each))


class Chat:
    """A user who asks short questions over REST."""

    def __init__(self, url: str) -> None:
        self._client = OpenAI(base_url=url, api_key="none", max_retries=0, timeout=120)
        self._model = self._client.models.list().data[0].id
        self._number = 0

    def first_token_s(self) -> float:
        """Ask a question; return the seconds to the first text."""
        self._number += 1
        message = {"role": "user", "content": CHAT.format(number=self._number)}
        began_s = time.perf_counter()
        stream = self._client.chat.completions.create(
            model=self._model,
            messages=[message],
            max_tokens=8,
            stream=True,  # type: ignore[call-overload,list-item]
        )
        seconds = 0.0
        for chunk in stream:
            if not seconds and chunk.choices and chunk.choices[0].delta.content:
                seconds = time.perf_counter() - began_s
        return seconds


def beside(session: Session, chat: Chat) -> tuple[float, list[float]]:
    """Chat while a statement runs; return the statement's seconds and the chat's TTFTs."""
    took: list[float] = []
    thread = threading.Thread(target=lambda: took.append(ask(session, QUESTIONS[0])))
    thread.start()
    seconds = []
    while thread.is_alive():
        thread.join(PAUSE_S)
        seconds.append(chat.first_token_s())
    return took[0], seconds[:-1] or seconds


def yielding(report: Report, *, rows: int, rounds: int, seed: int) -> None:
    """Report the chat's wait during a large statement, and the statement's cost of yielding."""
    with cluster(1) as (dsn, url), connect(dsn, rows, seed) as session:
        session.execute("SET tierkv.cache = off")
        chat = Chat(url)
        alone_s = statistics.median(chat.first_token_s() for _ in range(10))
        usual = session.execute("SHOW tierkv.bulk_calls").fetchall()[0][0]
        ways = {"bulk_first_come": 0, "bulk_yields": usual}
        statement_s: dict[str, list[float]] = {way: [] for way in ways}
        waits_s: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(rounds):
            for way, calls in ways.items():
                session.execute(f"SET tierkv.bulk_calls = {calls}")
                seconds, waited_s = beside(session, chat)
                statement_s[way].append(seconds)
                waits_s[way] += waited_s
    report.add("chat_alone_ttft_p50_s", alone_s)
    for way in ways:
        report.add(f"{way}_chat_ttft_p50_s", statistics.median(waits_s[way]))
        report.add(f"{way}_chat_ttft_most_s", max(waits_s[way]))
        report.add(f"{way}_statement_s", statistics.median(statement_s[way]))
    first, yields = (statistics.median(statement_s[way]) for way in ways)
    report.add("bulk_throughput_kept", first / yields)


def main(argv: Sequence[str] | None = None) -> None:
    """Run and print."""
    parser = make_parser(__doc__ or "")
    parser.add_argument("--nodes", type=int, default=3, help="equal compute nodes")
    arguments = parser.parse_args(argv)
    quick = arguments.quick
    report = Report("batch")
    share(
        report,
        nodes=arguments.nodes,
        rows=60 if quick else 150,
        rounds=1 if quick else 6,
        seed=arguments.seed,
    )
    yielding(report, rows=150 if quick else 600, rounds=1 if quick else 3, seed=arguments.seed)
    finish(report, arguments.format)


if __name__ == "__main__":
    main()
