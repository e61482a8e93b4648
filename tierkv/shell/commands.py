"""The backslash commands of the prompt of ``tierkv sql``, named as in psql.

Pure: converts typed text to SQL, a listing, or text to show.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final

from tierkv.kvcore.errors import SqlSyntaxError
from tierkv.sql.calls.functions import AI_FUNCTIONS
from tierkv.sql.text.lexer import tokenize

COMMANDS: Final = {
    "\\d": "tables and views; \\d NAME describes one",
    "\\dt": "tables",
    "\\dv": "views, those of schema tierkv too",
    "\\dn": "schemas",
    "\\df": "AI functions; \\df ai_c* those whose names match",
    "\\l": "databases",
    "\\timing": "show how long each statement took, or stop it; \\timing on, \\timing off",
    "\\?": "this help; help and \\h too",
    "\\q": "leave; quit, exit and Ctrl-D too",
}
LEAVING: Final = frozenset({"\\q", "\\quit", "quit", "exit"})
"""Words that end the prompt, also with a final semicolon; none of the words is a statement."""

HELPING: Final = frozenset({"\\?", "\\h", "\\help", "help", "?"})

_RELATIONS: Final = (
    "SELECT schema_name AS schema, {kind}_name AS name, '{kind}' AS type FROM duckdb_{kind}s() "
    "WHERE NOT internal AND database_name <> 'tierkv_pg'{more}"
)
"""PostgreSQL's catalog is a separate database, tierkv_pg, once a statement has named it."""
_TABLES: Final = _RELATIONS.format(kind="table", more="")
_VIEWS: Final = _RELATIONS.format(kind="view", more="")
_OWN_VIEWS: Final = _RELATIONS.format(kind="view", more=" AND schema_name <> 'tierkv'")
_LISTINGS: Final = {
    "\\d": f"{_TABLES} UNION ALL {_OWN_VIEWS} ORDER BY ALL",
    "\\dt": f"{_TABLES} ORDER BY ALL",
    "\\dv": f"{_VIEWS} ORDER BY ALL",
    "\\dn": "SELECT DISTINCT schema_name AS schema FROM duckdb_schemas() "
    "WHERE (NOT internal OR schema_name = 'main') AND database_name <> 'tierkv_pg' ORDER BY 1",
    "\\l": "SELECT database_name AS name, coalesce(path, 'in memory') AS file "
    "FROM duckdb_databases() WHERE NOT internal AND database_name <> 'tierkv_pg' ORDER BY 1",
}


@dataclass(frozen=True, slots=True)
class Reply:
    """The result of a command: SQL to run, rows to print, text, or a new timing.

    Attributes:
        sql: a statement that answers the command.
        names: columns of ``rows``.
        rows: a listing.
        text: text to show.
        timing: True or False to switch the display of times; None for no change.
        refused: True if the command or its argument is unknown.
    """

    sql: str = ""
    names: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    text: str = ""
    timing: bool | None = None
    refused: bool = False


def is_command(typed: str) -> bool:
    """True if the typed text is a command of the prompt, not SQL."""
    word = typed.strip().rstrip("; ").lower()
    return word.startswith("\\") or word in LEAVING or word in HELPING


def is_complete(text: str) -> bool:
    """Return True if no statement is begun: text ends with a ';', or is empty or comments."""
    try:
        tokens = tokenize(text)
    except SqlSyntaxError:
        return False
    return not tokens or tokens[-1].text == ";"


def script_parts(text: str) -> list[str]:
    """Split a script into commands of the prompt, one a line, and the SQL between, in order.

    A line inside a statement or a string is part of that statement, even one such as ``help``.
    """
    parts: list[str] = []
    sql = ""
    for line in text.splitlines(keepends=True):
        if is_command(line) and is_complete(sql):
            parts += [sql, line.strip()]
            sql = ""
        else:
            sql += line
    return [part for part in (*parts, sql) if part.strip()]


def answer(typed: str, *, timing: bool) -> Reply:
    """Return the result of a command.

    Args:
        typed: the command, with an argument.
        timing: True if times are shown now.
    """
    word, _, argument = typed.strip().rstrip("; ").partition(" ")
    word, argument = word.lower().removesuffix("+"), argument.strip()
    if word in HELPING:
        return Reply(text=help_text())
    if word == "\\timing":
        return _timing(argument.lower(), timing)
    if word == "\\df":
        return Reply(names=("name", "arguments", "returns"), rows=tuple(_functions(argument)))
    if word == "\\d" and argument:
        return Reply(sql=f"DESCRIBE {argument}")
    if word in _LISTINGS:
        return Reply(sql=_LISTINGS[word])
    return Reply(text=f"there is no command {word} here; \\? lists the commands", refused=True)


def help_text() -> str:
    """Return the text of ``help``."""
    width = max(len(name) for name in COMMANDS)
    lines = [f"  {name:<{width}}  {meaning}" for name, meaning in COMMANDS.items()]
    return "\n".join(
        [
            "Statements end with ';' and may have several lines. Tab completes, Ctrl-C drops what",
            "was typed or stops what runs.",
            *lines,
            "AI calls: SELECT ai_generate('..' [, model => '..'] [, options => '{..}']);",
            "\\df lists more.",
            "Views of the cache: SELECT * FROM tierkv.stat_kvcache;  \\dv lists more.",
        ]
    )


def _timing(argument: str, timing: bool) -> Reply:
    if argument not in ("", "on", "off"):
        return Reply(text=f"\\timing takes on or off, not {argument}", refused=True)
    wanted = not timing if not argument else argument == "on"
    return Reply(text=f"Timing is {'on' if wanted else 'off'}.", timing=wanted)


def _functions(pattern: str) -> Sequence[tuple[str, ...]]:
    pattern = pattern.lower() if "*" in pattern else f"{pattern.lower()}*"
    rows = []
    for name, function in sorted(AI_FUNCTIONS.items()):
        if fnmatchcase(name, pattern):
            arguments = ", ".join(
                part.name if part.required else f"[{part.name}]" for part in function.parameters
            )
            rows.append((name, arguments, function.returns.value))
    return rows
