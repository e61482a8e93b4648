"""An asyncio loop on a thread of its own, for callers in ordinary blocking code.

``tierkv.connect()`` and ``tierkv sql`` run the whole embedded cluster on a LoopThread. This module
is independent of the coroutines on the loop.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import wait
from typing import Any, Final, TypeVar

T = TypeVar("T")

INTERRUPT_AGAIN_S: Final = 5.0
"""Time for an interrupted coroutine to clean up, before ``on_interrupt`` runs again."""


class LoopThread:
    """Runs coroutines for blocking callers.

    Attributes:
        loop: the running loop; closed by ``stop``.
    """

    def __init__(self, name: str = "tierkv-loop") -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def run(
        self,
        coroutine: Coroutine[Any, Any, T],
        *,
        on_interrupt: Callable[[], Coroutine[Any, Any, None]] | None = None,
    ) -> T:
        """Run a coroutine to the end and return the value or raise the error.

        Args:
            coroutine: the coroutine to run.
            on_interrupt: run on Ctrl-C to make ``coroutine`` end by itself, and repeated until the
                end; a second Ctrl-C raises KeyboardInterrupt. Without ``on_interrupt`` the
                coroutine is cancelled and KeyboardInterrupt is raised.
        """
        future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        try:
            return future.result()
        except KeyboardInterrupt:
            if on_interrupt is None or future.done():
                future.cancel()
                raise
        try:
            while not future.done():
                asyncio.run_coroutine_threadsafe(on_interrupt(), self.loop)
                wait([future], timeout=INTERRUPT_AGAIN_S)
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            raise

    def stop(self) -> None:
        """Cancel the remaining tasks, stop the loop and join the thread. Safe to call twice."""
        if self.loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(_cancel_rest(), self.loop).result(timeout=10)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(timeout=10)
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.run_until_complete(self.loop.shutdown_default_executor())
        self.loop.close()


async def _cancel_rest() -> None:
    rest = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in rest:
        task.cancel()
    await asyncio.gather(*rest, return_exceptions=True)
