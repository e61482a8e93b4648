"""Three workloads of SQL with AI calls: a selective filter, a join, and several questions.

Used by bench.sql. Each workload has tables, a statement, and the naive plan: the same statement
over plain functions that an engine calls row by row. The calls of the naive plan are counted, not
answered.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import duckdb

WORDS = (
    "river", "stone", "lamp", "paper", "winter", "table", "green", "corner", "market", "window",
    "garden", "silver", "road", "letter", "summer", "engine", "bottle", "mirror",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Workload:
    """One workload.

    Attributes:
        name: name in metrics.
        tables: SQL that creates and fills the tables.
        statement: the statement with AI calls.
        naive: the same over ``naive_filter(text)`` and ``naive_generate(text)``.
    """

    name: str
    tables: tuple[str, ...]
    statement: str
    naive: str


def workloads(rng: random.Random, rows: int) -> tuple[Workload, ...]:
    """Make the three workloads, with about ``rows`` rows each."""
    return (_filter(rng, rows), _join(rng, rows), _questions(rng, rows))


def naive_calls(workload: Workload, positive: frozenset[str]) -> int:
    """Count the calls an engine makes when AI functions are plain volatile functions.

    Args:
        workload: the workload to run.
        positive: texts for which the filter is true.
    """
    calls = 0

    def generate(text: str) -> str:
        nonlocal calls
        calls += 1
        return "answer"

    def check(text: str) -> bool:
        nonlocal calls
        calls += 1
        return text in positive

    with duckdb.connect() as engine:
        engine.create_function(
            "naive_generate", generate, ["VARCHAR"], "VARCHAR", side_effects=True
        )
        engine.create_function("naive_filter", check, ["VARCHAR"], "BOOLEAN", side_effects=True)
        for statement in workload.tables:
            engine.execute(statement)
        engine.execute(workload.naive).fetchall()
    return calls


def _text(rng: random.Random, words: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(words))


def _values(rows: list[tuple[int | str, ...]]) -> str:
    return ", ".join(f"({', '.join(map(_literal, row))})" for row in rows)


def _literal(item: int | str) -> str:
    return str(item) if isinstance(item, int) else f"'{item}'"


def _filter(rng: random.Random, rows: int) -> Workload:
    """Reviews in four languages, with several duplicates; the statement asks about one language."""
    texts = [_text(rng, 60) for _ in range(max(1, rows * 3 // 4))]
    reviews: list[tuple[int | str, ...]] = [
        (number, number % 4, rng.choice(texts)) for number in range(rows)
    ]
    return Workload(
        "filter",
        (
            "CREATE TABLE reviews (id INTEGER, language INTEGER, body VARCHAR)",
            f"INSERT INTO reviews VALUES {_values(reviews)}",
        ),
        "SELECT id, ai_generate(body || ' What was bought?') AS product FROM reviews "
        "WHERE ai_filter('Is the review positive?', body) AND language = 1 ORDER BY id",
        "SELECT id, naive_generate(body || ' What was bought?') AS product FROM reviews "
        "WHERE naive_filter(body) AND language = 1 ORDER BY id",
    )


def _join(rng: random.Random, rows: int) -> Workload:
    """Reviews of a few products; many reviews share a product's long text."""
    products: list[tuple[int | str, ...]] = [
        (number, _text(rng, 90)) for number in range(max(1, rows // 12))
    ]
    reviews: list[tuple[int | str, ...]] = [
        (number, rng.randrange(len(products)), _text(rng, 12)) for number in range(rows)
    ]
    source = "FROM reviews r JOIN products p ON r.product = p.id"
    return Workload(
        "join",
        (
            "CREATE TABLE products (id INTEGER, description VARCHAR)",
            f"INSERT INTO products VALUES {_values(products)}",
            "CREATE TABLE reviews (id INTEGER, product INTEGER, body VARCHAR)",
            f"INSERT INTO reviews VALUES {_values(reviews)}",
        ),
        "SELECT r.id, ai_generate('Does the review fit the product?', "
        "context => {'review': r.body, 'product': p.description}) AS fits "
        f"{source} ORDER BY r.id",
        f"SELECT r.id, naive_generate(r.body || p.description) AS fits {source} ORDER BY r.id",
    )


def _questions(rng: random.Random, rows: int) -> Workload:
    """Three questions about every document, in one statement."""
    documents: list[tuple[int | str, ...]] = [
        (number, _text(rng, 100)) for number in range(max(1, rows // 3))
    ]
    asked = ("Who is it about?", "Where was it?", "What was bought?")
    return Workload(
        "questions",
        (
            "CREATE TABLE documents (id INTEGER, body VARCHAR)",
            f"INSERT INTO documents VALUES {_values(documents)}",
        ),
        f"SELECT id, {_each('ai_generate', asked)} FROM documents ORDER BY id",
        f"SELECT id, {_each('naive_generate', asked)} FROM documents ORDER BY id",
    )


def _each(function: str, questions: tuple[str, ...]) -> str:
    return ", ".join(f"{function}(body || ' {question}')" for question in questions)
