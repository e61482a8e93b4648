"""The supervisor with real child processes: ready, restart, stop, and a child that can't start."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from kvcore.errors import NoNodeError
from tierkv.supervisor import ChildSpec, Supervisor

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
