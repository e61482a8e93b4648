"""Cascade: calls saved by a classifier, its agreement with the model, and seconds.

Run ``python -m bench.cascade``. A cluster of real processes (``tierkv up``, one compute node, the
shipped model) answers questions about customers' reviews, over psycopg. For each question three
tables of the same number of new reviews are asked about, in random order: by the model alone, with
``tierkv.cascade = 0.95``, and with it after an earlier ``ai_embed`` whose vectors the answer cache
has kept. Then the model answers the rows of the other two tables as well, untimed, which gives the
true agreement over all rows. A true agreement of the classifier's rows far below the bound fails
the script.
"""

from __future__ import annotations

import json
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psycopg

from bench.batch import Session, cluster
from bench.report import Report, finish, make_parser
from tierkv.compute.demo_model.data import make_records

ASKED = 0.95
_SLACK = 0.02
"""True agreement may be below the bound once in twenty times, but not by much."""

QUESTIONS = {
    "tone": "ai_classify(review, ['positive', 'negative'], 'Is the review positive or negative?')",
    "topic": "ai_classify(review, ['delivery', 'price', 'quality', 'support'])",
}
_WAYS = ("model", "cascade", "kept")


def main(argv: Sequence[str] | None = None) -> None:
    """Run and print."""
    parser = make_parser(__doc__ or "")
    parser.add_argument("--rows", type=int, default=0, help="rows of each table")
    arguments = parser.parse_args(argv)
    rows = arguments.rows or (1_500 if arguments.quick else 4_000)
    questions = ["tone"] if arguments.quick else list(QUESTIONS)
    rng = random.Random(arguments.seed)
    report = Report("cascade")
    report.add("rows", rows)
    with tempfile.TemporaryDirectory(prefix="tierkv-cascade-") as folder:
        settings = ("front.max_calls=0", f"front.answer_cache={Path(folder) / 'answers'}")
        with (
            cluster(1, *settings) as (dsn, _),
            psycopg.connect(dsn, autocommit=True) as session,
        ):
            session.execute("SET tierkv.notice_calls = 0")
            for question in questions:
                for way in rng.sample(_WAYS, len(_WAYS)):
                    _table(session, f"{question}_{way}", rows, rng.randrange(1 << 30))
                    _measure(report, session, question, way)
                _compare(report, question)
    finish(report, arguments.format)


def _table(session: Session, name: str, rows: int, seed: int) -> None:
    """Create a table of distinct reviews."""
    session.execute(f"CREATE TABLE {name} (id INTEGER, review VARCHAR)")
    with session.cursor() as cursor, cursor.copy(f"COPY {name} FROM STDIN") as copy:
        for record in make_records(rows, seed):
            # The order makes the reviews distinct: the demo's phrases repeat.
            copy.write_row((record.record_id, f"Order {record.order}. {record.review}"))


def _measure(report: Report, session: Session, question: str, way: str) -> None:
    """Report the seconds of one way, and what the cascade did."""
    name = f"{question}_{way}"
    kept = "tenant" if way == "kept" else "off"
    session.execute(f"SET tierkv.answer_cache = {kept}")
    if way == "kept":
        began_s = time.perf_counter()
        session.execute(f"SELECT count(len(ai_embed(review))) FROM {name}")
        report.add(f"{question}_embedding_s", time.perf_counter() - began_s)
    session.execute(f"SET tierkv.cascade = {0 if way == 'model' else ASKED}")
    began_s = time.perf_counter()
    told = _explained(
        session,
        f"CREATE TABLE {name}_answers AS SELECT id, {QUESTIONS[question]} AS answer FROM {name}",
    )
    report.add(f"{question}_{way}_s", time.perf_counter() - began_s)
    session.execute("SET tierkv.cascade = off")
    session.execute("SET tierkv.answer_cache = off")
    if way != "model":
        _report_cascade(report, session, name, question, told["Calls"][0]["Cascade"])


def _explained(session: Session, statement: str) -> dict[str, Any]:
    row = session.execute(f"EXPLAIN (ANALYZE, FORMAT JSON) {statement}").fetchone()
    assert row is not None
    document = row[0] if not isinstance(row[0], str) else json.loads(row[0])
    plan: dict[str, Any] = document["AI Plan"]
    return plan


def _report_cascade(
    report: Report, session: Session, name: str, question: str, told: dict[str, Any]
) -> None:
    """Report rows by each, and the agreement over all rows."""
    rows = told["Model Rows"] + told["Classifier Rows"]
    if not told["Used"]:
        report.note(f"{name}: not used: {told['Not Used']}")
    report.add(f"{name}_calls_saved_share", told["Classifier Rows"] / rows)
    report.add(f"{name}_bound", told["Agreement at Least"])
    row = session.execute(
        f"SELECT count(*) FILTER (WHERE answer <> {QUESTIONS[question]}) FROM {name}"
        f" JOIN {name}_answers USING (id)"
    ).fetchone()
    assert row is not None
    report.add(f"{name}_agreement_all_rows", 1 - row[0] / rows)
    if told["Used"]:
        # The model's own rows agree.
        true = 1 - row[0] / max(told["Classifier Rows"], 1)
        report.add(f"{name}_agreement_of_classifier", true)
        if true < told["Agreement at Least"] - _SLACK:
            raise RuntimeError(f"{name}: agreement {true:.3f} is below its bound")


def _compare(report: Report, question: str) -> None:
    found = report.metrics
    for way in ("cascade", "kept"):
        ratio = found[f"{question}_model_s"] / found[f"{question}_{way}_s"]
        report.add(f"{question}_model_to_{way}_ratio", ratio)


if __name__ == "__main__":
    main()
