"""The prompt of ``tierkv sql``: reads, completes and remembers whole statements on a terminal.

prompt_toolkit edits, completes and remembers statements. Enter ends a complete statement and begins
a new line in an incomplete one. The history file is bounded and private. Statements that may hold a
secret stay in memory. Importing this module imports prompt_toolkit.

Tab offers keywords, tables, columns, functions and settings: a pure choice of words from the text
before the cursor and a catalog. After each statement the catalog is read again at the next Tab.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import typer
from prompt_toolkit import PromptSession
from prompt_toolkit.application import get_app
from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.filters import Condition
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.shortcuts import CompleteStyle

from tierkv import dbapi
from tierkv.kvcore.errors import SqlSyntaxError
from tierkv.shell.commands import COMMANDS, LEAVING, is_command, is_complete
from tierkv.sql.calls.functions import AI_FUNCTIONS
from tierkv.sql.settings import SETTINGS
from tierkv.sql.text.lexer import Token, TokenKind, name_value, tokenize

if TYPE_CHECKING:
    from prompt_toolkit.input import Input
    from prompt_toolkit.output import Output


MAX_ENTRIES: Final = 2_000
MAX_ENTRY_CHARS: Final = 32_768
"""Longer statements were pasted or generated; they are remembered only for the session."""

_SECRET: Final = re.compile(
    r"passw(or)?d|passphrase|\b(pwd|secret|token|credentials?|api_?key|private_?key)\b"
    r"|://[^/\s:@]*:[^/\s@]+@",
    re.IGNORECASE,
)


class StatementHistory(FileHistory):
    """prompt_toolkit's history file, private and bounded.

    After a failed write the file is given up, and the session continues with the history in memory.
    """

    def __init__(self, path: Path) -> None:
        """Open or create the file, and drop the oldest entries beyond the limit.

        Raises:
            OSError: the file can't be created or read.
        """
        super().__init__(str(path))
        self._path = path
        self._writes = True
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.close(os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600))
        path.chmod(0o600)
        self._bound()

    def store_string(self, string: str) -> None:
        """Append an entry to the file, unless it may hold a secret or is very long."""
        if not self._writes or len(string) > MAX_ENTRY_CHARS or holds_secret(string):
            return
        try:
            super().store_string(string)
        except OSError:
            self._writes = False

    def _bound(self) -> None:
        newest_first = list(self.load_history_strings())
        if len(newest_first) <= MAX_ENTRIES:
            return
        self._replace(reversed(newest_first[: MAX_ENTRIES // 2]))

    def _replace(self, entries: Iterable[str]) -> None:
        """Rewrite all entries; a concurrent append by another session may be lost."""
        path, whole = self._path, self._path.with_name(f"{self._path.name}.{os.getpid()}")
        os.close(os.open(whole, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600))
        self.filename = str(whole)
        for entry in entries:
            super().store_string(entry)
        self.filename = str(path)
        whole.replace(path)


def holds_secret(statement: str) -> bool:
    """True if a statement may hold a password, a key or a token."""
    return _SECRET.search(statement) is not None


PROMPT: Final = "tierkv> "
CONTINUATION: Final = "     -> "
GREETING: Final = "TierKV. Statements end with ';'. Tab completes, \\? helps, \\q leaves."


class RunsTyped(Protocol):
    """Runs statements and backslash commands and prints the results."""

    def run_text(self, text: str) -> bool: ...
    def obey(self, command: str) -> bool: ...


def prompt(
    shell: RunsTyped,
    connection: dbapi.Connection,
    history: Path,
    *,
    terminal: tuple[Input, Output] | None = None,
) -> int:
    """Read and run statements until the user leaves; return the exit status.

    Args:
        shell: runs the statements.
        connection: provides names to complete.
        history: file of the history.
        terminal: terminal to read and draw on; None: the process's own.
    """
    completer = SqlCompleter(lambda: _catalog(connection), list(COMMANDS))
    keys, screen = terminal or (None, None)
    session: PromptSession[str] = PromptSession(
        history=_history(history),
        completer=completer,
        complete_while_typing=False,
        complete_style=CompleteStyle.READLINE_LIKE,
        multiline=Condition(lambda: not is_finished(get_app().current_buffer.text)),
        prompt_continuation=CONTINUATION,
        input=keys,
        output=screen,
    )
    typer.echo(GREETING)
    while (typed := _read(session)) is not None:
        if typed.strip().rstrip("; ").lower() in LEAVING:
            return 0
        if is_command(typed):
            shell.obey(typed)
        elif typed.strip():
            shell.run_text(typed)
            completer.forget()
    return 0


def is_finished(text: str) -> bool:
    """True if Enter ends the typed text: a command, nothing, or complete statements."""
    return is_command(text) or is_complete(text)


def _read(session: PromptSession[str]) -> str | None:
    """Wait for a whole statement or command; None at the end of input."""
    while True:
        try:
            return session.prompt(PROMPT)
        except KeyboardInterrupt:
            continue
        except EOFError:
            return None


def _history(path: Path) -> History:
    try:
        return StatementHistory(path)
    except OSError as error:
        typer.echo(f"what is typed is not kept: {path}: {error.strerror}", err=True)
        return InMemoryHistory()


def _catalog(connection: dbapi.Connection) -> Catalog:
    """Return tables and columns, read in a separate session; empty if the query is refused."""
    try:
        with closing(connection.cursor()) as cursor:
            cursor.execute(_CATALOG_SQL)
            return catalog_of(cursor.fetchall())
    except dbapi.Error:
        return Catalog()


_CATALOG_SQL: Final = (
    "SELECT schema_name, table_name, column_name FROM duckdb_columns() "
    "WHERE NOT internal AND database_name <> 'tierkv_pg'"
)
_BEGINNINGS: Final = """
    ALTER ANALYZE BEGIN CHECKPOINT COMMIT COPY CREATE DELETE DESCRIBE DROP EXPLAIN INSERT RESET
    ROLLBACK SELECT SET SHOW TRUNCATE UPDATE VALUES WITH
