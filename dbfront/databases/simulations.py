"""Runs ``tierkv.simulate(...)``: each simulation in a child process, a few at a time.

The engine calls ``rows`` on an engine thread and waits on this thread; the event loop never waits.
Cancelling a statement ends its child process. Traces are files: a front open to other users reads
traces from a single configured folder.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, Final

from tierkv.kvcore import limits
from tierkv.kvcore.errors import ConfigError, OverloadedError, TierKVError, UdfArgumentError

RETRY_AFTER_MS: Final = 5_000
OPTIONS: Final = frozenset(
    {
        "policy", "capacity_blocks", "nodes", "router", "local_gb", "pool_gb", "pool_gbps", "gate",
        "closed_loop", "speed", "slo", "reserve", "model", "block_tokens", "cost", "region",
        "slo_share", "seed",
    }
)  # fmt: skip
"""Options allowed in SQL: all options of the command except the options that name files."""


class Simulations:
    """The simulations of one engine.

    Attributes:
        trace_dir: folder of traces; empty if not configured.
        any_file: traces may lie anywhere, as in a process of the caller's own.
        _running: child processes by session number.
        _cancelled: sessions with a statement cancelled during the simulation.
    """

    def __init__(self, trace_dir: str = "", *, any_file: bool) -> None:
        self.trace_dir = trace_dir
        self.any_file = any_file
        self._lock = threading.Lock()
        self._running: dict[int, subprocess.Popen[str]] = {}
        self._cancelled: set[int] = set()

    def rows(self, session: int | None, trace: str | None, options: str | None) -> str:
        """Run a simulation and return the rows as JSON for the SQL function to unpack.

        Raises:
            TierKVError: a bad trace or option, too many simulations, or a cancelled simulation.
        """
        number = -1 if session is None else session
        metrics = self._run(number, self._path(trace), _options(options))
        rows = [{"metric": k, "value": v} for k, v in metrics.items() if not isinstance(v, str)]
        return json.dumps(rows)

    def running_sessions(self) -> tuple[int, ...]:
        """Return the sessions with a running simulation."""
        with self._lock:
            return tuple(self._running)

    def cancel(self, session: int) -> None:
        """End a session's simulation, if the session runs one."""
        with self._lock:
            child = self._running.get(session)
            if child is not None:
                self._cancelled.add(session)
                child.kill()

    def close(self) -> None:
        """End all simulations."""
        for session in self.running_sessions():
            self.cancel(session)

    def _run(self, session: int, trace: Path, options: dict[str, Any]) -> dict[str, Any]:
        child = self._start(session)
        try:
            question = {"trace": str(trace), "options": options, "asker": os.getpid()}
            output, errors = child.communicate(json.dumps(question))
        finally:
            with self._lock:
                del self._running[session]
                cancelled = session in self._cancelled
                self._cancelled.discard(session)
        if cancelled:
            raise TierKVError("the simulation was cancelled")
        if child.returncode:
            raise TierKVError("the simulation ended without an answer", detail=errors[-2000:])
        answer = json.loads(output)
        if "error" in answer:
            told = {part: _in_sql(text) for part, text in answer["error"].items()}
            raise UdfArgumentError(told["message"], detail=told["detail"], hint=told["hint"])
        metrics: dict[str, Any] = answer["metrics"]
        return metrics

    def _start(self, session: int) -> subprocess.Popen[str]:
        with self._lock:
            if len(self._running) >= limits.MAX_SIMULATIONS or session in self._running:
                raise OverloadedError(
                    f"{len(self._running)} simulations are already running, which is the maximum",
                    retry_after_ms=RETRY_AFTER_MS,
                )
            child = subprocess.Popen(
                [sys.executable, "-m", "tierkv.simulator.run"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            self._running[session] = child
            return child

    def _path(self, trace: str | None) -> Path:
        """Resolve a trace's path; refuse a path outside the folder. Links are followed first."""
        if not trace:
            raise UdfArgumentError("tierkv.simulate needs the name of a trace file")
        if self.any_file:
            return Path(self.trace_dir, trace).expanduser()
        if not self.trace_dir:
            raise ConfigError(
                "this front reads no traces: front.trace_dir is not set",
                hint="Set front.trace_dir to a folder of traces, or use `tierkv simulate`.",
            )
        folder = Path(self.trace_dir).expanduser().resolve()
        path = (folder / trace).resolve()
        if not path.is_relative_to(folder):
            raise UdfArgumentError(
                f"trace {trace!r} is not in front.trace_dir",
                hint="Give the file's path relative to that folder.",
            )
        return path


def _options(text: str | None) -> dict[str, Any]:
    options = json.loads(text or "{}")
    given = {name: value for name, value in options.items() if value is not None}
    unknown = sorted(set(given) - OPTIONS)
    if unknown:
        raise UdfArgumentError(f"tierkv.simulate has no option {unknown[0]!r}")
    return given


def _in_sql(text: str) -> str:
    """Spell options as SQL does: ``pool_gb`` for ``--pool-gb``."""
    return re.sub(r"--([a-z][a-z-]+)", lambda option: option[1].replace("-", "_"), text)
