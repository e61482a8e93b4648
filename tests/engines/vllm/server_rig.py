"""Real pool nodes and other servers, for the tests inside vLLM.

Servers run in TierKV's environment, whatever environment the tests run in.
"""

from __future__ import annotations

import json
import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from tests.fix_cluster import free_port

T = TypeVar("T")
ROOT = Path(__file__).parents[3]
OURS = ROOT / ".venv" / "bin" / "python"


def wait_for(condition: Callable[[], T], *, what: str, deadline_s: float = 60.0) -> T:
    """Return the first true value of ``condition``; fail after the deadline."""
    end = time.monotonic() + deadline_s
    while not (value := condition()):
        if time.monotonic() > end:
            pytest.fail(f"not within {deadline_s} s: {what}")
        time.sleep(0.002)
    return value


class Server:
    """One ``tierkv serve`` process, killed and started again by tests on the same port."""

    def __init__(self, folder: Path, role: str, *arguments: str) -> None:
        self.folder, self.role, self.arguments = folder, role, arguments
        self.port = free_port()
        self.process: subprocess.Popen[str] | None = None
        self.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        python = str(OURS) if OURS.exists() else sys.executable
        command = [python, "-m", "tierkv", "serve", self.role, "--port", str(self.port)]
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        with (self.folder / f"{self.role}.log").open("ab") as log:
            self.process = subprocess.Popen(
                [*command, *self.arguments],
                cwd=ROOT,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line and json.loads(line), (self.folder / f"{self.role}.log").read_text()

    def end(self, number: int = signal.SIGTERM) -> None:
        assert self.process is not None and self.process.stdout is not None
        if self.process.poll() is None:
            os.kill(self.process.pid, number)
        self.process.wait(30)
        self.process.stdout.close()


def pool_node(folder: Path, *arguments: str, capacity: str = "64MiB") -> Server:
    return Server(
        folder, "dmp", "--capacity", capacity, "--set", f"dmp.segment_dir={folder}", *arguments
    )


def flip_bits(folder: Path) -> int:
    """Flip a bit in every page of pool nodes' memory that looks like blocks; how many."""
    flipped = 0
    for path in folder.glob("*.seg*"):
        with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
            for start in range(0, len(memory), 4096):
                if len(set(memory[start : start + 4096])) > 200:
                    memory[start + 2048] ^= 0x10
                    flipped += 1
    return flipped