"""
_KEYWORDS: Final = """
    ALL ANALYZE AND AS ASC BETWEEN BY CASE CAST CROSS DELETE DESC DISTINCT ELSE END EXCEPT EXISTS
    FALSE FETCH FILTER FROM FULL GROUP HAVING IN INDEX INNER INSERT INTERSECT INTO IS JOIN LATERAL
    LEFT LIKE LIMIT NOT NULL OFFSET ON OR ORDER OUTER OVER PARTITION PRIMARY QUALIFY REPLACE
    RETURNING RIGHT SCHEMA SELECT SET TABLE TEMPORARY THEN TRUE UNION UNIQUE UPDATE USING VALUES
    VIEW WHEN WHERE WINDOW WITH
"""
_ENGINE_FUNCTIONS: Final = """
    abs avg coalesce concat count current_date date_trunc greatest least length list lower max
    min now nullif range read_csv read_json read_parquet regexp_matches replace round row_number
    split_part string_agg substring sum trim unnest upper
"""
"""The most common functions; DuckDB has about a thousand."""
_TABLE_COMES: Final = frozenset(
    {"FROM", "JOIN", "INTO", "UPDATE", "TABLE", "DESCRIBE", "TRUNCATE", "COPY"}
)
_SETTING_VERBS: Final = frozenset({"SET", "SHOW", "RESET"})
_WORD: Final = re.compile(r"[\w.$\\+]*\Z")


@dataclass(frozen=True, slots=True)
class Catalog:
    """Tables as a statement may name them, each with its columns."""

    tables: Mapping[str, Sequence[str]] = field(default_factory=dict)


def catalog_of(rows: Iterable[Sequence[Any]]) -> Catalog:
    """Build a catalog from rows of _CATALOG_SQL; tables of schema ``main`` need no schema."""
    tables: dict[str, list[str]] = {}
    for schema, table, column in rows:
        tables.setdefault(table if schema == "main" else f"{schema}.{table}", []).append(column)
    return Catalog(tables)


def words_for(text: str, catalog: Catalog, *, commands: Sequence[str] = ()) -> list[str]:
    """Return the words that may continue ``text``, sorted; empty inside a string or comment.

    Args:
        text: text before the cursor.
        catalog: tables and columns.
        commands: backslash commands of the prompt.
    """
    begun = _WORD.search(text)
    assert begun is not None, "the pattern matches nothing at the end, too"
    word, before = begun.group(), text[: begun.start()]
    if text.lstrip().startswith("\\"):
        known: Iterable[str] = commands if not before.strip() else catalog.tables
        return _beginning(known, word)
    try:
        tokens = tokenize(before)
        tokenize(text)
    except SqlSyntaxError:
        return []
    return _beginning(_known(tokens, word, catalog), word)


def _known(tokens: Sequence[Token], word: str, catalog: Catalog) -> Iterator[str]:
    ends = [index for index, token in enumerate(tokens) if token.text == ";"]
    tokens = tokens[ends[-1] + 1 :] if ends else tokens
    last = tokens[-1].upper if tokens else ""
    if tokens and tokens[0].upper in _SETTING_VERBS and len(tokens) <= 2:
        yield from SETTINGS
        yield from (_like(word, part) for part in ("LOCAL", "ALL"))
        return
    if last in _TABLE_COMES or (last == "," and _in_from(tokens)):
        yield from catalog.tables
        return
    keywords = _KEYWORDS if tokens else _BEGINNINGS
    yield from (_like(word, keyword) for keyword in keywords.split())
    if tokens:
        yield from _columns(tokens, word, catalog)
        yield from (f"{name}(" for name in (*AI_FUNCTIONS, *_ENGINE_FUNCTIONS.split()))
        yield from (name for name in catalog.tables if word)


def _columns(tokens: Sequence[Token], word: str, catalog: Catalog) -> Iterator[str]:
    """Yield columns of the named tables; of all tables of ``main`` if no table is named."""
    names = {name_value(t) for t in tokens if t.kind in (TokenKind.WORD, TokenKind.QUOTED)}
    named = [table for table in catalog.tables if table.rpartition(".")[2] in names]
    for table in named or (table for table in catalog.tables if "." not in table):
        columns = catalog.tables[table]
        yield from columns
        if "." in word:
            yield from (f"{table.rpartition('.')[2]}.{column}" for column in columns)


def _in_from(tokens: Sequence[Token]) -> bool:
    """True after a comma of a FROM list."""
    for token in reversed(tokens):
        if token.upper in ("SELECT", "WHERE", "BY", "HAVING", "ON", "SET", "VALUES", "("):
            return False
        if token.upper == "FROM":
            return True
    return False


def _like(word: str, keyword: str) -> str:
    """Spell a keyword in the case of the first typed letter; upper case before any letter."""
    return keyword.lower() if word[:1].islower() else keyword


def _beginning(known: Iterable[str], word: str) -> list[str]:
    wanted = word.lower()
    return sorted({name for name in known if name.lower().startswith(wanted)}, key=str.lower)


class SqlCompleter(Completer):
    """Completes at the prompt; call ``forget`` after each statement that may create tables."""

    def __init__(self, read: Callable[[], Catalog], commands: Sequence[str]) -> None:
        """Complete from the catalog of ``read``, and ``commands``."""
        self._read = read
        self._commands = commands
        self._catalog: Catalog | None = None

    def forget(self) -> None:
        """Read the catalog again at the next use."""
        self._catalog = None

    def get_completions(self, document: Document, event: CompleteEvent) -> Iterator[Completion]:
        """Offer words; see prompt_toolkit."""
        text = document.text_before_cursor
        if self._catalog is None:
            self._catalog = self._read()
        begun = _WORD.search(text)
        length = len(begun.group()) if begun else 0
        for word in words_for(text, self._catalog, commands=self._commands):
            yield Completion(word, start_position=-length)
