"""The prompt of ``tierkv sql``: reads whole statements and commands from a terminal.

prompt_toolkit edits, completes and remembers them; Enter ends a statement that is complete and
begins a new line in one that is not. Importing this file imports prompt_toolkit.
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
from tierkv.kvcore.errors import SqlSyntaxError
from tierkv.output import OutputFormat, render_texts
from tierkv.shell.shell_commands import COMMANDS, LEAVING, answer, is_command
from tierkv.shell.shell_completion import CATALOG_SQL, Catalog, SqlCompleter, catalog_of
from tierkv.shell.shell_history import StatementHistory
from tierkv.sql.text.lexer import tokenize

if TYPE_CHECKING:
    from prompt_toolkit.input import Input
    from prompt_toolkit.output import Output

PROMPT: Final = "tierkv> "
CONTINUATION: Final = "     -> "
GREETING: Final = "TierKV. Statements end with ';'. Tab completes, \\? helps, \\q leaves."


class RunsText(Protocol):
    """What runs statements and prints what they gave."""

    timing: bool

    def run_text(self, text: str) -> bool: ...


def prompt(
    shell: RunsText,
    connection: dbapi.Connection,
    history: Path,
    *,
    output: OutputFormat,
    terminal: tuple[Input, Output] | None = None,
) -> int:
    """Read and run until the user leaves; the exit status.

    Args:
        shell: what runs statements.
        connection: asked for names to complete.
        history: file of what was typed.
        output: how listings are printed.
        terminal: where to read and draw; None: the process's own.
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
            _obey(shell, typed, output)
        elif typed.strip():
            shell.run_text(typed)
            completer.forget()
    return 0


def is_finished(text: str) -> bool:
    """Say whether Enter ends what was typed: a command, nothing, or complete statements."""
    return not text.strip() or is_command(text) or is_complete(text)


def is_complete(text: str) -> bool:
    """Say whether typed text may run: it ends with ';', which no string or comment holds."""
    try:
        tokens = tokenize(text)
    except SqlSyntaxError:
        return False
    return bool(tokens) and tokens[-1].text == ";"


def _read(session: PromptSession[str]) -> str | None:
    """Wait for a whole statement or command; None at the end of input."""
    while True:
        try:
            return session.prompt(PROMPT)
        except KeyboardInterrupt:
            continue
        except EOFError:
            return None


def _obey(shell: RunsText, typed: str, output: OutputFormat) -> None:
    reply = answer(typed, timing=shell.timing)
    if reply.timing is not None:
        shell.timing = reply.timing
    if reply.sql:
        shell.run_text(reply.sql)
    elif reply.names:
        typer.echo(render_texts(reply.names, reply.rows, output), nl=False)
    else:
        typer.echo(reply.text)


def _history(path: Path) -> History:
    try:
        return StatementHistory(path)
    except OSError as error:
        typer.echo(f"what is typed is not kept: {path}: {error.strerror}", err=True)
        return InMemoryHistory()


def _catalog(connection: dbapi.Connection) -> Catalog:
    """Ask for tables and columns, in a session of its own; none while that is refused."""
    try:
        with closing(connection.cursor()) as cursor:
            cursor.execute(CATALOG_SQL)
            return catalog_of(cursor.fetchall())
    except dbapi.Error:
        return Catalog()
