"""The statement of a job, cut into batches: each batch has the rows of a range of keys.

Theory of operation. A job's statement is ``INSERT INTO t SELECT items FROM source WHERE condition``
or ``CREATE TABLE t AS`` of such a SELECT. Each row of the source has a different key. A batch is
the same statement with another condition, ``low < key AND key <= high``; the batches of a job cut
the keys into ranges without gaps, hence all batches together write the rows of the
statement. The rows of the SELECT must be independent: DISTINCT, GROUP BY, aggregates,
window functions, ORDER BY, LIMIT and set operations are refused. Keys are listed with the
conditions without AI calls: finding the next batch costs no AI call.

Pure: works on the text and its tokens; dbfront/jobs/ runs what comes out.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import sqlglot
from sqlglot import exp
from sqlglot.errors import SqlglotError

from tierkv.kvcore.errors import FeatureNotSupportedError, SqlError, SqlSyntaxError
from tierkv.sql.calls.calls import find_calls
from tierkv.sql.plan.collect import find_word
from tierkv.sql.text.clauses import Range, begins_clause, select_clauses
from tierkv.sql.text.lexer import TokenKind, depth_change, tokenize
from tierkv.sql.text.statement import main_verb

KEY: Final = "tierkv_key"
"""Name of the key's column in ``JobStatement.keys``."""

_REFUSED: Final = {
    "DISTINCT": "DISTINCT", "GROUP": "GROUP BY", "HAVING": "HAVING", "WINDOW": "WINDOW",
    "QUALIFY": "QUALIFY", "ORDER": "ORDER BY", "LIMIT": "LIMIT", "OFFSET": "OFFSET",
    "FETCH": "FETCH FIRST", "UNION": "UNION", "INTERSECT": "INTERSECT", "EXCEPT": "EXCEPT",
    "RETURNING": "RETURNING", "OVER": "a window function", "TABLESAMPLE": "TABLESAMPLE",
}  # fmt: skip
_NAMES: Final = (TokenKind.WORD, TokenKind.QUOTED)


@dataclass(frozen=True, slots=True)
class KeyRange:
    """Keys above ``low`` up to ``high``, as text; None: no bound on this side."""

    low: str | None
    high: str | None

    def condition(self, key: str, key_type: str) -> str:
        """Return the SQL condition for the keys of the range.

        Args:
            key: SQL of the key.
            key_type: SQL type of the key, in which the bounds are compared.
        """
        parts = [
            f"({key}) {sign} CAST({literal(bound)} AS {key_type})"
            for sign, bound in ((">", self.low), ("<=", self.high))
            if bound is not None
        ]
        return " AND ".join(parts) or "TRUE"


@dataclass(frozen=True, slots=True)
class JobStatement:
    """The pieces of a job's statement, as SQL texts.

    Attributes:
        target: the table that gets the rows.
        creates: the CREATE TABLE ... AS in front of the query; empty for INSERT.
        insert: the INSERT in front of the query.
        with_clause: the common table expressions of the query; may be empty.
        items: the select list.
        source: FROM and its tables.
        conditions: conjuncts of WHERE.
        plain_conditions: the conjuncts without AI calls.
        tail: ON CONFLICT and what belongs to it; may be empty.
        inputs: a select list of all that the rows depend on, without AI calls; empty if unknown.
    """

    target: str
    creates: str
    insert: str
    with_clause: str
    items: str
    source: str
    conditions: tuple[str, ...]
    plain_conditions: tuple[str, ...]
    tail: str
    inputs: str

    def keys(self, key: str) -> str:
        """Return a query of the keys, in a column ``KEY``, of all rows of the source."""
        where = _where(self.plain_conditions)
        return f"{self.with_clause}SELECT ({key}) AS {KEY} {self.source}{where}"

    def fingerprints(self, key: str) -> str:
        """Return a query of key and fingerprint of each row; equal fingerprints, equal inputs."""
        where = _where(self.plain_conditions)
        rows = f"{self.with_clause}SELECT ({key}) AS {KEY}, {self.inputs} {self.source}{where}"
        return f"SELECT {KEY}, md5(CAST(tierkv_row AS text)) AS print FROM ({rows}) AS tierkv_row"

    def probe(self, key: str) -> str:
        """Return a query without rows; aggregates in the select list make the query fail."""
        where = _where((*self.plain_conditions, "FALSE"))
        return f"{self.with_clause}SELECT ({key}) AS {KEY}, {self.items} {self.source}{where}"

    def batch(self, condition: str) -> str:
        """Return the INSERT of the rows for which a condition on the key holds."""
        where = _where((*self.conditions, condition))
        query = f"{self.with_clause}SELECT {self.items} {self.source}{where}"
        return f"{self.insert} {query} {self.tail}".rstrip()

    def table(self) -> str:
        """Return the CREATE TABLE of the target without rows; empty if the target exists."""
        if not self.creates:
            return ""
        where = _where((*self.conditions, "FALSE"))
        return f"{self.creates} {self.with_clause}SELECT {self.items} {self.source}{where}"


