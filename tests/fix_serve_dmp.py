"""A pool node as users start one alone: ``tierkv serve dmp`` in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.fix_cluster import ROOT


class Alone:
    """One ``tierkv serve dmp`` process and what it said when it was ready."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.log = folder / "dmp.log"
        command = [
            sys.executable, "-m", "tierkv", "serve", "dmp", "--capacity", "64MiB",
            "--set", f"dmp.segment_dir={folder}", *arguments,
        ]  # fmt: skip
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command, cwd=ROOT, stdout=subprocess.PIPE, stderr=log, text=True
            )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.log.read_text()
        self.told = json.loads(line)

    @property
    def address(self) -> str:
        address: str = self.told["address"]
        return address

    @property
    def port(self) -> str:
        return self.address.rpartition(":")[2]

    def end(self, number: int = signal.SIGTERM) -> int:
        if self.process.poll() is None:
            os.kill(self.process.pid, number)
        code = self.process.wait(20)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code


StartNode = Callable[..., Alone]


@pytest.fixture
def start_node(tmp_path: Path) -> Iterator[StartNode]:
    """Start pool nodes, which end with the test."""
    started: list[Alone] = []

    def start(*arguments: str) -> Alone:
        started.append(Alone(tmp_path, *arguments))
        return started[-1]

    yield start
    for node in started:
        node.end()
