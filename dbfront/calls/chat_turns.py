"""Runs the turns of conversations that a batch of AI calls makes.

Called by dbfront/calls/evaluation.py. Turns of one conversation run in the order of the calls, one
after the other, since each one's prompt has the answers before; conversations run side by side.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tierkv.dbfront.calls.question_runner import (
    MAX_OVERLOAD_RETRIES,
    ROW_ERRORS,
    RetryPatience,
)
from tierkv.dbfront.contracts import ChatTurn, TextAnswer, TextGenerator
from tierkv.kvcore.errors import DeadlineError, NodeLostError, OverloadedError, TierKVError


@dataclass(frozen=True, slots=True)
class AskedChat:
    """One turn of a batch.

    Attributes:
        turn: the turn.
        patience: time limit and retries; a turn that was not answered is not stored.
        retried: called when the turn is sent again.
        ended: called with the answer, or with the error of this turn alone.
    """

    turn: ChatTurn
    patience: RetryPatience
    retried: Callable[[], None]
    ended: Callable[[TextAnswer | TierKVError], None]


async def run_chats(
    chats: Sequence[AskedChat], generator: TextGenerator, *, max_concurrency: int
) -> None:
    """Answer all turns.

    Args:
        chats: the turns, in order.
        generator: answers and stores each turn.
        max_concurrency: most conversations at a time.

    Raises:
        TierKVError: an error not specific to one turn; turns before it are stored.
    """
    by_session: dict[str, list[AskedChat]] = {}
    for chat in chats:
        by_session.setdefault(chat.turn.session, []).append(chat)
    room = asyncio.Semaphore(max_concurrency)

    async def run(turns: Sequence[AskedChat]) -> None:
        async with room:
            for chat in turns:
                try:
                    answer: TextAnswer | TierKVError = await _answer(chat, generator)
                except ROW_ERRORS as error:
                    answer = error
                chat.ended(answer)

    try:
        async with asyncio.TaskGroup() as group:
            for turns in by_session.values():
                group.create_task(run(turns))
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None


async def _answer(chat: AskedChat, generator: TextGenerator) -> TextAnswer:
    retries = refusals = 0
    while True:
        try:
            return await _answer_in_time(chat, generator)
        except (DeadlineError, NodeLostError):
            retries += 1
            if retries > chat.patience.retries:
                raise
        except OverloadedError as error:
            refusals += 1
            if refusals > MAX_OVERLOAD_RETRIES:
                raise
            await asyncio.sleep(error.retry_after_ms / 1000)
        chat.retried()


async def _answer_in_time(chat: AskedChat, generator: TextGenerator) -> TextAnswer:
    try:
        async with asyncio.timeout(chat.patience.timeout_s):
            return await generator.chat(chat.turn)
    except TimeoutError:
        raise DeadlineError(
            f"no answer within {chat.patience.timeout_s:g} s",
            hint="Raise tierkv.request_timeout, or the call's timeout_ms.",
        ) from None
