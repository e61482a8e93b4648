"""``tierkv sql``: run statements in this process and print the results.

The input is a command, a file, a pipe or a prompt. Rows go to standard output as they come;
progress, warnings and the summary of AI calls go to standard error. Torch and the model are loaded
at the first AI call.
"""

from __future__ import annotations

import errno
import os
import select
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import Any

import typer

from tierkv import dbapi
from tierkv.config import LoadedConfig, state_folder
from tierkv.dbfront.accounts.statistics import AiStats
from tierkv.dbfront.statement_results import Notice
from tierkv.embedded import connect_with
from tierkv.kvcore.errors import CancelledByUserError, TierKVError
from tierkv.output import OutputFormat, RowWriter, StatementBar, render_texts
from tierkv.shell.commands import LEAVING, answer, is_command, script_parts


def run(config: LoadedConfig, text: str | None, *, output: OutputFormat, quiet: bool) -> int:
    """Run ``text``, standard input or a prompt; return the exit status (1 after an error)."""
    interactive = text is None and sys.stdin.isatty()
    if text is None and not interactive:
        text = sys.stdin.read()
    told = None if quiet or not sys.stderr.isatty() else tell_loading
    with connect_with(config, on_load=told) as connection:
        shell = Shell(connection, output=output, quiet=quiet)
        if not sys.stdout.isatty():
            watch_reader(sys.stdout.fileno(), shell.reader_left)
        if text is not None:
            return 0 if shell.run_script(text) else 1
        # Only the prompt needs this module, and the import takes a while.
        from tierkv.shell.prompt import prompt

        return prompt(shell, connection, state_folder() / "sql_history")


class Shell:
    """Runs statements on one connection and prints the results.

    Writing to a closed reader raises BrokenPipeError; the command line then ends quietly.

    Attributes:
        timing: True if the time of each statement is printed.
    """

    def __init__(self, connection: dbapi.Connection, *, output: OutputFormat, quiet: bool) -> None:
        self._cursor = connection.cursor()
        self._output = output
        self._quiet = quiet
        self.timing = False
        self._told: AiStats | None = None
        self._told_early: Notice | None = None
        self._giving_rows = self._reader_gone = False

    def reader_left(self) -> None:
        """Stop a statement whose rows have no reader; its own thread gets a BrokenPipeError.

        A statement without rows so far continues, because it may have been run for its effects.
        """
        self._reader_gone = True
        if self._giving_rows:
            self._cursor.cancel()

    def run_script(self, text: str) -> bool:
        """Run statements and commands of the prompt until one fails; True if all worked."""
        for part in script_parts(text):
            if part.rstrip("; ").lower() in LEAVING:
                break
            if not (self.obey(part) if is_command(part) else self.run_text(part)):
                return False
        return True

    def obey(self, command: str) -> bool:
        """Carry out a command of the prompt and print the result; False if there is an error."""
        reply = answer(command, timing=self.timing)
        if reply.timing is not None:
            self.timing = reply.timing
        if reply.sql:
            return self.run_text(reply.sql)
        if reply.names:
            self._write(render_texts(reply.names, reply.rows, self._output))
        else:  # Only results belong between rows of JSON or CSV.
            aside = reply.refused or self._output is not OutputFormat.TABLE
            typer.echo(reply.text, err=aside)
        return not reply.refused

    def run_text(self, text: str) -> bool:
        """Run statements until one fails; return True if all succeeded."""
        try:
            statements = self._cursor.session.split(text)
        except TierKVError as error:
            return self._fail(dbapi.translate_error(error))
        return all(self._run_one(statement) for statement in statements)

    def _run_one(self, statement: str) -> bool:
        started = time.monotonic()
        try:
            with closing(self._cursor.batches(statement)) as batches:
                self._print(batches)
        except dbapi.Error as error:
            self._refuse_to_go_on()
            return self._fail(error)
        except KeyboardInterrupt:
            stopped = CancelledByUserError("canceling statement due to user request")
            return self._fail(dbapi.translate_error(stopped))
        finally:
            self._giving_rows = False
        self._tell(time.monotonic() - started)
        return True

    def _print(self, batches: Iterator[Sequence[tuple[Any, ...]]]) -> None:
        writer = None
        while (rows := self._next(batches)) is not None:
            writer = writer or RowWriter(self._cursor.columns, self._output)
            self._write(writer.rows(rows))
            self._giving_rows = True
            self._refuse_to_go_on()
        if self._cursor.description is not None:
            writer = writer or RowWriter(self._cursor.columns, self._output)
            self._write(writer.end())
        elif self._output is OutputFormat.TABLE:
            self._write(self._cursor.command_tag + "\n")

    def _next(
        self, batches: Iterator[Sequence[tuple[Any, ...]]]
    ) -> Sequence[tuple[Any, ...]] | None:
        """Wait for rows. The bar, which uses the same terminal, is gone before rows are printed."""
        bar = StatementBar(
            self._cursor.session, enabled=not self._quiet, on_notice=self._tell_early
        )
        with bar:
            return next(batches, None)

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    def _refuse_to_go_on(self) -> None:
        if self._reader_gone and self._giving_rows:
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

    def _tell_early(self, notice: Notice) -> None:
        """Print a notice of a running statement; the bar begins again below the notice."""
        self._told_early = notice
        _tell_notice(notice)

    def _tell(self, seconds: float) -> None:
        for notice in self._cursor.notices:
            if notice is not self._told_early:
                _tell_notice(notice)
        stats = self._cursor.session.last_ai_stats
        told, self._told = self._told, stats
        if not self._quiet and stats is not told and stats.calls:
            typer.secho(f"{summarise(stats)}; {seconds:.2f} s", err=True, dim=True)
        if self.timing:
            typer.echo(f"Time: {seconds * 1e3:.3f} ms", err=True)

    def _fail(self, error: dbapi.Error) -> bool:
        typer.secho(f"ERROR {error.sqlstate}: {error}", fg="red", err=True)
        return False


