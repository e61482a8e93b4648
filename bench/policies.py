"""Hit rates of each eviction policy on traces, and the value of each hint for the default policy.

``python -m bench.policies [--trace NAME=FILE ...] [--out FILE]``. Without a trace the script makes
a trace of several tenants. ``--out`` writes all tables into a Markdown file; docs/policies.md shows
a choice of the numbers.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.report import Report, finish, make_parser
from tierkv.kvcore.block import Expectation
from tierkv.simulator.cache_replay import NO_HINT, Hint, Hints, Order, TraceHints, replay
from tierkv.simulator.trace import Request, in_order, load_trace
from tierkv.simulator.yardsticks import BLOCK_POLICIES

CAPACITIES = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
QUICK_CAPACITIES = (0.02, 0.2)
ORDERS: dict[str, tuple[Order, ...]] = {
    "lru": ("head", "tail"),
    "lfu": ("head",),
    "arc": ("head", "tail"),
    "fifo": ("head",),
    "ttl": ("head",),
    "s3fifo": ("head", "tail"),
    "lhd": ("head", "leaves"),
}
"""Orders in which each reference policy is tried; the best order counts."""

HINTS: dict[str, TraceHints] = {
    "none": TraceHints(),
    "a tool call means another turn": TraceHints(turn=True),
    "the final answer is announced": TraceHints(final=True),
    "the time until the next turn is announced": TraceHints(think_time=True),
    "all three": TraceHints(turn=True, final=True, think_time=True),
}


@dataclass(frozen=True, slots=True)
class Rows:
    """A statement with several questions about each document, and the matching hint."""

    questions: int

    def of(self, requests: Sequence[Request]) -> Iterator[Hint]:
        """Yield for each request whether a further question about the document follows."""
        for request in requests:
            if request.session_id is None:
                yield NO_HINT
            elif request.turn < self.questions:
                yield Hint(Expectation.ROWS)
            else:
                yield Hint(Expectation.NONE)


def tenants(seed: int, requests: int) -> tuple[Request, ...]:
    """Make a trace: chats behind a system prompt, agents in quick steps, one-off documents."""
    chance = random.Random(seed)
    made: list[Request] = []
    ids = iter(range(1, 1 << 40))
    system = tuple(next(ids) for _ in range(4))
    start = 0.0
    while len(made) < requests:
        start += chance.expovariate(1 / 4.0)
        kind = chance.choices(("chat", "agent", "document"), (5, 1, 4))[0]
        turns = {"chat": 1 + int(chance.expovariate(0.5)), "agent": 20, "document": 1}[kind]
        pause_s = 120.0 if kind == "chat" else 8.0
        chain, now = system if kind == "chat" else (), start
        for _turn in range(turns):
            chain += tuple(next(ids) for _ in range(1 + int(chance.expovariate(1 / 8))))
            made.append(Request(now, 512 * len(chain), 200, chain))
            now += chance.lognormvariate(math.log(pause_s), 1.0)
    return in_order(made[:requests])


def statements(seed: int, count: int, *, documents: int, questions: int) -> tuple[Request, ...]:
    """Make a trace of statements: all documents with a question, then all with the next question.

    Between the rows, clients outside of the statement send prompts that are used once.
    """
    chance = random.Random(seed)
    made: list[Request] = []
    ids = iter(range(1, 1 << 40))
    now = 0.0
    for number in range(count):
        texts = [tuple(next(ids) for _ in range(16)) for _ in range(documents)]
        for turn in range(1, questions + 1):
            for text, body in enumerate(texts):
                now += 0.5
                chain = (*body, next(ids))
                made.append(Request(now, 512 * len(chain), 20, chain, f"{number}-{text}", turn))
                if chance.random() < 0.5:
                    once = tuple(next(ids) for _ in range(chance.randrange(8, 24)))
                    made.append(Request(now, 512 * len(once), 20, once))
    return tuple(made)


class Table:
    """Hits of all policies on one trace."""

    def __init__(self, name: str, requests: Sequence[Request], seed: int) -> None:
        self.name = name
        self.requests = requests
        self.seed = seed
        self.unique = len(set().union(*(request.block_ids for request in requests)))

    def hit(self, policy: str, share: float, order: Order = "head") -> tuple[float, float]:
        """Return block and token hit rate in per cent."""
        capacity = max(1, int(self.unique * share))
        done = replay(self.requests, policy, capacity, seed=self.seed, order=order)
        return 100 * done.block_hit_rate, 100 * done.token_hit_rate

    def row(self, share: float, report: Report) -> str:
        """Measure one capacity and return a table row."""
        found = {name: self.hit(name, share) for name in ("default", "leaf_lru", "belady")}
        for name in BLOCK_POLICIES:
            found[name] = max(self.hit(name, share, order) for order in ORDERS[name])
        ours, plain, best = (found[name][0] for name in ("default", "leaf_lru", "belady"))
        gap = f"{(ours - plain) / (best - plain):.0%}" if best - plain >= 0.5 else "–"
        key = f"{self.name}_{share * 100:g}pct"
        for name, (blocks, tokens) in found.items():
            report.add(f"{key}_{name}_block_hit_pct", blocks)
            report.metrics[f"{key}_{name}_token_hit_pct"] = tokens
        cells = [f"{found[name][0]:.2f}" for name in ("leaf_lru", *BLOCK_POLICIES, "belady")]
        both = f"**{ours:.2f}** / {found['default'][1]:.2f}"
        return f"| {share * 100:g} % | {both} | {' | '.join(cells)} | {gap} |"

    def lines(self, shares: Sequence[float], report: Report) -> list[str]:
        """Return the table as Markdown."""
        title = f"**{self.name}**: {len(self.requests):,} requests, {self.unique:,} unique blocks"
        names = ["default (blocks / tokens)", "leaf_lru", *BLOCK_POLICIES, "belady", "gap closed"]
        head = f"| capacity | {' | '.join(names)} |"
        return [
            title,
            "",
            head,
            "|---" * (len(names) + 1) + "|",
            *(self.row(share, report) for share in shares),
            "",
        ]


def hint_lines(
    title: str,
    table: Table,
    hints: dict[str, Hints],
    shares: Sequence[float],
    report: Report,
) -> list[str]:
    """Measure the default policy under each hint and return a table as Markdown."""
    lines = [title, "", f"| hint | {' | '.join(f'{100 * s:g} %' for s in shares)} |"]
    lines.append("|---" * (len(shares) + 1) + "|")
    for name, hint in hints.items():
        cells = []
        for share in shares:
            capacity = max(1, int(table.unique * share))
            done = replay(table.requests, "default", capacity, seed=table.seed, hints=hint)
            report.add(
                f"{table.name}_{share * 100:g}pct_hint_{name.replace(' ', '_')}_block_hit_pct",
                100 * done.block_hit_rate,
            )
            cells.append(f"{100 * done.block_hit_rate:.1f}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return [*lines, ""]


def main(argv: Sequence[str] | None = None) -> None:
    """Run."""
    parser = make_parser(__doc__ or "")
    parser.add_argument("--trace", action="append", default=[], help="NAME=FILE, may be repeated")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the tables there")
    options = parser.parse_args(argv)
    report, lines, hinted = Report("policies"), [], []
    shares = QUICK_CAPACITIES if options.quick else CAPACITIES
    traces: dict[str, tuple[Request, ...]] = {}
    for given in options.trace:
        name, _, path = given.partition("=")
        requests = load_trace(path).requests
        traces[name] = requests[: len(requests) // 10] if options.quick else requests
    if not traces:
        traces["tenants"] = tenants(options.seed, 1_000 if options.quick else 6_000)
    for name, requests in traces.items():
        table = Table(name, requests, options.seed)
        lines += table.lines(shares, report)
        if any(request.session_id is not None for request in requests):
            starved = shares[:4]
            title = f"**{name}**, block hits in per cent by capacity"
            hinted += hint_lines(title, table, dict(HINTS), starved, report)
    questions = 6
    asked = statements(options.seed, 1 if options.quick else 8, documents=60, questions=questions)
    table = Table("statements", asked, options.seed)
    title = (
        "**statements** (made up: 60 documents, 6 questions each, column by column, between others)"
    )
    rows: dict[str, Hints] = {"none": TraceHints(), "rows are pending": Rows(questions)}
    hinted += hint_lines(title, table, rows, shares[:4], report)
    if options.out is not None:
        options.out.write_text("\n".join([*lines, *hinted]))
    finish(report, options.format)


if __name__ == "__main__":
    main(sys.argv[1:])
