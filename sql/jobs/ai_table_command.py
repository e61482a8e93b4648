"""Statements about AI tables: tables of answers that ask again only about changed rows.

    CREATE AI TABLE [IF NOT EXISTS] name AS SELECT ... FROM ... WITH (key = column, ...)
    REFRESH AI TABLE name
    ALTER AI TABLE name {SUSPEND | RESUME | SET (refresh = ...)}
    DROP AI TABLE [IF EXISTS] name

Pure: dbfront/jobs/ai_tables.py carries these statements out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import sqlglot
from sqlglot import exp
from sqlglot.errors import SqlglotError

from tierkv.kvcore.errors import SqlError, SqlSyntaxError
from tierkv.sql.command_reader import CommandOption, CommandReader
from tierkv.sql.jobs.job_command import OPTION_KINDS, option_value, options_start
from tierkv.sql.text.durations import seconds_of
from tierkv.sql.text.lexer import Token
from tierkv.sql.text.suggest import did_you_mean

MANUAL: Final = 0.0
ON_CHANGE: Final = -1.0
"""Values of ``refresh_s``: by REFRESH only, or after each committed write to a source table."""

_VERBS: Final = ("CREATE", "REFRESH", "ALTER", "DROP")
_LEAST_PERIOD_S: Final = 1.0
_WORDS: Final = {"manual": MANUAL, "on change": ON_CHANGE}
_OUTSIDE: Final = (exp.ReadCSV, exp.ReadParquet)


@dataclass(frozen=True, slots=True)
class AiTableOptions:
    """How an AI table is kept.

    Attributes:
        key: SQL of the key, a column of the source that the select list has too.
        batch: most rows of a transaction.
        priority: of the calls; None: as of any large statement.
        refresh_s: seconds between refreshes, MANUAL or ON_CHANGE.
        suspended: no refresh by itself for now.
        made_by: user whose sessions refresh it, where tables have no owners.
        sources: with ON_CHANGE: the tables of the query, as written.
    """

    key: str = ""
    batch: int = 500
    priority: int | None = None
    refresh_s: float = MANUAL
    suspended: bool = False
    made_by: str = ""
    sources: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class AiTableCommand:
    """A statement about an AI table.

    Attributes:
        verb: CREATE, REFRESH, ALTER or DROP.
        name: the table.
        options: of CREATE and ALTER ... SET, in their order.
        query: of CREATE: the SELECT.
        offset: number of characters before ``query``.
        tolerant: IF EXISTS, or IF NOT EXISTS.
        suspended: of ALTER ... SUSPEND and RESUME; None for others.
    """

    verb: str
    name: str
    options: tuple[CommandOption, ...] = ()
    query: str = ""
    offset: int = 0
    tolerant: bool = False
    suspended: bool | None = None

    @property
    def tag(self) -> str:
        """The command tag."""
        return f"{self.verb} AI TABLE"


def ai_table_options(command: AiTableCommand, old: AiTableOptions | None = None) -> AiTableOptions:
    """Return the options after CREATE or ALTER.

    Raises:
        SqlError: 42601, an unknown or missing option; 22023, an unusable value.
    """
    known = ["batch", "priority", "refresh"] if old is not None else ["key", "batch", "priority",
        "refresh"]  # fmt: skip
    values: dict[str, object] = {}
    for option in command.options:
        if option.name not in known:
            raise SqlError(
                f"an AI table has no option {option.name}"
                if option.name != "key"
                else "the key of an AI table can't change",
                sqlstate="42601",
                position=option.position,
                hint=did_you_mean(option.name, known) or f"Options are {', '.join(known)}.",
            )
        if option.name == "key":
            values["key"] = option.value
        elif option.name == "refresh":
            values["refresh_s"] = _period_s(option)
        else:
            values[option.name] = option_value(option, OPTION_KINDS[option.name])
    if old is None and "key" not in values:
        raise SqlError(
            "an AI table needs a key to find the rows that changed",
            sqlstate="42601",
            hint="Add WITH (key = id): a column of the source that the select list has too.",
        )
    if command.suspended is not None:
        values["suspended"] = command.suspended
    return replace(old or AiTableOptions(), **values)  # type: ignore[arg-type]


def _period_s(option: CommandOption) -> float:
    if option.value.lower() in _WORDS:
        return _WORDS[option.value.lower()]
    seconds = seconds_of(option.value)
    if seconds is None or seconds < _LEAST_PERIOD_S:
        raise SqlError(
            "option refresh is 'manual', 'on change', or a time of at least a second such as "
            "'1 minute'",
            sqlstate="22023",
            position=option.position,
        )
    return seconds


def source_tables(query: str) -> tuple[str, ...]:
    """Return the tables that a query without AI calls names, as SQL; pure.

    Args:
        query: with common table expressions and subqueries, whose tables count.

    Returns:
        names without repetition; empty if the query is not understood, names no table, or reads
        files.
    """
    for dialect in ("duckdb", "postgres"):
        try:
            tree = sqlglot.parse_one(query, dialect=dialect)
        except SqlglotError:
            continue
        tables = list(tree.find_all(exp.Table))
        if any(isinstance(table.this, _OUTSIDE) for table in tables):
            return ()
        found = (
            ".".join(part.sql(dialect=dialect) for part in table.parts)
            for table in tables
            if isinstance(table.this, exp.Identifier) and not _is_common(table)
        )
        return tuple(dict.fromkeys(found))
    return ()


def _is_common(table: exp.Table) -> bool:
    """Tell whether a name is that of a common table expression in whose scope the name stands."""
    if len(table.parts) > 1:
        return False
    around: list[Any] = [table]
    while around[-1].parent is not None:
        around.append(around[-1].parent)
    for node in around:
        clause = node.args.get("with_") or node.args.get("with")
        for each in clause.expressions if clause is not None else ():
            is_inside = any(parent is each for parent in around)
            is_recursive = bool(clause.args.get("recursive"))
            is_named = each.alias_or_name.lower() == table.name.lower()
            if is_named and (is_recursive or not is_inside):
                return True
            if is_inside and not is_recursive:
                break  # The expressions behind this one are not in scope.
    return False


def ai_table_command(tokens: Sequence[Token], text: str) -> AiTableCommand | None:
    """Read a statement about an AI table; None for any other statement.

    Args:
        tokens: of one statement.
        text: the statement.

    Raises:
        SqlSyntaxError: the statement is malformed.
    """
    words = [token.upper for token in tokens[:3]]
    if words[1:] != ["AI", "TABLE"] or words[0] not in _VERBS:
        return None
    reader = _AiTableReader(tokens, 3)
    return reader.create(text) if words[0] == "CREATE" else reader.other(words[0])


class _AiTableReader(CommandReader):
    """Reads a statement about an AI table."""

    def create(self, text: str) -> AiTableCommand:
        tolerant = self.if_exists("CREATE")
        name = self.name("the name of a table")
        if not self.word("AS"):
            raise self.wrong("expected AS")
        first = self.at
        opening = options_start(self.tokens, first)
        options: tuple[CommandOption, ...] = ()
        end = len(self.tokens)
        if opening is not None:
            end, self.at = opening - 1, opening
            options = self.options()
        if end <= first or self.tokens[first].upper not in ("SELECT", "WITH"):
            position = self.tokens[min(first, len(self.tokens) - 1)].start + 1
            raise SqlSyntaxError("expected SELECT after AS", position=position)
        start = self.tokens[first].start
        query = text[start : self.tokens[end - 1].end]
        return AiTableCommand("CREATE", name, options, query, start, tolerant)

    def other(self, verb: str) -> AiTableCommand:
        tolerant = verb == "DROP" and self.if_exists(verb)
        name = self.name("the name of a table")
        options: tuple[CommandOption, ...] = ()
        suspended: bool | None = None
        if verb == "ALTER":
            if self.word("SET"):
                options = self.options()
            elif self.word("SUSPEND"):
                suspended = True
            elif self.word("RESUME"):
                suspended = False
            else:
                raise self.wrong("expected SUSPEND, RESUME or SET (option = value, ...)")
        self.end()
        return AiTableCommand(verb, name, options, tolerant=tolerant, suspended=suspended)
