"""A meta server as a process of its own, ``tierkv serve meta``, killed and started by tests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.fix_cluster import ROOT


class MetaAlone:
    """One ``tierkv serve meta``; its database outlives it, as long as ``folder`` does."""

    def __init__(self, folder: Path, port: int, *arguments: str) -> None:
        self.address = f"127.0.0.1:{port}"
        self.log = folder / "meta.log"
        command = [
            sys.executable, "-m", "tierkv", "serve", "meta", "--port", str(port),
            "--set", f"meta.database={folder / 'meta.sqlite'}", *arguments,
        ]  # fmt: skip
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command, cwd=ROOT, stdout=subprocess.PIPE, stderr=log, text=True
            )
        assert self.process.stdout is not None
        assert self.process.stdout.readline(), self.log.read_text()

    def end(self, number: int = signal.SIGTERM) -> None:
        if self.process.poll() is None:
            os.kill(self.process.pid, number)
        self.process.wait(20)
        assert self.process.stdout is not None
        self.process.stdout.close()
