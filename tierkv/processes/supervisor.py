"""Child processes that stay up: start, wait until ready, restart with backoff, stop in order.

``tierkv up`` passes one ChildSpec per role. A child prints one JSON line when ready and ends when
standard input closes, so no child outlives a killed supervisor. Logs stay bounded: a child keeps
its log file open for appending, so older lines are copied to LOG.1 and the file is truncated.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import shutil
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, BinaryIO, Final

from tierkv.kvcore.errors import NoNodeError

LOG_BYTES: Final = 64 << 20
"""A longer log is moved; together with LOG.1 a process has at most twice as much."""


def keep_short(path: Path, most_bytes: int = LOG_BYTES) -> bool:
    """Move the content of a log to LOG.1 if too long; return True if moved.

    Lines written between the copy and the cut are lost: a few lines at most.

    Raises:
        OSError: the file can't be copied, for example because the disk is full; the log stays
            unchanged.
    """
    with contextlib.suppress(FileNotFoundError), path.open("rb") as log:
        if os.fstat(log.fileno()).st_size <= most_bytes:
            return False
        _copy(log, path.with_name(f"{path.name}.1"))
        os.truncate(path, 0)
        return True
    return False


def _copy(log: BinaryIO, older: Path) -> None:
    fresh = older.with_name(f"{older.name}.new")
    try:
        fd = os.open(fresh, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600)
        with os.fdopen(fd, "wb") as copy:
            shutil.copyfileobj(log, copy)
            shutil.copyfileobj(log, copy)  # Lines written during the first copy.
        fresh.replace(older)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise


log = logging.getLogger(__name__)

START_S: Final = 300.0
"""Longest start of a role: a large model takes minutes."""

STOP_S: Final = 12.0
"""Longest end of a role, besides the time that a front gives to running statements."""

BACKOFF_FIRST_S = 0.2
BACKOFF_MOST_S = 10.0
STABLE_S = 30.0
"""A child that ran this long starts its next backoff from the beginning."""
KILL_COUNTS = ("/proc/vmstat", "/sys/fs/cgroup/memory.events")
"""Files with the kernel's counts of processes killed for memory."""
LOG_LOOK_S = 10.0
"""Time between checks of the logs' lengths."""


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """One process to keep alive.

    Attributes:
        name: name in messages and of the log file.
        argv: command line.
        log_path: file for standard error (appended); None: the parent's standard error.
        stop_timeout_s: time from SIGTERM to SIGKILL.
        first: more arguments, for the first start only.
        environment: the whole environment; None: the parent's.
    """

    name: str
    argv: tuple[str, ...]
    log_path: Path | None
    stop_timeout_s: float = 10.0
    first: tuple[str, ...] = ()
    environment: Mapping[str, str] | None = None


@dataclass(slots=True)
class Child:
    """A running ChildSpec.

    Attributes:
        process: the current process; None between restarts.
        ready: content of the ready line; empty until ready.
        restarts: number of restarts.
        memory_kills: number of memory kills by the kernel before this process began.
    """

    spec: ChildSpec
    process: asyncio.subprocess.Process | None = None
    ready: dict[str, Any] = field(default_factory=dict)
    restarts: int = 0
    memory_kills: int = 0
    is_ready: asyncio.Event = field(default_factory=asyncio.Event)


