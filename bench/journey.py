"""Trace an AI statement through the tree: the files and functions that the statement touches.

Run ``make journey``, or ``python -m bench.journey``. An embedded cluster opens the PostgreSQL port
and a real client (psycopg; the DB-API if psycopg is missing) sends ``SELECT ai_generate(...)``. A
profile function in every thread records calls, so the script measures no time. Background work
(heartbeats, the scrubber) is left out: only functions called by every traced statement count. A
trace ends when the blocks computed by the statement are in the memory pool.
"""

from __future__ import annotations

import importlib.util
import random
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby, pairwise
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final

import tierkv
from bench.report import Report, finish, parse_arguments
from tierkv.config import load_config
from tierkv.embedded import EmbeddedProcess, start_embedded

ROOT: Final = Path(__file__).parents[1]
PACKAGE: Final = Path(tierkv.__file__).parent
SETTINGS: Final = {
    "front.pg_port": 0,
    "front.http_port": 0,
    "front.threads": 1,  # DuckDB then calls back in a Python thread, which is traced.
    "dmp.capacity": "64MiB",
    "compute.l1_capacity": "32MiB",
    "compute.threads": 1,
}
CUSTOMERS: Final = ("Jonas Ortiz", "Mia Weber", "Noah Silva", "Lena Novak", "Omar Haddad")
PRODUCTS: Final = ("blender", "lamp", "kettle", "heater", "toaster", "printer", "scale")


@dataclass(frozen=True, slots=True)
class TouchedFunction:
    """A function of this project: file relative to the root of the tree, and qualified name."""

    file: str
    function: str

    @property
    def room(self) -> str:
        """The top folder of the file."""
        return self.file.partition("/")[0]


@dataclass(slots=True)
class CallRecorder:
    """A profile function for all threads that records only while ``recording`` is true.

    Attributes:
        recording: whether calls are recorded.
        codes: code objects in the order of the first call.
    """

    recording: bool = False
    codes: dict[CodeType, None] = field(default_factory=dict)

    def __call__(self, frame: FrameType, event: str, _argument: Any) -> None:
        if self.recording and event == "call":
            self.codes.setdefault(frame.f_code)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Profile this thread and all threads that start inside the block."""
        threading.setprofile(self)
        sys.setprofile(self)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    def touched_by(self, action: Callable[[], object]) -> list[TouchedFunction]:
        """Run an action; return the project's functions called, in order of the first call."""
        self.codes.clear()
        self.recording = True
        try:
            action()
        finally:
            self.recording = False
        touched = (_touched_function(code) for code in list(self.codes))
        return list(dict.fromkeys(each for each in touched if each is not None))


def _touched_function(code: CodeType) -> TouchedFunction | None:
    """Return the project's function of ``code``; None for libraries and module bodies."""
    path = Path(code.co_filename)
    name = code.co_qualname.partition(".<locals>")[0]
    if not path.is_relative_to(PACKAGE) or name.startswith("<"):
        return None
    inside = path.relative_to(PACKAGE)
    # A room is a link inside tierkv/; every other file belongs to tierkv/ itself.
    is_room = (PACKAGE / inside.parts[0]).is_symlink()
    return TouchedFunction(str(inside if is_room else Path("tierkv") / inside), name)


def main(argv: Sequence[str] | None = None) -> None:
    """Run and print."""
    arguments = parse_arguments(__doc__ or "", argv)
    journey = trace_statement(statements=2 if arguments.quick else 5, seed=arguments.seed)
    report = Report("journey")
    add_counts(report, journey)
    report.note(
        "functions in the order of their first call; one line per file, a new block per switch"
    )
    finish(report, arguments.format)
    if arguments.format == "text":
        print_journey(journey)


def trace_statement(*, statements: int, seed: int) -> list[TouchedFunction]:
    """Return the functions that each of ``statements`` traced statements called.

    The prompts have a common prefix, so each prompt has blocks to reuse. The ends of the prompts
    differ, so each prompt has blocks to compute and no answer comes from the memo. An untraced
    first statement loads the model.

    Args:
        statements: number of traced statements; the order is the first statement's.
        seed: seed of the prompts.
    """
    rng = random.Random(seed)
    recorder = CallRecorder()
    with recorder.installed():
        process = start_embedded(load_config(None, flags=SETTINGS))
        with process.connect(), _open_client(process) as ask:

            def ask_and_settle(prompt: str) -> None:
                ask(prompt)
                process.loop.run(process.cluster.nodes.settle())

            first, *prompts = _prompts(rng, statements + 1)
            ask_and_settle(first)
            traces = [recorder.touched_by(partial(ask_and_settle, each)) for each in prompts]
    always = set(traces[0]).intersection(*traces[1:])
    return [each for each in traces[0] if each in always]


def _prompts(rng: random.Random, number: int) -> list[str]:
    """Return prompts of several KV blocks with a common first half."""
    shared = _purchases(rng)
    question = "\nQuestion: What did the last customer buy?"
    return [f"{shared} {_purchases(rng)}{question}" for _ in range(number)]


def _purchases(rng: random.Random) -> str:
    lines = (f"{rng.choice(CUSTOMERS)} bought a {rng.choice(PRODUCTS)}." for _ in range(20))
    return " ".join(lines)


@contextmanager
def _open_client(process: EmbeddedProcess) -> Iterator[Callable[[str], object]]:
    """Yield a function that sends one statement with a prompt and fetches its row."""
    statement = "SELECT ai_generate('{}')"
    if importlib.util.find_spec("psycopg") is None:
        connection = process.connect()
        yield lambda prompt: connection.execute(statement.format(prompt)).fetchall()
        return
    import psycopg  # Optional: the DB-API takes its place above.

    doors = process.loop.run(process.cluster.front.open_doors())
    host, _, port = doors["pg"].rpartition(":")
    with psycopg.connect(host=host, port=port, user="journey", autocommit=True) as client:
        yield lambda prompt: client.execute(statement.format(prompt)).fetchall()


def add_counts(report: Report, journey: Sequence[TouchedFunction]) -> None:
    """Add files, functions, rooms and switches, then functions of each room."""
    rooms = [each.room for each in journey]
    report.add("files", len({each.file for each in journey}))
    report.add("functions", len(journey))
    report.add("rooms", len(set(rooms)))
    report.add("switches", sum(before != after for before, after in pairwise(rooms)))
    for room in dict.fromkeys(rooms):
        report.add(f"{room}_files", len({each.file for each in journey if each.room == room}))
        report.add(f"{room}_functions", rooms.count(room))


def print_journey(journey: Sequence[TouchedFunction]) -> None:
    """Print the functions by room and file; a room recurs when the statement returns."""
    for room, visit in groupby(journey, key=lambda each: each.room):
        print(f"\n{room}")
        for file, functions in groupby(visit, key=lambda each: each.file):
            print(f"  {file}: {', '.join(each.function for each in functions)}")


if __name__ == "__main__":
    main()
