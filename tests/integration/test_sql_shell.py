"""``tierkv sql`` prints rows as they come, and stops what nobody reads."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from tests import fix_held
from tests.fix_sql import answer_text
from tierkv.dbapi import Connection
from tierkv.dbfront.contracts import ClientInfo
from tierkv.dbfront.databases.duckdb_engine import DuckDbConfig
from tierkv.dbfront.statement.server import DuckDbSqlServer
from tierkv.loop_thread import LoopThread
from tierkv.output import OutputFormat
from tierkv.shell.sql_shell import Shell, watch_reader

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

QUERY = "SELECT i, ai_generate('p' || i) AS a FROM range(200) r(i)"
FIRST_WINDOW = 8
COMMAND = [sys.executable, "-m", "tierkv", "sql", "--set", "dmp.capacity=64MiB"]
ENDLESS = (
    "SET tierkv.max_calls = 0; SELECT i, ai_generate('row ' || i % 9, options => "
    "{'max_tokens': 3}) AS a FROM range(1_000_000_000) r(i)"
)


class HeldGenerator(fix_held.HeldGenerator):
    """The same, told by other threads."""

    def __init__(self) -> None:
        super().__init__()
        self.release = threading.Event()
        self.waiting = threading.Event()
        self.stopped = threading.Event()

    async def until_released(self) -> None:
        while not self.release.is_set():
            await asyncio.sleep(0.005)


@pytest.fixture
def generator() -> HeldGenerator:
    return HeldGenerator()


@pytest.fixture
def connection(generator: HeldGenerator) -> Iterator[Connection]:
    loop = LoopThread()
    defaults = {"tierkv.max_concurrency": str(FIRST_WINDOW)}
    server = DuckDbSqlServer(DuckDbConfig(threads=1), generator, session_defaults=defaults)
    with Connection(loop, server, server.close, ClientInfo(user="ann")) as connection:
        yield connection


class Running:
    """A shell that runs text on a thread and prints into a pipe."""

    def __init__(self, connection: Connection, text: str, output: OutputFormat) -> None:
        reading, self._writing = os.pipe()
        self.reader: IO[str] = os.fdopen(reading)
        self.worked: bool | None = None
        self.broken = False
        self._shell = Shell(connection, output=output, quiet=True)
        self._thread = threading.Thread(target=self._run, args=(text,))

    def __enter__(self) -> Running:
        self._before = sys.stdout
        sys.stdout = os.fdopen(self._writing, "w")
        self._thread.start()
        return self

    def watch(self) -> None:
        """Watch the reader; the pipe then stays open as long as it has one."""
        watch_reader(self._writing, self._shell.reader_left)

    def _run(self, text: str) -> None:
        try:
            self.worked = self._shell.run_text(text)
        except BrokenPipeError:
            self.broken = True
        else:
            sys.stdout.close()

    def wait(self) -> None:
        self._thread.join()

    def __exit__(self, *exc: object) -> None:
        self.reader.close()
        self._thread.join()
        try:
            sys.stdout.close()
        except BrokenPipeError:
            assert self.broken
        finally:
            sys.stdout = self._before


@pytest.mark.parametrize("output", list(OutputFormat))
def test_rows_are_printed_while_answers_are_missing(
    connection: Connection, generator: HeldGenerator, output: OutputFormat
) -> None:
    with Running(connection, QUERY, output) as running:
        head = [running.reader.readline() for _ in range(FIRST_WINDOW)]
        assert len(generator.prompts) < 100
        generator.release.set()
        text = "".join(head) + running.reader.read()
        running.wait()
    assert running.worked
    lines = text.splitlines()
    rows = [[str(i), str(answer_text(f"p{i}"))] for i in range(200)]
    match output:
        case OutputFormat.JSON:
            assert [[str(row["i"]), row["a"]] for row in json.loads(text)] == rows
        case OutputFormat.CSV:
            assert [line.split(",") for line in lines] == [["i", "a"], *rows]
        case OutputFormat.TABLE:
            assert [line.split(" | ") for line in lines[2:-1]] == [
                [number.rjust(len(line.split(" | ")[0])), answer]
                for (number, answer), line in zip(rows, lines[2:-1], strict=True)
            ]
            assert lines[-1] == "(200 rows)"


def test_a_reader_that_leaves_stops_the_calls(
    connection: Connection, generator: HeldGenerator
) -> None:
    with Running(connection, QUERY + "; SELECT ai_generate('more')", OutputFormat.CSV) as running:
        running.watch()
        assert running.reader.readline() == "i,a\n"
        assert generator.waiting.wait(60)
        running.reader.close()
        running.wait()
    assert running.broken
    assert generator.stopped.is_set()
    assert len(generator.prompts) < 200
    assert "more" not in generator.prompts
    assert connection.execute("SELECT 42").fetchone() == (42,)


def test_an_error_after_rows_leaves_what_was_printed(
    connection: Connection, generator: HeldGenerator, capsys: pytest.CaptureFixture[str]
) -> None:
    connection_text = "SET tierkv.max_calls = 20; " + QUERY
    shell = Shell(connection, output=OutputFormat.JSON, quiet=True)
    assert not shell.run_text(connection_text)
    printed = capsys.readouterr()
    assert printed.err.startswith("ERROR 53400")
    with pytest.raises(json.JSONDecodeError):  # nobody takes it for the whole result
        json.loads(printed.out)
    assert json.loads(printed.out + "]")[0] == {"i": 0, "a": answer_text("p0")}
    assert len(generator.prompts) <= 20


def test_a_cursor_says_what_it_streams(connection: Connection, generator: HeldGenerator) -> None:
    generator.release.set()
    cursor = connection.cursor()
    batches = cursor.batches(QUERY)
    assert len(next(batches)) == FIRST_WINDOW
    assert len(generator.prompts) == FIRST_WINDOW
    assert [column[0] for column in cursor.description or ()] == ["i", "a"]
    assert cursor.rowcount == -1
    assert sum(len(batch) for batch in batches) == 200 - FIRST_WINDOW
    assert (cursor.command_tag, cursor.rowcount) == ("SELECT 200", 200)
    assert list(cursor.batches("SELECT 1 WHERE false")) == []
    assert cursor.rowcount == 0
    assert list(cursor.batches("CREATE TABLE t (n INTEGER)")) == []
    assert (cursor.description, cursor.command_tag) == (None, "CREATE TABLE")


def test_head_ends_an_endless_statement() -> None:
    with subprocess.Popen(
        [*COMMAND, "--format", "csv", "-c", ENDLESS],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as shell:
        assert shell.stdout is not None
        assert shell.stderr is not None
        assert shell.stdout.readline() == "i,a\n"
        assert shell.stdout.readline().startswith("0,")
        shell.stdout.close()
        assert "Traceback" not in shell.stderr.read()
        assert shell.wait() == 1


def test_ctrl_c_ends_an_endless_statement() -> None:
    with subprocess.Popen(
        # Shells start what runs in the background with Ctrl-C ignored, which is inherited.
        ["env", "--default-signal=INT", *COMMAND, "--format", "csv", "-c", ENDLESS],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as shell:
        assert shell.stdout is not None
        assert shell.stdout.readline() == "i,a\n"
        shell.send_signal(signal.SIGINT)
        _, told = shell.communicate()
        assert "ERROR 57014: canceling statement due to user request" in told
        assert "Traceback" not in told
        assert shell.returncode == 1


class Terminal:
    """``tierkv sql`` on a terminal of its own: types keys and reads what is drawn."""

    def __init__(self, state: Path) -> None:
        leader, follower = pty.openpty()
        fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
        environment = os.environ | {"XDG_STATE_HOME": str(state), "TERM": "xterm"}
        self._process = subprocess.Popen(
            COMMAND, stdin=follower, stdout=follower, stderr=follower, env=environment
        )
        os.close(follower)
        self._leader = leader
        self.drawn = ""

    def __enter__(self) -> Terminal:
        self.until("tierkv>")
        return self

    def type(self, keys: str) -> None:
        os.write(self._leader, keys.encode())

    def until(self, text: str) -> str:
        """Read until something is drawn; return what was, and forget it."""
        while text not in self.drawn:
            assert select.select([self._leader], [], [], 60)[0], (
                f"not drawn: {text!r}: {self.drawn!r}"
            )
            part = os.read(self._leader, 4096).decode(errors="replace")
            self.drawn += re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", part)
            if "\x1b[6n" in part:
                os.write(self._leader, b"\x1b[1;1R")  # where the cursor is, which it asked
        read, self.drawn = self.drawn, ""
        return read

    def wait(self) -> int:
        """Read to the end, and return the exit status."""
        with contextlib.suppress(OSError):  # what a closed terminal gives on Linux
            while os.read(self._leader, 4096):
                pass
        return self._process.wait(60)

    def __exit__(self, *exc: object) -> None:
        os.close(self._leader)  # the terminal hangs up: it ends whatever it was doing
        self._process.wait(60)


def test_the_prompt_completes_remembers_and_obeys_as_psql(tmp_path: Path) -> None:
    with Terminal(tmp_path) as terminal:
        terminal.type("CREATE TABLE colours (shade TEXT);\r")
        terminal.until("CREATE TABLE\r\n")
        terminal.type("INSERT INTO col\t VALUES\r('teal');\r")
        terminal.until("INSERT 0 1")
        terminal.type("\\timing\r")
        terminal.until("Timing is on.")
        terminal.type("SELECT upper(sh\t) FROM colours;\r")
        assert "TEAL" in terminal.until("Time: ")
        terminal.type("\\df ai_cou\r")
        terminal.until("ai_count_tokens | input, [model] | integer")
        terminal.type("\\dt\r")
        terminal.until("colours")
        terminal.type("\\l\r")
        terminal.until("in memory")
        terminal.type("ATTACH 'x://ann:pw@host';\r")
        terminal.until("ERROR")
        terminal.type("quit\r")
        assert terminal.wait() == 0
    with Terminal(tmp_path) as terminal:
        terminal.type("\x1b[A")  # up
        terminal.until("quit")
    kept = (tmp_path / "tierkv" / "sql_history").read_text()
    assert "+INSERT INTO colours VALUES\n+('teal');\n" in kept
    assert "ann:pw" not in kept
