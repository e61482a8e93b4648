"""A server of bench.engines as a child process: log, readiness and shutdown."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parent.parent
START_S: Final = 180.0
STOP_S: Final = 20.0
_LAST_WORDS: Final = 1_500


class ServerError(Exception):
    """A server did not come up; the message contains the last lines of the log."""


class Process:
    """A child process with a log, in its own process group.

    Args:
        name: name of the log.
        command: program and arguments.
        folder: folder of the log.
        env: variables added to this process's environment. None adds no variable, and the process's
            standard output is read for an address instead of logged.
    """

    def __init__(
        self, name: str, command: Sequence[str], folder: Path, env: Mapping[str, str] | None = None
    ) -> None:
        self.name = name
        self._log = folder / f"{name}.log"
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command, cwd=ROOT, env=os.environ | dict(env or {}), start_new_session=True,
                stdout=subprocess.PIPE if env is None else log, stderr=log, text=True,
            )  # fmt: skip

    def ready_line(self) -> dict[str, Any]:
        """Wait for the line of JSON in which a TierKV role reports addresses."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ServerError(self._last_words())
        told: dict[str, Any] = json.loads(line)
        return told

    def await_http(self, port: int, path: str) -> None:
        """Wait until a path answers with 200."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self._process.poll() is None:
            with contextlib.suppress(OSError, http.client.HTTPException):
                if _status(port, path) == http.client.OK:
                    return
            time.sleep(0.1)
        raise ServerError(self._last_words())

    def stop(self) -> None:
        """End the process and all children."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            pass
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            if self._process.stdout is not None:
                self._process.stdout.close()

    def _last_words(self) -> str:
        text = self._log.read_text(errors="replace")
        return f"{self.name} did not come up:\n{text[-_LAST_WORDS:]}"


def _status(port: int, path: str) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5.0)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    finally:
        connection.close()
