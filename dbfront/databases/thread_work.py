"""Waits for work in the engine's thread, which a cancel does not reach by itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, TypeVar

_INTERRUPT_AGAIN_S: Final = 0.05

T = TypeVar("T")


async def to_its_end(
    future: asyncio.Future[T], interrupt: Callable[[], None] | None, *, last: bool
) -> T:
    """Wait until the work is done, however often the waiting task is cancelled.

    Args:
        future: the work.
        interrupt: asks the work to stop. Called repeatedly after a cancel, because an interrupt
            before the work starts is lost. None if the work must not be stopped.
        last: nothing of the statement follows; a cancel after the work is too late and ignored.

    Raises:
        asyncio.CancelledError: the waiting task was cancelled, and the work was stopped or is done.
        Exception: the work's own error. The error has precedence over a cancel if ``interrupt`` is
            None.
    """
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        stopping = cancelled is not None and interrupt is not None
        try:
            await asyncio.wait([future], timeout=_INTERRUPT_AGAIN_S if stopping else None)
        except asyncio.CancelledError as error:
            cancelled = error
        if cancelled is not None and interrupt is not None and not future.done():
            interrupt()
    failed = future.exception()
    if cancelled is None or (last and failed is None):
        return future.result()
    if failed is not None and interrupt is None:
        raise failed
    raise cancelled
