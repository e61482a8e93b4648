"""A server on an event loop in a thread of its own, for clients that block."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import TypeVar

Server = TypeVar("Server")
START_S = 30.0


@contextmanager
def running_in_thread(
    serving: Callable[[], AbstractAsyncContextManager[Server]],
) -> Iterator[Server]:
    """Run a server until the block ends; it must start and stop cleanly."""
    started: list[Server] = []
    errors: list[BaseException] = []
    up, stop = threading.Event(), asyncio.Event()
    loops: list[asyncio.AbstractEventLoop] = []

    async def serve() -> None:
        async with serving() as server:
            loops.append(asyncio.get_running_loop())
            started.append(server)
            up.set()
            await stop.wait()

    def run() -> None:
        try:
            asyncio.run(serve())
        except BaseException as error:  # noqa: BLE001 - handed to the test
            errors.append(error)
        finally:
            up.set()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert up.wait(START_S)
    try:
        if not started:
            raise errors[0]
        yield started[0]
    finally:
        if started:
            loops[0].call_soon_threadsafe(stop.set)
        thread.join(START_S)
        assert not thread.is_alive()
    if errors:
        raise errors[0]
