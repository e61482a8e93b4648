"""The supervisor with real child processes: ready, restart, stop, and a child that can't start."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fix_small_disk import fill, small_disk  # noqa: F401 - a fixture
from tierkv.kvcore.errors import NoNodeError
from tierkv.processes import supervisor as supervisor_module
from tierkv.processes.supervisor import (
    Child,
    ChildSpec,
    Supervisor,
    exit_text,
    keep_short,
    killed_for_memory,
    memory_kills,
)

GOOD = """
import json, os, signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
print(json.dumps({"event": "ready", "pid": os.getpid()}), flush=True)
sys.stdin.read()
"""


def _spec(tmp_path: Path, code: str) -> ChildSpec:
    return ChildSpec("child", (sys.executable, "-c", code), tmp_path / "child.log", 5.0)


async def test_child_is_restarted_when_it_dies_and_stopped_at_the_end(tmp_path: Path) -> None:
    told: list[tuple[str, int]] = []
    restarted = asyncio.Event()

    def on_restart(name: str, code: int, delay_s: float, by_memory: bool) -> None:
        told.append((name, code))
        restarted.set()

    supervisor = Supervisor(on_restart)
    ready = await supervisor.start(_spec(tmp_path, GOOD), timeout_s=20)
    child = supervisor.children["child"]
    os.kill(ready["pid"], signal.SIGKILL)
    await asyncio.wait_for(restarted.wait(), 20)
    async with asyncio.timeout(20):
        while child.ready["pid"] == ready["pid"] or not child.is_ready.is_set():
            await child.is_ready.wait()
            await asyncio.sleep(0)
    assert told == [("child", -signal.SIGKILL)]
    assert child.restarts == 1
    second = child.ready["pid"]
    await supervisor.stop()
    with pytest.raises(ProcessLookupError):
        os.kill(second, 0)


async def test_child_that_cannot_start_is_told_with_the_end_of_its_log(tmp_path: Path) -> None:
    supervisor = Supervisor()
    with pytest.raises(NoNodeError, match="the port is taken"):
        await supervisor.start(_spec(tmp_path, "import sys; sys.exit('the port is taken')"))
    await supervisor.stop()


async def test_only_the_last_start_is_told_and_plain_words_before_records(tmp_path: Path) -> None:
    (tmp_path / "child.log").write_text("an older story\n")
    code = """
import sys
print('{"event": "segment attached"}', file=sys.stderr)
sys.exit('too little memory')
"""
    supervisor = Supervisor()
    with pytest.raises(NoNodeError) as caught:
        await supervisor.start(_spec(tmp_path, code))
    assert caught.value.message == "child did not start: too little memory"
    await supervisor.stop()


async def test_a_log_that_grows_is_moved_and_the_child_writes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_module, "LOG_LOOK_S", 0.001)
    monkeypatch.setattr(supervisor_module, "keep_short", lambda path: keep_short(path, 1000))
    code = GOOD.replace(
        "sys.stdin.read()",
        "\nwhile line := sys.stdin.readline():\n    print(line * 30, file=sys.stderr, flush=True)",
    )
    spec = _spec(tmp_path, code)
    older = tmp_path / "child.log.1"
    supervisor = Supervisor()
    await supervisor.start(spec, timeout_s=20)
    process = supervisor.children["child"].process
    assert process is not None and process.stdin is not None
    for text in ("first " * 20, "second " * 20):
        process.stdin.write(f"{text}\n".encode())
        await until(lambda text=text: older.exists() and text in older.read_text())
        await until(lambda: spec.log_path.stat().st_size == 0)
    process.stdin.write(b"short\n")
    await until(lambda: "short" in spec.log_path.read_text())
    assert spec.log_path.read_bytes().startswith(b"short"), "no hole where the old lines were"
    assert "first" not in older.read_text()
    await supervisor.stop()


async def until(done: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not done():
            await asyncio.sleep(0)


def test_a_log_that_can_not_be_moved_stays(small_disk: Path) -> None:  # noqa: F811
    log = small_disk / "child.log"
    log.write_text("x" * 100_000)
    fill(small_disk)
    with pytest.raises(OSError, match="No space left"):
        keep_short(log, 1000)
    assert log.stat().st_size == 100_000
    assert not log.with_name("child.log.1.new").exists()


@pytest.mark.parametrize(
    ("code", "before", "after", "by_memory"),
    [(-9, 3, 4, True), (-9, 4, 4, False), (-15, 3, 4, False), (1, 3, 4, False)],
)
def test_a_kill_for_memory_is_told_from_another(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    code: int,
    before: int,
    after: int,
    by_memory: bool,
) -> None:
    vmstat, group = tmp_path / "vmstat", tmp_path / "memory.events"
    vmstat.write_text(f"pgfault 12\noom_kill {after}\nnr_free 1\n")
    monkeypatch.setattr(supervisor_module, "KILL_COUNTS", (str(vmstat), str(group)))
    child = Child(_spec(tmp_path, GOOD), memory_kills=before)
    assert killed_for_memory(child, code) is by_memory
    group.write_text("oom 1\noom_kill 2\n")
    assert memory_kills() == after + 2
    assert ("memory ran out" in exit_text(code, by_memory=by_memory)) is by_memory