def literal(text: str) -> str:
    """Return a string literal that PostgreSQL and DuckDB read alike, whatever their settings."""
    doubled = text.replace("'", "''")
    if "\\" not in doubled:
        return f"'{doubled}'"
    return "E'" + doubled.replace("\\", "\\\\") + "'"


def read_job_statement(text: str) -> JobStatement:
    """Read the statement of a job.

    Raises:
        SqlSyntaxError: no INSERT INTO ... SELECT and no CREATE TABLE ... AS SELECT.
        FeatureNotSupportedError: the rows of the SELECT are not independent, or an AI call is not
            in the select list or WHERE.
    """
    return _StatementReader(text).read()


class _StatementReader:
    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = tokenize(text)

    def read(self) -> JobStatement:
        tokens = self._tokens
        self._refuse_parameters()
        verb = main_verb(tokens)
        head = tokens[verb].upper if verb < len(tokens) else ""
        if head == "INSERT":
            query = self._query_of_insert(verb)
            target, creates = self._target(verb), ""
            insert = self._cut((verb, query))
        elif head == "CREATE" and verb == 0:
            query = self._query_of_create()
            target, creates = self._target(verb), self._cut((0, query))
            insert = f"INSERT INTO {target}"
        else:
            raise self._wrong(verb)
        with_before = self._cut((0, verb)) if verb else ""
        select = query + main_verb(tokens[query:])
        with_inside = self._cut((query, select)) if select > query else ""
        if with_before and with_inside:
            raise self._refused(query, "a job's statement can have one WITH clause only")
        last = self._conflict(select)
        clauses = select_clauses(tokens[:last], select)
        if clauses is None:
            raise self._wrong(select)
        source = self._source(select, last)
        items = (select + 1, source[0])
        asking = [each for each in clauses.conjuncts if self._asks(each)]
        self._refuse_dependent(select, source, last)
        with_clause = with_before or with_inside
        self._refuse_calls((0, verb), (query, select), source, (last, len(tokens)))
        return JobStatement(
            target=target,
            creates=creates,
            insert=insert,
            with_clause=f"{with_clause} " if with_clause else "",
            items=self._cut(items),
            source=self._cut(source),
            conditions=tuple(self._cut(each) for each in clauses.conjuncts),
            plain_conditions=tuple(
                self._cut(each) for each in clauses.conjuncts if each not in asking
            ),
            tail=self._cut((last, len(tokens))) if last < len(tokens) else "",
            inputs=self._inputs(clauses.items, asking),
        )

    def _cut(self, part: Range) -> str:
        first, last = part
        return self._text[self._tokens[first].start : self._tokens[last - 1].end]

    def _inputs(self, items: Iterable[Range], asking: Iterable[Range]) -> str:
        """Return a select list of all that the items and conditions depend on.

        An item without AI calls stands for itself. Of an item or a condition with AI calls, the
        columns are listed: a model sees nothing else of a row.
        """
        found: dict[str, None] = {}
        for part in (*items, *asking):
            columns = self._columns(part) if self._asks(part) else [self._cut(part)]
            if columns is None:
                return ""
            found.update(dict.fromkeys(columns))
        return ", ".join(found) or "1"

    def _columns(self, part: Range) -> list[str] | None:
        """Return the columns in an expression, outside subqueries; None if not understood."""
        tokens = self._tokens[part[0] : part[1]]
        text, at = "", tokens[0].start
        for token in tokens:  # sqlglot has functions of its own by some of the names.
            is_ours = token.kind is TokenKind.WORD and token.text[:3].lower() == "ai_"
            text += self._text[at : token.start] + ("tierkv_" if is_ours else "") + token.text
            at = token.end
        for dialect in ("duckdb", "postgres"):
            try:
                tree = sqlglot.parse_one(f"SELECT {text}", dialect=dialect)
            except SqlglotError:
                continue
            return [
                column.sql(dialect=dialect)
                for column in tree.find_all(exp.Column)
                if column.find_ancestor(exp.Select) is tree
            ]
        return None

    def _words(self, first: int, last: int) -> Iterable[tuple[int, str]]:
        """Yield the words outside brackets, in upper case."""
        depth = 0
        for index in range(first, last):
            depth += depth_change(self._tokens[index])
            if depth == 0 and self._tokens[index].kind is TokenKind.WORD:
                yield index, self._tokens[index].upper

    def _query_of_insert(self, verb: int) -> int:
        words = {"SELECT", "WITH", "VALUES", "DEFAULT", "TABLE", "FROM"}
        query = find_word(self._tokens, verb + 1, words)
        if query >= len(self._tokens) or self._tokens[query].upper not in ("SELECT", "WITH"):
            raise self._wrong(verb)
        return query

    def _query_of_create(self) -> int:
        words = dict(reversed([(w, i) for i, w in self._words(0, len(self._tokens))]))
        start = words.get("AS")
        if start is None or "TABLE" not in words or start + 1 >= len(self._tokens):
            raise self._wrong(0)
        for word, shown in (
            ("TEMP", "a temporary table"), ("TEMPORARY", "a temporary table"),
            ("REPLACE", "OR REPLACE"), ("EXISTS", "IF NOT EXISTS"),
        ):  # fmt: skip
            if words.get(word, start) < start:
                raise self._refused(words[word], f"a job can't create its table with {shown}")
        if self._tokens[-1].upper == "DATA" and self._tokens[-2].upper in ("NO", "WITH"):
            raise self._refused(len(self._tokens) - 1, "a job can't have WITH [NO] DATA")
        return start + 1

    def _target(self, verb: int) -> str:
        opener = "INTO" if self._tokens[verb].upper == "INSERT" else "TABLE"
        first = find_word(self._tokens, verb, {opener}) + 1
        last = first
        while last < len(self._tokens) and self._tokens[last].kind in _NAMES:
            last += 1
            if last >= len(self._tokens) or self._tokens[last].text != ".":
                break
            last += 1
        if last == first:
            raise self._wrong(verb)
        return self._cut((first, last))

    def _conflict(self, select: int) -> int:
        """Return the place of ON CONFLICT; the end of the statement without one."""
        place, end = select, len(self._tokens)
        while (place := find_word(self._tokens, place + 1, {"ON"})) < end - 1:
            if self._tokens[place + 1].upper == "CONFLICT":
                return place
        return end

    def _source(self, select: int, last: int) -> Range:
        words = [
            (index, word)
            for index, word in self._words(select + 1, last)
            if word in ("FROM", "WHERE") and begins_clause(self._tokens, index)
        ]
        if not words or words[0][1] != "FROM":
            raise self._refused(select, "a job needs a SELECT with a FROM, whose rows it cuts")
        end = next((index for index, word in words if word == "WHERE"), last)
        return words[0][0], end

    def _refuse_parameters(self) -> None:
        for token in self._tokens:
            if token.kind is TokenKind.PARAMETER:
                raise SqlError(
                    "a job's statement can't have parameters",
                    sqlstate="0A000",
                    position=token.start + 1,
                    hint="The job runs again later, without them: write the values.",
                )

    def _refuse_dependent(self, select: int, source: Range, last: int) -> None:
        """Refuse a SELECT without independent rows."""
        if self._tokens[select + 1].upper == "DISTINCT":
            raise self._dependent(select + 1)
        for index in range(select + 1, last):
            if self._tokens[index].upper == "OVER" and self._tokens[index - 1].text == ")":
                raise self._dependent(index)
        for index, word in self._words(source[0] + 1, last):
            if word in _REFUSED and word != "DISTINCT" and begins_clause(self._tokens, index):
                raise self._dependent(index)

    def _dependent(self, index: int) -> FeatureNotSupportedError:
        return FeatureNotSupportedError(
            f"a job can't have {_REFUSED[self._tokens[index].upper]}: each batch sees its own rows "
            "only",
            position=self._tokens[index].start + 1,
            hint="Put it into a table or a view first, and let the job read that.",
        )

    def _asks(self, part: Range) -> bool:
        first, last = part
        return bool(find_calls(self._tokens[first:last]))

    def _refuse_calls(self, *parts: Range) -> None:
        for first, last in parts:
            if first < last and self._asks((first, last)):
                raise self._refused(
                    first, "a job can have AI calls in its select list and in WHERE only"
                )

    def _refused(self, index: int, message: str) -> FeatureNotSupportedError:
        return FeatureNotSupportedError(message, position=self._tokens[index].start + 1)

    def _wrong(self, index: int) -> SqlSyntaxError:
        position = self._tokens[index].start + 1 if index < len(self._tokens) else 1
        return SqlSyntaxError(
            "a job runs INSERT INTO ... SELECT ... FROM, or CREATE TABLE ... AS SELECT ... FROM",
            position=position,
        )


def _where(conditions: tuple[str, ...]) -> str:
    if not conditions:
        return ""
    # The line break ends a comment behind a condition.
    return " WHERE " + "\nAND ".join(f"({each}\n)" for each in conditions)
