"""Plays a script through a door and its oracle, step by step, and says where they part.

The oracle is the same kind of session over plain functions (or PostgreSQL itself). Compared are
rows, their order where it is defined, names and types of columns, command tags, errors, the state
of the transaction, what is left in the tables, and what the model was asked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.differential.doors import Door, Outcome
from tests.differential.grammar import KEPT_TABLES, Step

REFUSED = "0A000"
"""A refusal with a clear error is no wrong answer; refusals are counted and told."""

_ASKS_OTHERWISE = ("WHERE", "LIMIT", "CASE", "FILTER", "ON ", "ROLLBACK")
"""Words of statements that may evaluate plain functions of other rows than a model is asked about;
going back to a savepoint evaluates them again, and asks nothing."""


@dataclass(slots=True)
class Asked:
    """What a model was asked during one step, and what plain functions were called with.

    Attributes:
        prompts: of the model's calls, in order.
        reference: distinct prompts of the plain functions; None where those are not seen.
    """

    prompts: list[str] = field(default_factory=list)
    reference: set[str] | None = None


@dataclass(frozen=True, slots=True)
class Pair:
    """A door and its oracle.

    Attributes:
        name: of the door.
        door: answers with a model.
        oracle: answers with plain functions.
        clear_asked: forgets what was asked.
        asked: tells what was asked since.
        typed: both sides are of one kind, so names and types of columns must agree.
    """

    name: str
    door: Door
    oracle: Door
    clear_asked: Callable[[], None]
    asked: Callable[[], Asked]
    typed: bool = True


@dataclass(frozen=True, slots=True)
class Difference:
    """Where a door and its oracle part."""

    where: str
    script: tuple[str, ...]
    step: str
    what: str
    wanted: object
    got: object

    def __str__(self) -> str:
        script = "\n  ".join(self.script)
        return (
            f"{self.where}: {self.what}\n  {script}\nat: {self.step}\n"
            f"wanted: {self.wanted}\n   got: {self.got}"
        )


@dataclass(slots=True)
class Tally:
    """How many steps were compared, failed alike, or were refused, by door."""

    counts: Counter[str] = field(default_factory=Counter)

    def add(self, pair: Pair, what: str) -> None:
        """Count one step."""
        self.counts[f"{pair.name} {what}"] += 1


def play(
    pair: Pair,
    fill: Sequence[str],
    script: Sequence[Step],
    tally: Tally,
    tables: Sequence[str] = KEPT_TABLES,
) -> Difference | None:
    """Play a script on both sides; None when nothing differs, in what was said or in the tables."""
    for sql in fill:
        for side in (pair.oracle, pair.door):
            outcome = side.run(sql)
            assert not outcome.sqlstate, (pair.name, sql, outcome.message)
    before = _tables(pair.door, tables)
    for step in script:
        difference, refused = _play_step(pair, script, step, tally)
        if difference is not None:
            _leave(pair)
            return difference
        if refused:
            if script[0].sql != "BEGIN" and _tables(pair.door, tables) != before:
                left = _tables(pair.door, tables)
                return _told(pair, script, step, "a refused statement left traces", before, left)
            break
    _leave(pair)
    wanted, got = _tables(pair.oracle, tables), _tables(pair.door, tables)
    parted = [table for table in tables if wanted[table] != got[table]]
    if parted and not refused:
        table = parted[0]
        return _told(pair, script, script[-1], f"table {table}", wanted[table], got[table])
    return None


def _play_step(
    pair: Pair, script: Sequence[Step], step: Step, tally: Tally
) -> tuple[Difference | None, bool]:
    pair.clear_asked()
    got = pair.door.run(step.sql)
    if step.estimates:
        tally.add(pair, "estimated")
        prompts = pair.asked().prompts
        if prompts:
            return _told(pair, script, step, "an estimate asked", [], prompts), False
        if got.sqlstate not in ("", REFUSED):
            return _told(pair, script, step, "an estimate failed", "", got.message), False
        return None, bool(got.sqlstate)
    wanted = pair.oracle.run(step.sql)
    if got.sqlstate == REFUSED != wanted.sqlstate:
        tally.add(pair, "refused")
        return None, True
    tally.add(pair, "failed alike" if wanted.sqlstate else "compared")
    for what, one, other in _parts(pair, step, wanted, got):
        if one != other:
            return _told(pair, script, step, what, one, (other, got.message)), False
    return _check_asked(pair, script, step), False


def _parts(
    pair: Pair, step: Step, wanted: Outcome, got: Outcome
) -> list[tuple[str, object, object]]:
    parts: list[tuple[str, object, object]] = [
        ("error", _error(pair, wanted), _error(pair, got)),
        ("transaction", wanted.status, got.status),
        ("tag", wanted.tag, got.tag),
        ("rows", _rows(wanted, step), _rows(got, step)),
    ]
    if pair.typed:
        parts.append(("columns", _columns(wanted), _columns(got)))
    return parts


def _error(pair: Pair, outcome: Outcome) -> object:
    """Two databases fail alike with SQLSTATEs of their own."""
    return outcome.sqlstate if pair.typed else bool(outcome.sqlstate)


def _rows(outcome: Outcome, step: Step) -> Sequence[Any]:
    return outcome.rows if step.ordered else sorted(outcome.rows, key=repr)


def _columns(outcome: Outcome) -> tuple[tuple[str, str], ...]:
    """Return names and types; a call without an alias is called by its function on one side."""
    return tuple(
        (name.replace("plain_", "ai_").partition("(")[0], type_name)
        for name, type_name in outcome.columns
    )


def _check_asked(pair: Pair, script: Sequence[Step], step: Step) -> Difference | None:
    asked = pair.asked()
    twice = [prompt for prompt, count in Counter(asked.prompts).items() if count > 1]
    if twice:
        return _told(pair, script, step, "asked twice", [], twice)
    exact = not any(word in step.sql for word in _ASKS_OTHERWISE)
    if asked.reference is not None and exact and set(asked.prompts) != asked.reference:
        return _told(pair, script, step, "asked", asked.reference, set(asked.prompts))
    if asked.reference is not None and step.frugal and set(asked.prompts) - asked.reference:
        needless = set(asked.prompts) - asked.reference
        return _told(pair, script, step, "asked without need", set(), needless)
    return None


def _tables(door: Door, tables: Sequence[str]) -> dict[str, list[Any]]:
    """Read what is in the tables, in any order; a table that is not there is None."""
    left = {}
    for table in tables:
        outcome = door.run(f"SELECT * FROM {table}")
        left[table] = [outcome.sqlstate] if outcome.sqlstate else sorted(outcome.rows, key=repr)
    return left


def _leave(pair: Pair) -> None:
    """End a transaction that is still open."""
    for side in (pair.oracle, pair.door):
        if side.run("SELECT 1").status in ("T", "E"):
            side.run("ROLLBACK")


def _told(
    pair: Pair, script: Sequence[Step], step: Step, what: str, wanted: object, got: object
) -> Difference:
    texts = tuple(one.sql for one in script)
    return Difference(pair.name, texts, step.sql, what, wanted, got)
