"""``tierkv sql``: run statements in this process and print what they gave.

One command, a file, a pipe or a prompt; rows go to standard output as they come, progress,
warnings and the summary of AI calls to standard error. What AI calls need is loaded with the first
of them.
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
from tierkv.dbfront.contracts import Notice
from tierkv.embedded import connect_with
from tierkv.kvcore.errors import CancelledByUserError, TierKVError
from tierkv.output import OutputFormat, RowWriter
from tierkv.progress import StatementBar


def run(config: LoadedConfig, text: str | None, *, output: OutputFormat, quiet: bool) -> int:
    """Run ``text``, standard input or a prompt; the exit status (1 after an error)."""
    interactive = text is None and sys.stdin.isatty()
    if text is None and not interactive:
        text = sys.stdin.read()
    told = None if quiet or not sys.stderr.isatty() else tell_loading
    with connect_with(config, on_load=told) as connection:
        shell = Shell(connection, output=output, quiet=quiet)
        if not sys.stdout.isatty():
            watch_reader(sys.stdout.fileno(), shell.reader_left)
        if text is not None:
            return 0 if shell.run_text(text) else 1
        # Only the prompt needs it, and it takes a while to import.
        from tierkv.shell.prompt import prompt

        return prompt(shell, connection, state_folder() / "sql_history", output=output)


class Shell:
    """Runs statements on one connection and prints their results.

    Writing raises BrokenPipeError when nobody reads any more; whoever runs the command line ends
    quietly then.

    Attributes:
        timing: the time of each statement is told.
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
        """Stop a statement whose rows nobody reads; its own thread learns of it by BrokenPipeError.

        One that gave no rows yet goes on: it may have been run for what it does.
        """
        self._reader_gone = True
        if self._giving_rows:
            self._cursor.cancel()

    def run_text(self, text: str) -> bool:
        """Run statements until one fails; whether all worked."""
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
        """Wait for rows; the bar is gone when they are printed, for it writes on the terminal."""
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
        """Print what a running statement has to say; the bar begins again below it."""
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
    # The carriage return and the erased line take away what the bar has drawn there.
    clear = "\r\x1b[K" if sys.stderr.isatty() else ""
    typer.secho(f"{clear}{notice.severity}: {notice.message}", fg="yellow", err=True)
    for text in (notice.detail, notice.hint):
        if text:
            typer.echo(f"  {text}", err=True)


def tell_loading(model: str) -> None:
    """Say why the first AI call takes longer than those behind it."""
    typer.secho(f"loading model {model} ...", err=True, dim=True)


def watch_reader(descriptor: int, left: Callable[[], None]) -> None:
    """Call ``left`` once nobody reads what is written to a pipe; writing tells only later.

    The thread waits as long as the process lives.
    """
    poll = select.poll()
    poll.register(descriptor, 0)  # Errors are told unasked, and only they are of interest.

    def wait() -> None:
        poll.poll()
        left()

    threading.Thread(target=wait, name="reader-watch", daemon=True).start()


def summarise(stats: AiStats) -> str:
    """Say in one line what a statement's AI calls cost and what the cache saved."""
    hits = stats.hit_tokens
    tiers = (("L1", hits.l1), ("L2", hits.l2), ("L3", hits.l3), ("L4", hits.l4))
    shown = ", ".join(f"{name} {count:,}" for name, count in tiers if count) or "none"
    blended = f", {stats.blended_tokens:,} of them blended" if stats.blended_tokens else ""
    return (
        f"{stats.calls:,} calls ({stats.distinct_calls:,} run), {stats.prompt_tokens:,} prompt "
        f"tokens, {hits.total:,} from the cache ({shown}){blended}, "
        f"mean TTFT {stats.mean_ttft_s * 1e3:.1f} ms"
    )