def _tell_notice(notice: Notice) -> None:
    # The carriage return and the erased line remove the bar drawn on the line.
    clear = "\r\x1b[K" if sys.stderr.isatty() else ""
    typer.secho(f"{clear}{notice.severity}: {notice.message}", fg="yellow", err=True)
    for text in (notice.detail, notice.hint):
        if text:
            typer.echo(f"  {text}", err=True)


def tell_loading(model: str) -> None:
    """Explain why the first AI call takes longer than later ones."""
    typer.secho(f"loading model {model} ...", err=True, dim=True)


def watch_reader(descriptor: int, left: Callable[[], None]) -> None:
    """Call ``left`` once the reader of a pipe is gone; a write would detect that only later.

    The thread waits as long as the process lives.
    """
    poll = select.poll()
    poll.register(descriptor, 0)  # poll always reports errors, and only errors are of interest.

    def wait() -> None:
        poll.poll()
        left()

    threading.Thread(target=wait, name="reader-watch", daemon=True).start()


def summarise(stats: AiStats) -> str:
    """Return one line with the cost of a statement's AI calls and the savings of the cache."""
    hits = stats.hit_tokens
    tiers = (("L1", hits.l1), ("L2", hits.l2), ("L3", hits.l3), ("L4", hits.l4))
    shown = ", ".join(f"{name} {count:,}" for name, count in tiers if count) or "none"
    blended = f", {stats.blended_tokens:,} of them blended" if stats.blended_tokens else ""
    return (
        f"{stats.calls:,} calls ({stats.distinct_calls:,} run), {stats.prompt_tokens:,} prompt "
        f"tokens, {hits.total:,} from the cache ({shown}){blended}, "
        f"mean TTFT {stats.mean_ttft_s * 1e3:.1f} ms"
    )
