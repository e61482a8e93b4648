"""Statements of odd shapes: every door answers what plain functions behind the same door do."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.differential.compare import Difference, Pair, Tally, play
from tests.differential.grammar import Dialect, Step
from tests.differential.run import Doors, all_doors
from tests.differential.shapes import AUDIT, TABLES, queries, writes

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def doors() -> Iterator[list[Doors]]:
    with all_doors() as opened:
        yield opened


def of(doors: list[Doors], dialect: Dialect) -> Doors:
    """The doors that speak a dialect."""
    (found,) = (some for some in doors if some.dialect == dialect)
    return found


def fill(pair: Pair, dialect: Dialect) -> None:
    for side in (pair.oracle, pair.door):
        for sql in (*TABLES, *(AUDIT if dialect is Dialect.POSTGRES else ())):
            outcome = side.run(sql)
            assert not outcome.sqlstate, (sql, outcome)


def differences(
    pair: Pair, scripts: list[list[Step]], tally: Tally, tables: tuple[str, ...] = ()
) -> list[Difference]:
    played = (play(pair, (), script, tally, tables) for script in scripts)
    return [difference for difference in played if difference is not None]


@pytest.mark.parametrize("dialect", [Dialect.DUCKDB, Dialect.POSTGRES])
def test_queries(doors: list[Doors], dialect: Dialect) -> None:
    spoken, tally = of(doors, dialect), Tally()
    scripts = [[step] for step in queries(dialect)]
    found: list[Difference] = []
    for pair in (*spoken.any_script, *spoken.single_statements[-1:]):
        fill(pair, dialect)
        found += differences(pair, scripts, tally)
    assert not found, "\n\n".join(map(str, found))
    assert all(name.endswith(" compared") for name in tally.counts), tally.counts


@pytest.mark.parametrize("block", ["", "COMMIT", "ROLLBACK"])
@pytest.mark.parametrize("dialect", [Dialect.DUCKDB, Dialect.POSTGRES])
def test_writes(doors: list[Doors], dialect: Dialect, block: str) -> None:
    """Each alone, and behind a change and a savepoint in a transaction."""
    before = (Step("BEGIN"), Step("INSERT INTO u VALUES (11, 'mine')"), Step("SAVEPOINT a"))
    audit = ("(SELECT what FROM audit) a",) if dialect is Dialect.POSTGRES else ()
    found: list[Difference] = []
    tally = Tally()
    for pair in of(doors, dialect).any_script:
        for step in writes(dialect):
            fill(pair, dialect)
            script = [*before, step, Step(block)] if block else [step]
            found += differences(pair, [script], tally, ("w", "u", *audit))
    assert not found, "\n\n".join(map(str, found))
    assert not any(name.endswith(" refused") for name in tally.counts), tally.counts
