"""The prompt of ``tierkv sql``: reads whole statements from a terminal and keeps a history.

prompt_toolkit edits, completes and remembers statements. Enter ends a complete statement and begins
a new line in an incomplete one. The history file is bounded and private. Statements that may hold a
secret stay in memory. Importing this module imports prompt_toolkit.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

import typer
from prompt_toolkit import PromptSession
from prompt_toolkit.application import get_app
from prompt_toolkit.filters import Condition
from prompt_toolkit.history import History, InMemoryHistory
from prompt_toolkit.shortcuts import CompleteStyle

from tierkv import dbapi
from tierkv.shell.commands import COMMANDS, LEAVING, is_command, is_complete
from tierkv.shell.completion import CATALOG_SQL, Catalog, SqlCompleter, catalog_of

if TYPE_CHECKING:
    from prompt_toolkit.input import Input
    from prompt_toolkit.output import Output
import os
import re
from collections.abc import Iterable

from prompt_toolkit.history import FileHistory

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
        if typed.strip().rstrip(";").lower() in LEAVING:
            return 0
        if is_command(typed):
            shell.obey(typed)
        elif typed.strip():
            shell.run_text(typed)
            completer.forget()
    return 0


def is_finished(text: str) -> bool:
    """True if Enter ends the typed text: a command, nothing, or complete statements."""
    return not text.strip() or is_command(text) or is_complete(text)


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
            cursor.execute(CATALOG_SQL)
            return catalog_of(cursor.fetchall())
    except dbapi.Error:
        return Catalog()