class Supervisor:
    """Keeps children alive until stopped.

    Args:
        on_restart: called with (name, exit code, delay in seconds, killed for memory) after a child
            died.
    """

    def __init__(self, on_restart: Callable[[str, int, float, bool], None] | None = None) -> None:
        self.children: dict[str, Child] = {}
        self._watchers: dict[str, asyncio.Task[None]] = {}
        self._on_restart = on_restart
        self._log_keeper: asyncio.Task[None] | None = None
        self._stopping = False

    async def start(self, spec: ChildSpec, *, timeout_s: float = 60.0) -> dict[str, Any]:
        """Start a child and wait for the ready line.

        Returns:
            ready: the child's report, for example addresses.

        Raises:
            NoNodeError: the child ended or stayed silent; the message carries the end of the log.
        """
        child = Child(spec)
        self.children[spec.name] = child
        self._log_keeper = self._log_keeper or asyncio.create_task(self._keep_logs_short())
        earlier = spec.log_path.stat().st_size if spec.log_path and spec.log_path.exists() else 0
        await self._spawn(child, *spec.first)
        watcher = asyncio.create_task(self._watch(child, first=True), name=f"watch-{spec.name}")
        self._watchers[spec.name] = watcher
        ready = asyncio.create_task(child.is_ready.wait())
        try:
            await asyncio.wait(
                {ready, watcher}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            ready.cancel()
        if not child.is_ready.is_set():
            raise NoNodeError(
                f"{spec.name} did not start: {_why_not(child, earlier)}",
                hint=f"See the log {spec.log_path}." if spec.log_path else "See the log.",
            )
        return child.ready

    async def stop(self, *, together: bool = False) -> None:
        """Stop all children, the last started first or all at once, and wait for them."""
        self._stopping = True
        if self._log_keeper is not None:
            self._log_keeper.cancel()
        if together:
            await asyncio.gather(*(self._stop_child(name) for name in self.children))
            return
        for name in reversed(list(self.children)):
            await self._stop_child(name)

    async def _stop_child(self, name: str) -> None:
        # A child whose start was cut short has no watcher yet.
        if (watcher := self._watchers.get(name)) is not None:
            watcher.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watcher
        await self._terminate(self.children[name])

    async def _keep_logs_short(self) -> None:
        while True:
            await asyncio.sleep(LOG_LOOK_S)
            for spec in [child.spec for child in self.children.values()]:
                try:
                    if spec.log_path is not None:
                        await asyncio.to_thread(keep_short, spec.log_path)
                except OSError as error:
                    log.warning("can't shorten the log of %s: %s", spec.name, error)

    async def _spawn(self, child: Child, *more: str) -> None:
        child.is_ready.clear()
        child.memory_kills = memory_kills()
        if (path := child.spec.log_path) is None:
            child.process = await _create(child.spec, more, None)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as errors:
            child.process = await _create(child.spec, more, errors)

    async def _watch(self, child: Child, *, first: bool) -> None:
        """Read ready lines and restart the child whenever it ends."""
        loop = asyncio.get_running_loop()
        delay = BACKOFF_FIRST_S
        while True:
            started = loop.time()
            code = await self._follow(child)
            if first and not child.is_ready.is_set():
                return
            first = False
            delay = BACKOFF_FIRST_S if loop.time() - started > STABLE_S else delay
            if self._on_restart is not None and not self._stopping:
                self._on_restart(child.spec.name, code, delay, killed_for_memory(child, code))
            await asyncio.sleep(delay)
            delay = min(delay * 2, BACKOFF_MOST_S)
            child.restarts += 1
            await self._spawn(child)

    async def _follow(self, child: Child) -> int:
        process = child.process
        assert process is not None and process.stdout is not None
        while line := await process.stdout.readline():
            with contextlib.suppress(ValueError):
                message = json.loads(line)
                if isinstance(message, dict) and message.get("event") == "ready":
                    child.ready = message
                    child.is_ready.set()
        return await process.wait()

    async def _terminate(self, child: Child) -> None:
        process = child.process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(child.spec.stop_timeout_s):
                await process.wait()
        except TimeoutError:
            log.warning("%s did not stop in time and was killed", child.spec.name)
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


async def _create(
    spec: ChildSpec, more: tuple[str, ...], errors: IO[bytes] | None
) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *spec.argv,
        *more,
        env=spec.environment,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=errors,
        start_new_session=True,
    )


def exit_text(code: int, *, by_memory: bool) -> str:
    """Describe the end of a process."""
    if by_memory:
        return (
            f"with {code}: the kernel killed it because memory ran out (`tierkv doctor` shows the "
            "available memory, `tierkv pool clean` frees the memory of stopped clusters)"
        )
    return f"with {code}"


def memory_kills() -> int:
    """Return the kernel's count of memory kills, on this machine and in our control group."""
    total = 0
    for path in KILL_COUNTS:
        with contextlib.suppress(OSError):
            found = re.search(r"^oom_kill (\d+)$", Path(path).read_text(), re.MULTILINE)
            total += int(found[1]) if found else 0
    return total


def killed_for_memory(child: Child, code: int) -> bool:
    """True if the kernel ended a child because memory ran out."""
    return code == -signal.SIGKILL and memory_kills() > child.memory_kills


def _why_not(child: Child, earlier: int) -> str:
    """Describe why a child is not ready: last log lines, or killed for memory."""
    code = child.process.returncode if child.process is not None else None
    if code is not None and killed_for_memory(child, code):
        return f"it ended {exit_text(code, by_memory=True)}"
    if (path := child.spec.log_path) is None:
        return "it told why on standard error" if code is not None else "it is not ready in time"
    return _last_words(path, earlier)


def _last_words(path: Path, start: int, count: int = 5) -> str:
    """Return the last log lines from byte ``start`` on; only lines for people, if any.

    A role ends with an error in plain words after the JSON records.
    """
    text = path.read_bytes()[start:].decode(errors="replace") if path.exists() else ""
    lines = text.strip().splitlines()
    plain = [line.strip() for line in lines if not line.startswith("{")]
    return " / ".join((plain or lines)[-count:]) or "it wrote no log"
