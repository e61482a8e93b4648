"""Compare random SQL for as long as wanted: ``make sql-fuzz MINUTES=60 SEED=1``.

    python -m tests.differential.run --seed 1 --minutes 60 [--keep-going]

Each seed is one script, played through every door. The first difference ends the run and is told
with its seed; ``--seed N --count 1`` plays it again.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from argparse import RawDescriptionHelpFormatter as _Raw
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from tests.differential.answers import DigestGenerator
from tests.differential.compare import Asked, Difference, Pair, Tally, play
from tests.differential.doors import (
    Door,
    DuckDbFront,
    WireDoor,
    running_fronts,
    running_postgres_pair,
)
from tests.differential.grammar import RESET, Dialect, Grammar, Step, rows


class Doors:
    """Some doors with their oracles; a seed's script goes through one of them."""

    dialect: Dialect

    def __init__(self) -> None:
        self.any_script: list[Pair] = []
        self.single_statements: list[Pair] = []

    def play(self, seed: int, tally: Tally) -> Difference | None:
        """Play one seed's script; None when nothing differs."""
        rng = random.Random(seed)
        fill = [*RESET, *rows(rng)]
        script = Grammar(rng, self.dialect).script()
        pairs = list(self.any_script)
        if len(script) == 1:
            pairs += self.single_statements
        return play(pairs[seed % len(pairs)], fill, _copied(rng, script), tally)

    def close(self) -> None:
        """Close all sessions."""
        for pair in (*self.any_script, *self.single_statements):
            pair.door.close()
            pair.oracle.close()


class DuckDbDoors(Doors):
    """The embedded door in all its forms, each compared with plain functions behind that form."""

    dialect = Dialect.DUCKDB

    def __init__(self, asked: DuckDbFront, plain: DuckDbFront) -> None:
        super().__init__()
        self._asked, self._plain = asked, plain
        self.any_script = [
            self._pair("simple", asked.wire(), plain.wire(plainly=True)),
            self._pair("extended", asked.wire(extended=True), plain.wire(plainly=True)),
        ]
        self.single_statements = [
            self._pair("rest", asked.rest(), plain.rest(plainly=True)),
            self._pair("rest lines", asked.rest(lines=True), plain.rest(plainly=True)),
            self._pair("db-api", asked.dbapi(), plain.dbapi(plainly=True)),
        ]

    def _pair(self, name: str, door: Door, oracle: Door) -> Pair:
        return Pair(name, door, oracle, self._clear, self._look)

    def _clear(self) -> None:
        self._asked.generator.prompts.clear()
        self._plain.functions.asked.clear()

    def _look(self) -> Asked:
        return Asked(list(self._asked.generator.prompts), set(self._plain.functions.asked))


class PostgresDoors(Doors):
    """The relay, compared with the PostgreSQL server behind it."""

    dialect = Dialect.POSTGRES

    def __init__(self, relay_dsn: str, oracle_dsn: str, generator: DigestGenerator) -> None:
        super().__init__()
        look = _looking(generator)
        for name, extended in (("relay", False), ("relay extended", True)):
            door = WireDoor(relay_dsn, extended=extended)
            oracle = WireDoor(oracle_dsn, extended=extended)
            self.any_script.append(Pair(name, door, oracle, generator.prompts.clear, look))


class CrossDoors(Doors):
    """The embedded door, compared with PostgreSQL in what both understand, savepoints above all."""

    dialect = Dialect.BOTH

    def __init__(self, asked: DuckDbFront, oracle_dsn: str) -> None:
        super().__init__()
        generator = asked.generator
        door, oracle = asked.wire(), WireDoor(oracle_dsn)
        clear, look = generator.prompts.clear, _looking(generator)
        self.any_script = [Pair("against postgres", door, oracle, clear, look, typed=False)]


def _looking(generator: DigestGenerator) -> Callable[[], Asked]:
    return lambda: Asked(list(generator.prompts))


def _copied(rng: random.Random, script: list[Step]) -> list[Step]:
    """Take some rows out by COPY."""
    return [
        Step(f"COPY ({step.sql}) TO STDOUT", ordered=True)
        if step.ordered and not step.estimates and rng.random() < 0.1
        else step
        for step in script
    ]


@contextmanager
def all_doors(*, duckdb: bool = True, postgres: bool = True) -> Iterator[list[Doors]]:
    """Open the doors, with servers of their own."""
    with ExitStack() as stack:
        doors: list[Doors] = []
        asked, plain = stack.enter_context(running_fronts())
        if duckdb:
            doors.append(DuckDbDoors(asked, plain))
        if postgres:
            oracle, relay, generator = stack.enter_context(running_postgres_pair())
            doors += [PostgresDoors(relay, oracle, generator), CrossDoors(asked, oracle)]
        for some in doors:
            stack.callback(some.close)
        yield doors


def main() -> int:
    """Play seeds until time is up, the count is reached, or something differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_Raw)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, default=0, help="how many seeds; 0: no limit")
    parser.add_argument("--minutes", type=float, default=10.0, help="how long at the most")
    parser.add_argument("--keep-going", action="store_true", help="tell all differences")
    parser.add_argument("--without", choices=("duckdb", "postgres"), help="leave doors out")
    given = parser.parse_args()
    ends = time.monotonic() + given.minutes * 60
    tally, found, seed = Tally(), 0, given.seed
    without = given.without
    with all_doors(duckdb=without != "duckdb", postgres=without != "postgres") as doors:
        while time.monotonic() < ends and not (given.count and seed >= given.seed + given.count):
            for some in doors:
                difference = some.play(seed, tally)
                if difference is not None:
                    found += 1
                    print(f"seed {seed}: {difference}\n", flush=True)
            if found and not given.keep_going:
                break
            seed += 1
    counts = ", ".join(f"{name} {count}" for name, count in sorted(tally.counts.items()))
    print(f"seeds {given.seed} to {seed}: {found} differences; steps: {counts}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
