"""Random scripts for the differential tests: a grammar over three small tables.

A script is a list of steps that run one after the other in a fresh session. Every ordered query
has a total order, no expression can fail on any row, and only columns of integers, texts and
booleans appear; so two correct systems must agree on every step. ``Dialect.BOTH`` writes what
DuckDB and PostgreSQL understand alike.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import Enum


class Dialect(Enum):
    """Which database must understand a script."""

    DUCKDB = "duckdb"
    POSTGRES = "postgres"
    BOTH = "both"


@dataclass(frozen=True, slots=True)
class Step:
    """One statement.

    Attributes:
        sql: the text, with AI calls.
        ordered: the order of its rows is defined.
        estimates: an EXPLAIN (AI_ESTIMATE): only what it leaves behind is compared.
        frugal: the model is asked only what plain functions are called with.
    """

    sql: str
    ordered: bool = False
    estimates: bool = False
    frugal: bool = False


RESET = (
    "DROP TABLE IF EXISTS t",
    "DROP TABLE IF EXISTS u",
    "DROP TABLE IF EXISTS w",
    "DROP TABLE IF EXISTS keyed",
    "DROP TABLE IF EXISTS made",
    "CREATE TABLE t (i int, g int, p text, s text)",
    "CREATE TABLE u (k int, name text, note text)",
    "CREATE TABLE w (id int, v text, n int)",
    "CREATE TABLE keyed (id int PRIMARY KEY, v text)",
)
"""Makes the tables anew; ``rows`` fills them."""

KEPT_TABLES = ("t", "u", "w", "keyed", "made")


def rows(rng: random.Random) -> list[str]:
    """Return statements that fill the tables."""
    texts = ["NULL", "''", "'yes'", "'b''b'", "'é'", "'p 1'", "'p 2'", "'p 3'", "'7'"]

    def insert(table: str, lines: list[str]) -> str:
        return f"INSERT INTO {table} VALUES {', '.join(lines)}"

    def text() -> str:
        return rng.choice(texts)

    count = rng.choice((1, 5, 12, 30))
    return [
        insert("t", [f"({i}, {rng.randint(0, 3)}, {text()}, {text()})" for i in range(count)]),
        insert("u", [f"({rng.randint(0, 4)}, {text()}, 'n {k}')" for k in range(6)]),
        insert("w", [f"({k}, {text()}, {rng.randint(0, 3)})" for k in range(rng.choice((3, 20)))]),
        insert("keyed", [f"({k}, {text()})" for k in range(4)]),
    ]


class Grammar:
    """Draws scripts from a seeded source of chance."""

    def __init__(self, rng: random.Random, dialect: Dialect) -> None:
        self._rng = rng
        self._dialect = dialect

    def script(self) -> list[Step]:
        """Draw a script of one statement, or of a transaction with or without savepoints."""
        if self._chance(0.6):
            return [self.statement()]
        steps = [Step("BEGIN")]
        savepoints = self._chance(0.5)
        for _ in range(self._rng.randint(2, 4)):
            steps.append(self._transaction_step(savepoints=savepoints))
        if savepoints:
            at = self._rng.randint(1, len(steps) - 1)
            steps.insert(at, Step("SAVEPOINT a"))
            steps.append(Step("ROLLBACK TO a"))
            if self._chance(0.5):
                steps.append(self._transaction_step(savepoints=True))
        steps.append(Step(self._one("COMMIT", "COMMIT", "COMMIT", "ROLLBACK")))
        return steps

    def statement(self) -> Step:
        """Draw a single statement."""
        kinds = [
            self._query,
            self._query,
            self._subquery,
            self._join,
            self._grouped,
            self._nested,
            self._write,
            self._write,
            self._writing_with,
            self._writing_with,
            self._estimate,
        ]
        if self._dialect is Dialect.DUCKDB:
            kinds += [self._columns_star, self._positions]
        return self._rng.choice(kinds)()

    def _transaction_step(self, *, savepoints: bool) -> Step:
        if self._chance(0.35):
            return Step(f"WITH x AS ({self._change()}) SELECT count(*) AS c FROM x", ordered=True)
        if savepoints or self._chance(0.3):
            return Step(self._change(ai=self._chance(0.4), returning=False))
        return self._rng.choice((self._write, self._query, self._writing_with))()

    # Queries.

    def _query(self) -> Step:
        items = [self._item(number) for number in range(self._rng.randint(1, 3))]
        text = f"SELECT i, {', '.join(items)} FROM t{self._where()}"
        if self._chance(0.2):
            return Step(text)
        keys = [self._one("g DESC", "a DESC NULLS LAST", "a NULLS FIRST", "2 NULLS FIRST", "i")]
        if "a " in keys[0] or keys[0] == "a":
            text = text.replace("SELECT i,", f"SELECT i, {self._text(ai=True)} AS a,")
        text += f" ORDER BY {', '.join([*keys, 'i'])}"
        return Step(text + self._limit(), ordered=True)

    def _subquery(self) -> Step:
        test = f" AND {self._passes('note')}" if self._chance(0.6) else ""
        inner = f"FROM u WHERE u.k = t.g{test}"
        outer = self._one("s", "p", self._text(ai=True))
        wanted = self._one("name", "name", "note", "ai_generate(name)")
        where = self._one(
            f"{outer} NOT IN (SELECT {wanted} {inner})",
            f"{outer} IN (SELECT {wanted} {inner})",
            f"{outer} <> ALL (SELECT {wanted} {inner})",
            f"{outer} = ANY (SELECT {wanted} {inner})",
            f"NOT EXISTS (SELECT 1 {inner})",
            f"EXISTS (SELECT 1 {inner})",
            f"(SELECT count(*) {inner}) > 0",
            f"(SELECT max(ai_generate(note)) {inner}) > 'a5'",
        )
        if self._chance(0.25):
            where = f"NOT ({where})"
        if self._chance(0.2):
            where += f" AND {self._condition()}"
        if self._chance(0.2):
            return Step(f"DELETE FROM t WHERE {where}")
        return Step(f"SELECT i FROM t WHERE {where} ORDER BY i{self._limit()}", ordered=True)

    def _join(self) -> Step:
        kind = self._one("JOIN", "LEFT JOIN", "JOIN", "FULL JOIN")
        on = "t.g = u.k" + (f" AND {self._passes('note')}" if self._chance(0.5) else "")
        if kind == "FULL JOIN":
            on = "t.g = u.k"
        where = f" WHERE {self._passes('t.p')}" if self._chance(0.6) else ""
        item = self._one("u.name", "ai_generate(t.p || u.name)", "ai_generate(note) AS a")
        text = f"SELECT t.i, note, {item} FROM t {kind} u ON {on}{where}"
        keys = "t.i NULLS LAST, note NULLS LAST"
        return Step(f"{text} ORDER BY {keys}{self._limit()}", ordered=True)

    def _grouped(self) -> Step:
        value = self._text(ai=True)
        having = self._one("", " HAVING count(*) > 1", f" HAVING max({value}) > {self._answer()}")
        return self._rng.choice(
            (
                Step(f"SELECT {value}, count(*) AS c FROM t{self._where()} GROUP BY {value}"),
                Step(
                    f"SELECT g, count(*) AS c, max({value}) AS m, ai_generate(min(s)) AS x FROM t"
                    f"{self._where()} GROUP BY g{having} ORDER BY g",
                    ordered=True,
                ),
                Step(f"SELECT DISTINCT {value} AS a FROM t{self._where()}"),
                Step(f"SELECT count(*) FILTER (WHERE {self._passes('p')}) AS c FROM t"),
                Step(f"SELECT count(DISTINCT {value}) AS c FROM t{self._where()}", ordered=True),
            )
        )

    def _nested(self) -> Step:
        value = self._text(ai=True)
        window = f"row_number() OVER (PARTITION BY {value} ORDER BY i)"
        inside = f"SELECT i, g, {value} AS a FROM t{self._where()} ORDER BY i{self._limit()}"
        return self._rng.choice(
            (
                Step(f"WITH c AS ({inside}) SELECT i, a FROM c ORDER BY a NULLS LAST, i", True),
                Step(f"SELECT x.i, y.i AS j FROM ({inside}) x JOIN ({inside}) y ON x.a = y.a"),
                Step(f"SELECT i, {window} AS r FROM t ORDER BY i{self._limit()}", ordered=True),
                Step(f"SELECT i, {value} AS a FROM t UNION SELECT k, name FROM u"),
                Step(f"SELECT {value} AS a FROM t EXCEPT SELECT ai_generate(note) FROM u"),
                Step(f"SELECT count(*) AS c FROM ({inside}) x WHERE {self._passes('a')}"),
            )
        )

    def _columns_star(self) -> Step:
        if self._chance(0.5):
            return Step("SELECT i, ai_generate(COLUMNS('p|s')) FROM t ORDER BY i", ordered=True)
        return Step("SELECT i FROM t WHERE ai_filter('q', COLUMNS('p|s')) ORDER BY i", ordered=True)

    def _positions(self) -> Step:
        first = self._one("#1", "(1)", "1", "#1 DESC")
        limit = self._limit()
        text = f"SELECT {self._text(ai=True)} AS a, i FROM t{self._where()} ORDER BY {first}"
        return Step(f"{text} NULLS LAST, #2{limit}", ordered=True)

    # Writes.

    def _write(self) -> Step:
        if self._chance(0.2):
            return Step(f"CREATE TABLE made AS SELECT i, {self._text(ai=True)} AS a FROM t")
        returning = self._chance(0.3)
        return Step(self._change(ai=True, returning=returning))

    def _change(self, *, ai: bool = False, returning: bool = True) -> str:
        value = self._text(ai=True) if ai else self._text()
        tail = " RETURNING *" if returning else ""
        where = f" WHERE {self._of_w(ai=ai)}" if self._chance(0.7) else ""
        new = (
            f"ai_generate({self._one('v', chr(39) + 'x' + chr(39) + ' || id')})"
            if ai
            else "v || '!'"
        )
        return self._one(
            f"INSERT INTO w SELECT i + 100, {value}, g FROM t{tail}",
            f"INSERT INTO w VALUES (90, {self._constant(ai=ai)}, 1), (91, 'z', 2){tail}",
            f"UPDATE w SET v = {new}, n = n + 1{where}{tail}",
            f"DELETE FROM w{where}{tail}",
            f"INSERT INTO keyed VALUES (2, {self._constant(ai=ai)}), (77, 'q') "
            f"ON CONFLICT (id) DO UPDATE SET v = excluded.v{tail}",
        )

    def _writing_with(self) -> Step:
        """A WITH that writes, around AI calls over the rows it returns."""
        source = self._one("v", "v", "'b' || v")
        where = self._one("", f" WHERE {self._passes('v')}")
        if self._chance(0.3):
            where = " WHERE ai_filter('q', v) AND ai_filter('r', v)"
        head = f"WITH x AS ({self._change()})"
        asked = f"SELECT id, ai_generate({source}) AS a FROM x{where}"
        ending = self._limit()
        made = "CREATE TABLE made AS "
        return self._rng.choice(
            (
                Step(f"{head} INSERT INTO w SELECT id + 500, ai_generate({source}), 9 FROM x"),
                Step(f"{head} {asked} ORDER BY a NULLS LAST, id, x.v{ending}", ordered=True),
                Step(f"{head} {asked} ORDER BY id, a NULLS LAST", ordered=True),
                Step(f"{head} SELECT count(*) AS c FROM x{where}", ordered=True),
                Step(f"{head} DELETE FROM t WHERE p IN (SELECT ai_generate({source}) FROM x)"),
                Step(f"{made if self._dialect is Dialect.DUCKDB else ''}{head} {asked}"),
            )
        )

    def _estimate(self) -> Step:
        step = self._rng.choice((self._write, self._writing_with, self._query))()
        while "ai_" not in step.sql:
            step = self._writing_with()
        return Step(f"EXPLAIN (AI_ESTIMATE) {step.sql}", estimates=True)

    # Expressions.

    def _item(self, number: int) -> str:
        value, other = self._text(ai=True), self._text()
        if self._chance(0.2):
            return value
        item = self._one(
            value,
            f"upper({value})",
            f"coalesce({value}, {other})",
            f"CASE WHEN g > 1 THEN {value} ELSE {other} END",
            f"CASE WHEN {value} = {self._answer()} THEN {other} ELSE {self._text(ai=True)} END",
            f"({value} IS NULL OR {value} < {self._answer()})",
            f"length({value}) + g",
            self._passes("p"),
            other,
        )
        return f"{item} AS x{number}"

    def _text(self, *, ai: bool = False) -> str:
        source = self._one("p", "s", "t.p", "p || 'x'", "'c' || i", "coalesce(s, 'n')", "upper(p)")
        if not ai:
            return source
        return self._one(
            f"ai_generate({source})",
            f"ai_generate({source})",
            f"ai_classify({source}, ARRAY['red', 'blue', 'green'])",
            f"ai_generate(ai_generate({source}))",
        )

    def _constant(self, *, ai: bool) -> str:
        return f"ai_generate('q{self._rng.randint(0, 3)}')" if ai else "'const'"

    def _passes(self, column: str) -> str:
        return f"ai_filter('{self._one('q', 'r', 'is it?')}', {column})"

    def _answer(self) -> str:
        return f"'a{self._rng.choice('0123456789abcdef')}'"

    def _condition(self) -> str:
        value = self._text(ai=True)
        return self._one(
            self._passes("p"),
            self._passes("s"),
            f"NOT {self._passes('p')}",
            f"{value} > {self._answer()}",
            f"{value} IN ('red', {self._answer()}, 'a7')",
            f"({self._passes('p')} OR {value} < {self._answer()})",
            f"(g > 2 OR {self._passes('s')})",
            f"CASE WHEN g = 0 THEN {self._passes('p')} ELSE g < 3 END",
            "g > 0",
            "p IS NOT NULL",
            "i IN (SELECT max(i) FROM t)",
        )

    def _of_w(self, *, ai: bool) -> str:
        if ai and self._chance(0.7):
            return self._one(self._passes("v"), f"ai_generate(v) > {self._answer()}")
        return self._one("id < 5", "n > 1", "v IS NOT NULL", "id IN (SELECT k FROM u)")

    def _where(self) -> str:
        count = self._rng.choice((0, 1, 1, 2, 3))
        return f" WHERE {' AND '.join(self._condition() for _ in range(count))}" if count else ""

    def _limit(self) -> str:
        if self._chance(0.6):
            return ""
        offset = self._one("", "", f" OFFSET {self._rng.randint(1, 4)}")
        return f" LIMIT {self._rng.choice((0, 1, 3, 8, 60))}{offset}"

    def _chance(self, share: float) -> bool:
        return self._rng.random() < share

    def _one(self, *options: str) -> str:
        return self._rng.choice(options)
