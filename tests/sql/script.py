"""SQL scripts in sqllogictest's style: their records, and how a door is held to them.

A record is a few lines up to an empty one; ``tests/sql/README.md`` describes the kinds. The player
runs a script through one door (``tests/differential/doors.py``) and stops at the first record the
door does not fulfil, named by file and line. Values are compared as PostgreSQL writes them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb

from tests.differential.doors import Door, Outcome, WireDoor
from tests.fix_sql import InstantGenerator, system_prompt, user_prompt
from tierkv.dbfront.contracts import PreparedCall, TextEvent
from tierkv.kvcore.errors import RowLevelError

EMBEDDED = ("dbapi", "simple", "extended", "rest")
RELAY = ("relay_simple", "relay_extended")
DOORS = (*EMBEDDED, *RELAY)
GROUPS = {
    "embedded": EMBEDDED,
    "relay": RELAY,
    "wire": ("simple", "extended", *RELAY),
    "sessions": ("dbapi", "simple", "extended", *RELAY),
}
"""Names for several doors; ``sessions`` are those whose sessions last."""

_DUCKDB = int(duckdb.__version__.split(".")[0])
_BEGINS = re.compile(r"^(BEGIN|START TRANSACTION)\b", re.MULTILINE)

MARK = "▸"
"""Stands in the SQL of an error where the error is."""


class EchoGenerator(InstantGenerator):
    """A model whose answers can be read off the prompt: the prompt itself in angle brackets.

    Of labels, the first that the text before the question contains is certain, or the last one; of
    yes and no, yes where that text contains the question.
    """

    def _read_out(self, prepared: PreparedCall) -> TextEvent:
        call, prompt = prepared.call, user_prompt(prepared.call)
        if call.labels:
            return TextEvent(label_probabilities=_odds(prompt, call.labels))
        if call.embed or call.json_schema:
            return super()._read_out(prepared)
        model = "" if prepared.model.name == "tiny" else prepared.model.name
        return TextEvent(f"<{': '.join(filter(None, (model, system_prompt(call), prompt)))}>")


def _odds(prompt: str, labels: Sequence[str]) -> tuple[float, ...]:
    text, _, question = prompt.partition("\nQuestion: ")
    if "yes" in labels:
        asked = question.partition("\n")[0]
        assert labels == ("yes", "Yes", "no", "No")
        chosen = "yes" if asked and asked in text else "no"
    else:
        chosen = next((label for label in labels if label in text), labels[-1])
    return tuple(float(label == chosen) for label in labels)


@dataclass(frozen=True, slots=True)
class Record:
    """One record of a script.

    Attributes:
        where: file and line, for people.
        words: of the record's first line.
        body: its other lines up to ``----``.
        expected: the lines behind ``----``.
        doors: the doors that play it.
        connection: the name of the connection it runs on.
    """

    where: str
    words: tuple[str, ...]
    body: tuple[str, ...]
    expected: tuple[str, ...]
    doors: frozenset[str]
    connection: str

    @property
    def text(self) -> str:
        """The body as one text."""
        return "\n".join(self.body)


@dataclass(frozen=True, slots=True)
class Script:
    """The records of a file.

    Attributes:
        records: in order.
        modes: of its players.
    """

    records: tuple[Record, ...]
    modes: tuple[str, ...] = ("",)

    @property
    def begins(self) -> bool:
        """True when a statement of the script begins a transaction."""
        return any(_BEGINS.search(record.text) for record in self.records)

    @property
    def cases(self) -> list[tuple[str, str]]:
        """Door and mode of each play."""
        used = frozenset().union(*(record.doors for record in self.records))
        return [
            (door, mode)
            for door in DOORS
            for mode in self.modes
            if door in used and (not mode or door in GROUPS["sessions"])
        ]


def read_script(path: Path) -> Script:
    """Read a file; ``doors`` and ``modes`` at its head hold for all records."""
    records = tuple(_records(path))
    modes: tuple[str, ...] = ("",)
    while records[0].words[0] in ("doors", "modes"):
        word, *names = records[0].words
        records = records[1:]
        if word == "modes":
            modes = ("", *names)
        else:
            allowed = frozenset(_doors(names))
            records = tuple(replace(record, doors=record.doors & allowed) for record in records)
    return Script(records, modes)


def _records(path: Path) -> Iterator[Record]:
    lines = [*path.read_text().splitlines(), ""]
    block: list[str] = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            block.append(line)
            continue
        kept = [line for line in block if not line.startswith("#")]
        if kept:
            yield _record(f"{path.name}:{number - len(block)}", kept)
        block = []


def _record(where: str, lines: list[str]) -> Record:
    doors, connection = frozenset(DOORS), ""
    while (words := lines[0].split())[0] in ("onlyif", "skipif", "connection", "duckdb"):
        if words[0] == "connection":
            connection = words[1]
        elif words[0] == "duckdb":
            doors -= frozenset(EMBEDDED if int(words[1]) > _DUCKDB else ())
        else:
            named = frozenset(_doors(words[1:]))
            doors = doors & named if words[0] == "onlyif" else doors - named
        lines = lines[1:]
    body, expected = lines[1:], []
    if "----" in body:
        at = body.index("----")
        body, expected = body[:at], body[at + 1 :]
    return Record(where, tuple(words), tuple(body), tuple(expected), doors, connection)


def _doors(names: Sequence[str]) -> Iterator[str]:
    for name in names:
        found = GROUPS.get(name, (name,))
        assert set(found) <= set(DOORS), f"no door is called {name}"
        yield from found


@dataclass(slots=True)
class Player:
    """Plays records through one door.

    Attributes:
        name: of the door.
        opens: opens another connection through the door.
        generator: the model behind the door.
        mode: empty, or how each statement stands in a transaction of its own: alone in it
            (``transaction``) or behind a change (``changed``).
        last: what the last statement answered.
        begins: the script has transactions of its own.
    """

    name: str
    opens: Callable[[], Door]
    generator: EchoGenerator
    mode: str = ""
    last: Outcome = field(default_factory=Outcome)
    begins: bool = False
    _changes: int = 0
    _connections: dict[str, Door] = field(default_factory=dict)

    def play(self, script: Script) -> None:
        """Play a whole script; the record that fails is named."""
        self.generator.failing, self.generator.texts = {}, {}
        self.begins = script.begins
        try:
            for record in script.records:
                if self.name in record.doors:
                    with _named(f"{record.where} through {self.name}"):
                        getattr(self, f"_{record.words[0]}")(record)
            if self.mode == "changed":
                [(count,)] = self._door("").run("SELECT count(*) FROM changes").rows
                assert int(count) == self._changes > 0, "a change of a transaction was lost"
        finally:
            for door in self._connections.values():
                door.close()

    def _door(self, connection: str) -> Door:
        if connection not in self._connections:
            self._connections[connection] = self.opens()
        return self._connections[connection]

    def _run(self, record: Record, sql: str) -> Outcome:
        """Run one statement, in a transaction of its own where the mode says so."""
        door = self._door(record.connection)
        if self.mode:
            assert door.run("BEGIN").tag == "BEGIN"
            if self.mode == "changed":
                self._change(door)
        self.generator.prompts.clear()
        self.generator.calls.clear()
        self.last = door.run(sql)
        asked = [(user_prompt(call), call.model, call.labels) for call in self.generator.calls]
        assert len(asked) == len(set(asked)), f"asked twice: {sorted(asked)}"
        if self.mode:
            ends = "ROLLBACK" if self.last.sqlstate else "COMMIT"
            assert self.last.status in ("E" if self.last.sqlstate else "T", ""), self.last
            assert door.run(ends).tag == ends
            self._changes += self.mode == "changed" and ends == "COMMIT"
        elif not self.begins:
            assert self.last.status in ("I", ""), self.last
        return self.last

    def _change(self, door: Door) -> None:
        if not self._changes:
            assert not door.run("CREATE TABLE IF NOT EXISTS changes (n INTEGER)").sqlstate
        assert door.run("INSERT INTO changes VALUES (1)").tag == "INSERT 0 1"

    def _statement(self, record: Record) -> None:
        if record.words[1] == "error":
            self._check_error(record, record.text, record.words[2], record.expected)
            return
        for sql in re.split(r";\n", record.text):
            outcome = self._run(record, sql)
            assert not outcome.sqlstate, (sql, outcome)
        if len(record.words) > 2:
            assert outcome.tag == " ".join(record.words[2:]), outcome

    def _copy(self, record: Record) -> None:
        door = self._door(record.connection)
        assert isinstance(door, WireDoor), "only the wire copies in"
        self.last = door.copy_in(record.text, "".join(f"{line}\n" for line in record.expected))
        assert self.last.tag == f"COPY {len(record.expected)}", self.last

    def _refused(self, record: Record) -> None:
        self._errors(record, free=True)

    def _errors(self, record: Record, *, free: bool = False) -> None:
        wrong: list[str] = []
        for line in record.body:
            state, _, rest = line.partition(" ")
            sql, _, words = rest.partition(" --> ")
            try:
                self._check_error(record, sql.strip(), state, (words,) if words else ())
                assert not (free and self.generator.prompts), self.generator.prompts
            except AssertionError as error:
                wrong.append(f"{line}\n  {error}")
        assert not wrong, "\n".join(wrong)

    def _tags(self, record: Record) -> None:
        for line in record.body:
            sql, _, tag = line.partition(" --> ")
            assert self._run(record, sql.strip()).tag == tag, (sql, self.last)

    def _check_error(self, record: Record, sql: str, state: str, words: Sequence[str]) -> None:
        outcome = self._run(record, sql.replace(MARK, ""))
        assert outcome.sqlstate == state, (sql, outcome)
        assert "exception_type" not in outcome.message, "the engine's own JSON is no message"
        for word in words:
            assert word in f"{outcome.message}\n{outcome.hint}", (sql, outcome)
        if MARK in sql and outcome.position >= 0:
            assert outcome.position == sql.index(MARK) + 1, (sql, outcome)

    def _query(self, record: Record) -> None:
        outcome = self._run(record, record.text)
        assert not outcome.sqlstate, (record.text, outcome)
        types = record.words[1]
        rows = [
            "\t".join(spelled(kind, value) for kind, value in zip(types, row, strict=True))
            for row in outcome.rows
        ]
        wanted = list(record.expected)
        if "rowsort" in record.words:
            rows, wanted = sorted(rows), sorted(wanted)
        assert rows == wanted, f"{record.text}\nwanted: {wanted}\ngot: {rows}"

    def _columns(self, record: Record) -> None:
        assert [name for name, _ in self.last.columns] == record.text.split()

    def _prompts(self, record: Record) -> None:
        asked = sorted(prompt.replace("\n", "\\n") for prompt in self.generator.prompts)
        if len(record.words) > 1:
            assert len(asked) == int(record.words[1]), asked
        else:
            assert asked == sorted(record.body), asked

    def _notices(self, record: Record) -> None:
        assert len(self.last.notices) == len(record.body), self.last.notices
        for notice, words in zip(self.last.notices, record.body, strict=True):
            assert words in notice, self.last.notices

    def _answer(self, record: Record) -> None:
        for line in record.body:
            prompt, _, answer = line.replace("\\n", "\n").partition(" --> ")
            self.generator.texts[prompt] = answer

    def _fail(self, record: Record) -> None:
        if not record.body:
            self.generator.failing = {}
        for line in record.body:
            words, _, message = line.partition(" --> ")
            self.generator.failing[words] = RowLevelError(message)


class _named:
    """Adds where a record stands to the assertion that it fails."""

    def __init__(self, where: str) -> None:
        self._where = where

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, AssertionError):
            error.add_note(self._where)


def spelled(kind: str, value: Any) -> str:
    """Spell a value of a column: T text, I integer, R real, B boolean, J JSON."""
    if value is None:
        return "NULL"
    text = value.decode() if isinstance(value, bytes) else _text(value)
    if kind == "R":
        return f"{float(text):.5g}"
    if kind == "J":
        value = json.loads(text) if isinstance(value, bytes | str) else value
        return json.dumps(value, ensure_ascii=False, sort_keys=True)
    return text.replace("\\", "\\\\").replace("\n", "\\n") or "(empty)"


def _text(value: Any) -> str:
    """Write a Python or JSON value as PostgreSQL does."""
    if isinstance(value, bool):
        return "t" if value else "f"
    if isinstance(value, list | tuple):
        return "{" + ",".join(_element(item) for item in value) + "}"
    if isinstance(value, Decimal):
        return f"{value:f}"
    return str(value)


def _element(value: Any) -> str:
    if value is None:
        return "NULL"
    text = _text(value)
    if re.fullmatch(r'[^{}",\\\s]+', text) and text.upper() != "NULL":
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
