"""Sharing by order of context fields, and the cost of finding an order: no model, no cluster.

Run ``python -m bench.field_order``. Three synthetic tables are written as contexts of prompts in
each order of fields. The hit share is the common prefix of sorted neighbouring texts, an upper
bound for any cache.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from os.path import commonprefix

from bench.report import Report, finish, parse_arguments
from tierkv.dbfront.calls.field_order import order_fields, render_context
from tierkv.sql.settings import FieldReorder

ROWS = 30_000
QUICK_ROWS = 2_000
BLOCK_CHARACTERS = 256
"""About 64 tokens; only whole blocks are reused."""

Row = dict[str, str]
WORDS = (
    "river", "stone", "lamp", "paper", "winter", "table", "green", "corner", "market", "window",
    "garden", "silver", "road", "late", "broken", "again", "thanks", "colour", "box", "small",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Shared:
    """Common prefixes of texts, as shares of all characters.

    Attributes:
        previous: shared with the previous text, in the order of the rows.
        any_text: shared with any text.
        blocks: shared with any text, in whole blocks.
    """

    previous: float
    any_text: float
    blocks: float


@dataclass(frozen=True, slots=True)
class Measured:
    """One way to order a table's fields."""

    shared: Shared
    planning_cpu_s: float


def main(argv: Sequence[str] | None = None) -> None:
    """Run and print."""
    arguments = parse_arguments(__doc__ or "", argv)
    count = QUICK_ROWS if arguments.quick else ROWS
    report = Report("field order")
    for name, make in TABLES.items():
        rows = make(random.Random(arguments.seed), count)
        report.note(f"{name}: {len(rows)} rows, {len(rows[0])} fields")
        for method, measured in compare(rows).items():
            report.add(f"{name}_{method}_previous_row_hit_share", measured.shared.previous)
            report.add(f"{name}_{method}_hit_share", measured.shared.any_text)
            report.add(f"{name}_{method}_block_hit_share", measured.shared.blocks)
            report.add(f"{name}_{method}_planning_cpu_s", measured.planning_cpu_s)
    finish(report, arguments.format)


def compare(rows: Sequence[Row]) -> dict[FieldReorder, Measured]:
    """Order a table's fields in every way and measure the sharing of the texts."""
    found: dict[FieldReorder, Measured] = {}
    for method in FieldReorder:
        started = time.process_time()
        orders = order_fields(rows, method=method)
        planning_cpu_s = time.process_time() - started
        found[method] = Measured(shared(list(map(render_context, rows, orders))), planning_cpu_s)
    return found


def shared(texts: Sequence[str]) -> Shared:
    """Count the common prefixes of the texts."""
    whole = sum(map(len, texts))
    ordered = sorted(texts)
    common = [_common(left, right) for left, right in pairwise(ordered)]
    previous = sum(_common(left, right) for left, right in pairwise(texts))
    blocks = sum(length // BLOCK_CHARACTERS * BLOCK_CHARACTERS for length in common)
    return Shared(previous / whole, sum(common) / whole, blocks / whole)


def _common(left: str, right: str) -> int:
    return len(commonprefix((left, right)))  # noqa: RUF071 - characters are what is wanted


def _text(rng: random.Random, words: int) -> str:
    return " ".join(rng.choices(WORDS, k=words))


def reviews(rng: random.Random, count: int) -> list[Row]:
    """Make reviews joined with products: long texts repeated in many rows, and clean keys."""
    products = [
        {
            "product": f"{_text(rng, 3)} {number}",
            "description": _text(rng, 90),
            "category": f"{rng.choice(WORDS)} goods",
            "brand": f"{rng.choice(WORDS)} & sons",
        }
        for number in range(count // 50)
    ]
    return [
        {"review": _text(rng, 45), "stars": str(rng.randint(1, 5)), **rng.choice(products)}
        for _ in range(count)
    ]


def tickets(rng: random.Random, count: int) -> list[Row]:
    """Make support tickets joined with customers; a few customers have most tickets."""
    plans = {name: _text(rng, 40) for name in ("free", "team", "enterprise")}
    customers = [
        {
            "company": f"{_text(rng, 2)} {number}",
            "region": rng.choice(("emea", "apac", "amer")),
            "plan": (plan := rng.choice(tuple(plans))),
            "contract": plans[plan],
            "history": _text(rng, 60),
        }
        for number in range(count // 10)
    ]
    weights = [1 / (rank + 1) for rank in range(len(customers))]
    return [
        {
            "subject": _text(rng, 6),
            "body": _text(rng, 60),
            "channel": rng.choice(("mail", "chat", "phone")),
            "priority": rng.choice(("low", "normal", "high")),
            "opened": f"2026-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}",
            **customer,
        }
        for customer in rng.choices(customers, weights, k=count)
    ]


def wide(rng: random.Random, count: int) -> list[Row]:
    """Make a table of 24 independent columns, with few to many distinct values.

    In a third of the rows each of the last eight columns has a fixed value.
    """
    columns = list(range(24))
    rng.shuffle(columns)
    values = [
        [f"{_text(rng, 1 + column % 8)} {number}" for number in range(2 + column**2)]
        for column in columns
    ]
    rows = [
        {f"column {place}": rng.choice(of) for place, of in enumerate(values)} for _ in range(count)
    ]
    not_asked = {f"column {place}": f"not asked, see form {place}" for place in range(16, 24)}
    for row in rng.sample(rows, count // 3):
        row.update(not_asked)
    return rows


TABLES: dict[str, Callable[[random.Random, int], list[Row]]] = {
    "reviews": reviews,
    "tickets": tickets,
    "wide": wide,
}


if __name__ == "__main__":
    main()
