"""``tierkv sql``: run statements in this process and print what they gave.

One command, a file, a pipe or a prompt; rows go to standard output, progress, warnings and the
summary of AI calls to standard error. The embedded cluster starts with the first statement.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import typer

from dbfront.statistics import AiStats
from kvcore.errors import SqlSyntaxError, TierKVError
from sql.lexer import tokenize
from tierkv import dbapi
from tierkv.config import LoadedConfig
from tierkv.embedded import connect_with
from tierkv.output import OutputFormat, render_rows
from tierkv.progress import StatementBar

HELP = """\
Statements end with ';'.  \\dt lists tables, \\d NAME describes one, \\q or Ctrl-D leaves.
AI calls: ai_generate(prompt [, model => ..] [, system_prompt => ..] [, options => ..]).
Views of the cache: SELECT * FROM tierkv.stat_kvcache;"""


def run(config: LoadedConfig, text: str | None, *, output: OutputFormat, quiet: bool) -> int:
    """Run ``text``, standard input or a prompt; the exit status (1 after an error)."""
    interactive = text is None and sys.stdin.isatty()
    if text is None and not interactive:
        text = sys.stdin.read()
    with connect_with(config) as connection:
        shell = Shell(connection, output=output, quiet=quiet)
        if text is not None:
            return 0 if shell.run_text(text) else 1
        return shell.prompt(config.settings.cluster.run_dir.expanduser() / "history")


class Shell:
    """Runs statements on one connection and prints their results."""

    def __init__(self, connection: dbapi.Connection, *, output: OutputFormat, quiet: bool) -> None:
        self._cursor = connection.cursor()
        self._output = output
        self._quiet = quiet
        self._told: AiStats | None = None

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
            with StatementBar(self._cursor.session, enabled=not self._quiet):
                self._cursor.execute(statement)
        except dbapi.Error as error:
            return self._fail(error)
        if self._cursor.description is not None:
            text = render_rows(self._cursor.columns, self._cursor.fetchall(), self._output)
            sys.stdout.write(text)
        elif self._output is OutputFormat.TABLE:
            typer.echo(self._cursor.command_tag)
        sys.stdout.flush()
        self._tell(time.monotonic() - started)
        return True

    def _tell(self, seconds: float) -> None:
        for notice in self._cursor.notices:
            typer.secho(f"{notice.severity}: {notice.message}", fg="yellow", err=True)
            if notice.detail:
                typer.echo(f"  {notice.detail}", err=True)
        stats: AiStats | None = getattr(self._cursor.session, "last_ai_stats", None)
        told, self._told = self._told, stats
        if not self._quiet and stats is not None and stats is not told and stats.calls:
            typer.secho(f"{summarise(stats)}; {seconds:.2f} s", err=True, dim=True)

    def _fail(self, error: dbapi.Error) -> bool:
        typer.secho(f"ERROR {error.sqlstate}: {error}", fg="red", err=True)
        return False

    def prompt(self, history: Path) -> int:
        """Read statements from a terminal until the user leaves."""
        # Only the prompt needs it, and it takes a while to import.
        from prompt_toolkit import PromptSession
        from prompt_toolkit.history import FileHistory

        history.parent.mkdir(parents=True, exist_ok=True)
        session: PromptSession[str] = PromptSession(history=FileHistory(str(history)))
        typer.echo("TierKV. " + HELP)
        pending = ""
        while True:
            try:
                line = session.prompt("tierkv> " if not pending else "     -> ")
            except KeyboardInterrupt:
                pending = ""
                continue
            except EOFError:
                return 0
            if not pending and line.strip().startswith("\\"):
                if line.strip() in ("\\q", "\\quit"):
                    return 0
                self._meta(line.strip())
                continue
            pending += line + "\n"
            if is_complete(pending):
                self.run_text(pending)
                pending = ""

    def _meta(self, command: str) -> None:
        word, _, name = command.partition(" ")
        if word == "\\dt":
            self.run_text("SHOW TABLES")
        elif word == "\\d" and name:
            self.run_text(f"DESCRIBE {name}")
        else:
            typer.echo(HELP)


def is_complete(text: str) -> bool:
    """Say whether typed text may run: it ends with ';', which no string or comment holds."""
    try:
        tokens = tokenize(text)
    except SqlSyntaxError:
        return False
    return bool(tokens) and tokens[-1].text == ";"


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
