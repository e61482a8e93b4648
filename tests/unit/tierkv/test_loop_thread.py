"""Blocking callers over an asyncio loop."""

from __future__ import annotations

import asyncio

import pytest

from tierkv.loop_thread import LoopThread


def test_values_and_errors_come_back_and_stop_cancels_the_rest() -> None:
    thread = LoopThread()
    cancelled = []

    async def forever() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    async def add(a: int, b: int) -> int:
        task = asyncio.create_task(forever())
        tasks.append(task)
        return a + b

    async def fail() -> None:
        raise ValueError("no")

    tasks: list[asyncio.Task[None]] = []
    assert thread.run(add(1, 2)) == 3
    with pytest.raises(ValueError, match="no"):
        thread.run(fail())
    thread.stop()
    thread.stop()
    assert cancelled == [True]
