"""Questions to the directory that come together become one: a statement's wave costs one call.

A part of scheduler/locating/directory_client.py. What comes while a question is under way waits for
its answer and goes with the next: the busier the directory, the more each question holds.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from tierkv.kvcore import limits
from tierkv.kvcore.ids import BlockKey
from tierkv.metaserver.client import LocateReply

Ask = Callable[[list[Sequence[BlockKey]], float], Awaitable[list[LocateReply]]]
"""Asks where some chains are and reserves them for so many seconds; one reply for each."""


@dataclass(frozen=True, slots=True)
class _Question:
    chain: Sequence[BlockKey]
    reserve_s: float
    answer: asyncio.Future[LocateReply]


class LocateWave:
    """Gathers questions; used from one event loop."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._waiting: deque[_Question] = deque()
        self._asking: asyncio.Task[None] | None = None

    async def find(self, chain: Sequence[BlockKey], *, reserve_s: float) -> LocateReply:
        """Ask with the others where a chain is.

        Args:
            chain: at most MAX_CHAIN_BLOCKS keys.
            reserve_s: keep what is found for so long.
        """
        loop = asyncio.get_running_loop()
        question = _Question(chain, reserve_s, loop.create_future())
        self._waiting.append(question)
        if self._asking is None:
            # It begins when everybody who is about to ask has done so.
            self._asking = loop.create_task(self._work(), name="scheduler-locate")
        return await question.answer

    async def _work(self) -> None:
        wave: list[_Question] = []
        try:
            while self._waiting:
                wave = self._next()
                replies = await self._ask([q.chain for q in wave], wave[0].reserve_s)
                for question, reply in zip(wave, replies, strict=True):
                    if not question.answer.done():
                        question.answer.set_result(reply)
        except BaseException as error:
            failed, self._waiting = [*wave, *self._waiting], deque()
            for question in failed:
                if not question.answer.done():
                    question.answer.set_exception(error)
            if not isinstance(error, Exception):
                raise
        finally:
            self._asking = None

    def _next(self) -> list[_Question]:
        """Take as many questions as go together; those that were given up are left out."""
        wave: list[_Question] = []
        blocks = 0
        while self._waiting and len(wave) < limits.MAX_CHAINS_PER_QUESTION:
            question = self._waiting[0]
            blocks += len(question.chain)
            if wave and (
                blocks > limits.MAX_CHAIN_BLOCKS or question.reserve_s != wave[0].reserve_s
            ):
                break
            self._waiting.popleft()
            if not question.answer.done():
                wave.append(question)
        return wave
