"""A model that answers the first rows of a stream at once, and the others when it is told to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from tests.fix_sql import InstantGenerator
from tierkv.dbfront.contracts import PreparedCall, TextEvent


class HeldGenerator(InstantGenerator):
    """Of ``ai_generate('p' || i)``, holds back the answers about rows from 100 on.

    Attributes:
        release: set it to have them answered.
        waiting: one of them is held back.
        stopped: one of them was cancelled.
    """

    def __init__(self) -> None:
        super().__init__()
        self.release: Any = asyncio.Event()
        self.waiting: Any = asyncio.Event()
        self.stopped: Any = asyncio.Event()

    async def until_released(self) -> None:
        await self.release.wait()

    async def stream(self, prepared: PreparedCall) -> AsyncIterator[TextEvent]:
        assert prepared.call.messages is not None
        if len(prepared.call.messages[-1].content) > 3:
            self.waiting.set()
            try:
                await self.until_released()
            except asyncio.CancelledError:
                self.cancelled += 1
                self.stopped.set()
                raise
        async for event in InstantGenerator.stream(self, prepared):
            yield event
