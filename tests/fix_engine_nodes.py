"""Compute nodes whose engine is another server, as processes of their own.

Used by tests/integration and tests/engines. What is started is stopped by who started it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.fix_cluster import ROOT, wait_for


class Process:
    """A child with a log file; its standard output is read from there.

    Attributes:
        log: what it wrote.
    """

    def __init__(self, command: list[str], log: Path, *, env: dict[str, str] | None = None) -> None:
        self.log = log
        self._command, self._env = command, env
        self.start()

    def start(self) -> None:
        """Start it, again if need be, with an empty log."""
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                self._command, cwd=ROOT, stdout=log, stderr=log, env=self._env,
                start_new_session=True,
            )  # fmt: skip

    def text(self) -> str:
        """Return what it wrote so far."""
        return self.log.read_text(errors="replace")

    def check_alive(self) -> None:
        """Fail the test when it ended."""
        if self.process.poll() is not None:
            pytest.fail(f"{self._command} ended: {self.text()[-3000:]}")

    def kill(self) -> None:
        """Kill it and all it started, at once."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(timeout=30)

    def stop(self) -> int:
        """Ask it to end; then kill what is left. Returns its exit status."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                self.kill()
        return self.process.wait(timeout=30)


class ServedNode(Process):
    """``tierkv serve ROLE ...``.

    Attributes:
        ready: its ready line.
    """

    def __init__(self, log: Path, *arguments: str) -> None:
        super().__init__([sys.executable, "-m", "tierkv", "serve", *arguments], log)
        self.ready: dict[str, Any] = {}
        wait_for(self._is_ready, what=f"{arguments} ready: {log}", deadline_s=60.0)

    def _is_ready(self) -> bool:
        self.check_alive()
        for line in self.text().splitlines():
            if line.startswith("{") and json.loads(line).get("event") == "ready":
                self.ready = json.loads(line)
        return bool(self.ready)
