"""Blending by default against exact reuse, in a statement's batch and call by call.

Run ``python -m bench.blend_batch``. Each question covers a few of sixteen notes in a new order, so
exact reuse finds little after the instruction. Two embedded databases with the shipped model answer
the same questions in turn; only the setting ``tierkv.blend`` differs. The cells vary the notes per
question, and whether a statement asks all questions at once or a single question. A third database
equals the exact one and shows the noise of the machine.

Printed are the seconds of a round with blending as a multiple of exact reuse, apart for the first
round of new databases and for later rounds, and the share of right answers of each.
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
WAYS: Final = {"exact": "off", "again": "off", "blended": "on"}
OPTIONS: Final = '{"max_tokens": 6}'
TABLE: Final = "CREATE OR REPLACE TABLE asked (id INTEGER, q VARCHAR, d VARCHAR[])"
ASK: Final = f"SELECT id, ai_generate(q, documents => d, options => '{OPTIONS}') FROM asked"


@dataclass(frozen=True, slots=True)
class Question:
    """A question, its notes, and the word that answers the question."""

    text: str
    notes: list[str]
    answer: str


@dataclass(frozen=True, slots=True)
class Asked:
    """What a round took, and how many answers are right."""

    seconds: float
    right: int


Round = dict[str, Asked]
"""A round of questions by way of answering."""


@dataclass(frozen=True, slots=True)
class Cell:
    """Notes per question, questions per round, and whether one statement asks them all."""

    notes: int
    at_once: bool
    questions: int

    @property
    def name(self) -> str:
        """Prefix of the cell's metrics."""
        return f"{self.notes}_notes_{'at_once' if self.at_once else 'one_by_one'}"


class Asker:
    """A way of answering: an embedded database with its own node."""

    def __init__(self, blend: str) -> None:
        self._database = tierkv.connect(**{"namespace.blend": "true"})
        self._cursor = self._database.cursor()
        self._cursor.execute(f"SET tierkv.blend = {blend}")
        self._cursor.execute("SELECT ai_generate('Who is it?')")  # Starts the node.
        self._cursor.fetchall()

    def ask(self, questions: Sequence[Question], *, at_once: bool) -> Asked:
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
        return Asked(seconds, right)

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
        cell = Cell(notes, at_once, questions=10 if quick else 40 if at_once else 20)
        worst = max(worst, _measure(report, cell, quick=quick, rng=random.Random(arguments.seed)))
    report.add("worst_blended_of_exact", worst)
    finish(report, arguments.format)


def _measure(report: Report, cell: Cell, *, quick: bool, rng: random.Random) -> float:
    first: list[Round] = []
    later: list[Round] = []
    for _ in range(1 if quick else 4):
        rounds = _rounds(cell, 3 if quick else 4, rng)
        first += rounds[:1]  # The first round meets all notes for the first time.
        later += rounds[1:]
    for name, some in (("first_", first), ("", later)):
        for way in ("blended", "again"):
            report.add(f"{cell.name}_{name}{way}_of_exact", _ratio(some, way))
    for way in WAYS:
        right = sum(took[way].right for took in (*first, *later))
        report.add(f"{cell.name}_{way}_s", statistics.median(took[way].seconds for took in later))
        report.add(f"{cell.name}_{way}_right", right / (len(first + later) * cell.questions))
    return _ratio(later, "blended")


def _ratio(rounds: Sequence[Round], way: str) -> float:
    return statistics.median(took[way].seconds / took["exact"].seconds for took in rounds)


def _rounds(cell: Cell, count: int, rng: random.Random) -> list[Round]:
    """Ask some rounds of new databases, the databases in random order."""
    rounds: list[Round] = []
    with ExitStack() as stack:
        askers = {way: Asker(blend) for way, blend in WAYS.items()}
        for asker in askers.values():
            stack.callback(asker.close)
        for _ in range(count):
            asked = _questions(cell.questions, cell.notes, rng)
            order = sorted(askers.items(), key=lambda _: rng.random())
            rounds.append({way: one.ask(asked, at_once=cell.at_once) for way, one in order})
    return rounds


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
