"""Blending by default against exact reuse, in a statement's batch and call by call.

Run ``python -m bench.blend_batch``. Each question covers a few of sixteen notes in a new order, so
exact reuse finds little after the instruction. Two embedded databases with the shipped model answer
the same questions in turn; only the setting ``tierkv.blend`` differs. The cells vary the notes per
question, and whether a statement asks all questions at once or a single question.

Printed are the seconds of a round with blending as a multiple of exact reuse, round by round, and
the share of right answers of each.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final

import tierkv
from bench.report import Report, finish, make_parser
from tierkv.compute.demo_model.data import make_records

NOTES: Final = 16
WAYS: Final = {"exact": "off", "blended": "on"}
OPTIONS: Final = '{"max_tokens": 6}'
TABLE: Final = "CREATE OR REPLACE TABLE asked (id INTEGER, q VARCHAR, d VARCHAR[])"
ASK: Final = f"SELECT id, ai_generate(q, documents => d, options => '{OPTIONS}') FROM asked"


@dataclass(frozen=True, slots=True)
class Question:
    """A question, its notes, and the word that answers the question."""

    text: str
    notes: list[str]
    answer: str


class Asker:
    """A way of answering: an embedded database with its own node."""

    def __init__(self, blend: str) -> None:
        self._database = tierkv.connect(**{"namespace.blend": "true"})
        self._cursor = self._database.cursor()
        self._cursor.execute(f"SET tierkv.blend = {blend}")
        self._cursor.execute("SELECT ai_generate('Who is it?')")  # Starts the node.
        self._cursor.fetchall()

    def ask(self, questions: Sequence[Question], *, at_once: bool) -> tuple[float, int]:
        """Ask; return the seconds and the number of right answers."""
        seconds, right = 0.0, 0
        size = len(questions) if at_once else 1
        for first in range(0, len(questions), size):
            some = questions[first : first + size]
            self._cursor.execute(
                "CREATE OR REPLACE TABLE asked (id INTEGER, q VARCHAR, d VARCHAR[])"
            )
            rows = [(number, one.text, one.notes) for number, one in enumerate(some)]
            self._cursor.executemany("INSERT INTO asked VALUES (?, ?, ?)", rows)
            began_s = time.perf_counter()
            self._cursor.execute(ASK)
            answers: dict[int, Any] = dict(self._cursor.fetchall())
            seconds += time.perf_counter() - began_s
            right += sum(
                str(answers[number]).strip().startswith(one.answer)
                for number, one in enumerate(some)
            )
        return seconds, right

    def close(self) -> None:
        """Stop the node."""
        self._database.close()


def main(argv: Sequence[str] | None = None) -> None:
    """Run and print."""
    arguments = make_parser(__doc__ or "").parse_args(argv)
    quick = arguments.quick
    report = Report("blend_batch")
    worst = 0.0
    for notes, at_once in itertools.product((4,) if quick else (2, 4, 8), (True, False)):
        worst = max(
            worst,
            _measure(
                report,
                notes=notes,
                at_once=at_once,
                questions=10 if quick else 40 if at_once else 20,
                rounds=3 if quick else 6,
                rng=random.Random(arguments.seed),
            ),
        )
    report.add("worst_blended_of_exact", worst)
    finish(report, arguments.format)


def _measure(
    report: Report, *, notes: int, at_once: bool, questions: int, rounds: int, rng: random.Random
) -> float:
    name = f"{notes}_notes_{'at_once' if at_once else 'one_by_one'}"
    seconds: list[dict[str, float]] = []
    right = dict.fromkeys(WAYS, 0)
    with ExitStack() as stack:
        askers = {way: Asker(blend) for way, blend in WAYS.items()}
        for asker in askers.values():
            stack.callback(asker.close)
        for _ in range(rounds):
            asked = _questions(questions, notes, rng)
            took = {}
            for way, asker in sorted(askers.items(), key=lambda _: rng.random()):
                took[way], correct = asker.ask(asked, at_once=at_once)
                right[way] += correct
            seconds.append(took)
    later = seconds[1:]  # The first round computes the notes for all later rounds.
    ratio = statistics.median(took["blended"] / took["exact"] for took in later)
    report.add(f"{name}_first_blended_of_exact", seconds[0]["blended"] / seconds[0]["exact"])
    report.add(f"{name}_blended_of_exact", ratio)
    for way in WAYS:
        report.add(f"{name}_{way}_s", statistics.median(took[way] for took in later))
        report.add(f"{name}_{way}_right", right[way] / (rounds * questions))
    return ratio


def _questions(count: int, notes: int, rng: random.Random) -> list[Question]:
    records = make_records(NOTES, 5)
    found = []
    for _ in range(count):
        some = rng.sample(records, notes)
        who = rng.choice(some)
        text = f"Question: Where does {who.name} live?"
        found.append(Question(text, [one.text for one in some], who.city))
    return found


if __name__ == "__main__":
    main()
