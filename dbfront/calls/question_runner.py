"""Runs the prepared questions of a batch in plan order, with bounded concurrency and retries.

dbfront/calls/evaluation.py calls ``run_questions`` for the questions of one wave. With
``tierkv.plan = off`` there is no plan: ``SortedCalls`` sorts calls by token ids, and a call waits
until the first call with the same prefix has computed the prefix.

``run_chats`` does the same for turns of conversations. Turns of a conversation run in the order of
the calls, because a prompt contains the answers before; conversations run side by side.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from tierkv.dbfront.contracts import (
    CallDefaults,
    CallPlan,
    PlanSummary,
    PreparedCall,
    SessionCall,
    TextAnswer,
    TextEvent,
    TextGenerator,
)
from tierkv.kvcore.errors import (
    ContextTooLongError,
    DeadlineError,
    NodeLostError,
    OverloadedError,
    RowLevelError,
    TierKVError,
)


class SortedCalls:
    """Implements CallPlan without a plan: one list; each free worker takes the next call.

    Attributes:
        runs: 0; there is no prefix tree.
        shared_tokens: 0.
    """

    runs = 0
    shared_tokens = 0

    def __init__(self, calls: Sequence[PreparedCall], *, sort: bool) -> None:
        """Order calls.

        Args:
            calls: all calls of a batch.
            sort: True to sort by token ids, and to let a call wait while another call computes its
                prefix; False to keep the given order.
        """
        self._calls = calls
        self._order = list(range(len(calls)))
        self._leaders: list[int | None] = [None] * len(calls)
        if sort and calls:
            self._order.sort(key=lambda index: calls[index].request.token_ids)
            self._leaders = _leaders([calls[index] for index in self._order])
        self._prefilled = [asyncio.Event() for _ in calls]
        self._next = 0

    async def take(self) -> PreparedCall | None:
        """See CallPlan. A call's leader was always taken earlier, so the wait ends."""
        if self._next == len(self._order):
            return None
        at, self._next = self._next, self._next + 1
        leader = self._leaders[at]
        if leader is not None:
            await self._prefilled[self._order[leader]].wait()
        index = self._order[at]
        call = self._calls[index]
        return call.in_turn(index, call.request, None)

    def prefilled(self, index: int) -> None:
        """See CallPlan."""
        self._prefilled[index].set()

    def ended(self, index: int, *, answered: bool) -> None:
        """See CallPlan."""
        self._prefilled[index].set()

    async def close(self) -> None:
        """Do nothing: no blocks are held."""


def _leaders(calls: Sequence[PreparedCall]) -> list[int | None]:
    if not all(call.request.use_cache for call in calls):
        return [None] * len(calls)
    return prefix_leaders(
        [call.request.token_ids for call in calls],
        block_tokens=calls[0].model.layout.block_tokens,
    )


def prefix_leaders(prompts: Sequence[Sequence[int]], *, block_tokens: int) -> list[int | None]:
    """Return for each prompt the prompt whose prefill should come first.

    Only whole blocks count, because only whole blocks are shared.

    Args:
        prompts: token ids, sorted.
        block_tokens: tokens per KV block.

    Returns:
        Per prompt the index of the first prompt with its longest shared prefix, always lower than
            the prompt's own index; None if no whole block is shared with an earlier prompt.
    """
    leaders: list[int | None] = []
    path: list[tuple[int, int]] = []  # (blocks, first prompt with these blocks), blocks ascending
    for index, prompt in enumerate(prompts):
        shared = _shared_blocks(prompts[index - 1], prompt, block_tokens) if index else 0
        popped: tuple[int, int] | None = None
        while path and path[-1][0] > shared:
            popped = path.pop()
        if popped is not None and shared and (not path or path[-1][0] < shared):
            path.append((shared, popped[1]))
        leaders.append(path[-1][1] if path and shared else None)
        blocks = len(prompt) // block_tokens
        if blocks > shared:
            path.append((blocks, index))
    return leaders


def _shared_blocks(left: Sequence[int], right: Sequence[int], block_tokens: int) -> int:
    shared = 0
    for start in range(0, min(len(left), len(right)) - block_tokens + 1, block_tokens):
        if left[start : start + block_tokens] != right[start : start + block_tokens]:
            break
        shared += 1
    return shared


MAX_OVERLOAD_RETRIES = 5
_PLANNED_AT_ONCE = 256
"""Calls planned in the event loop, about 20 ms of work; larger batches are planned in a thread."""

ROW_ERRORS: Final = (ContextTooLongError, RowLevelError, DeadlineError)
"""Errors specific to one question, which do not end the batch."""

_MAY_PASS: Final = (DeadlineError, NodeLostError)
"""Errors that may not recur on a retry."""


@dataclass(frozen=True, slots=True)
class RetryPatience:
    """Timeout and retry budget of a question.

    Attributes:
        timeout_s: time limit of each try; None is no limit.
        retries: tries after the first.
    """

    timeout_s: float | None = None
    retries: int = 0


class Asker(Protocol):
    """Owner of the questions, addressed by index; ``retried`` reports a question sent again."""

    def patience(self, index: int) -> RetryPatience: ...

    def retried(self, index: int) -> None: ...

    def answered(self, index: int, answer: TextAnswer) -> None: ...

    def failed(self, index: int, error: TierKVError) -> None: ...


async def run_questions(
    questions: Sequence[PreparedCall],
    generator: TextGenerator,
    defaults: CallDefaults,
    asker: Asker,
) -> PlanSummary:
    """Ask every question, and report each answer or failure to ``asker`` on arrival.

    ``defaults`` has the order of the questions and the number of questions at once.

    Raises:
        TierKVError: an error not specific to one question, or an error raised by ``asker``;
            questions in flight are cancelled.
    """
    plan = await _plan(questions, generator, defaults)
    worker = _Worker(plan, generator, asker)
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(defaults.max_concurrency, len(questions))):
                group.create_task(worker.run())
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    finally:
        await plan.close()
    return PlanSummary(plan.runs, plan.shared_tokens)


async def _plan(
    questions: Sequence[PreparedCall], generator: TextGenerator, defaults: CallDefaults
) -> CallPlan:
    def make() -> CallPlan:
        if defaults.plan and defaults.prefix_order:
            return generator.plan(questions, max_in_flight=defaults.max_concurrency)
        return SortedCalls(questions, sort=defaults.prefix_order)

    if len(questions) <= _PLANNED_AT_ONCE:
        return make()
    return await asyncio.to_thread(make)


@dataclass(slots=True)
class Sent:
    """Calls of a statement at the scheduler, and calls refused by the scheduler.

    Attributes:
        now: number of calls at the scheduler.
        refused: one event for each refused call that waits for another try.
    """

    now: int = 0
    refused: deque[asyncio.Event] = field(default_factory=deque)

    def make_room(self) -> None:
        """Wake one refused call, because another call was answered."""
        if self.refused:
            self.refused.popleft().set()

    async def room(self, timeout_s: float) -> None:
        """Wait until a call of the same statement was answered, at most ``timeout_s``."""
        answered = asyncio.Event()
        self.refused.append(answered)
        try:
            async with asyncio.timeout(timeout_s):
                await answered.wait()
        except TimeoutError:
            pass
        finally:
            if not answered.is_set():  # The event may be set right at the timeout.
                self.refused.remove(answered)


@dataclass(frozen=True, slots=True)
class _Worker:
    """Asks questions in plan order; several ``run`` tasks share one plan."""

    plan: CallPlan
    generator: TextGenerator
    asker: Asker
    sent: Sent = field(default_factory=Sent)

    async def run(self) -> None:
        """Take turns until the plan is empty."""
        while (call := await self.plan.take()) is not None:
            answer: TextAnswer | None = None
            failure: TierKVError | None = None
            try:
                answer = await self._answer(call)
            except ROW_ERRORS as error:
                failure = error
            finally:
                self.plan.ended(call.index, answered=answer is not None)
            if answer is not None:
                self.asker.answered(call.index, answer)
            elif failure is not None:
                self.asker.failed(call.index, failure)

    async def _answer(self, call: PreparedCall) -> TextAnswer:
        patience = self.asker.patience(call.index)
        retries = 0
        while True:
            try:
                return await self._answer_in_time(call, patience.timeout_s)
            except _MAY_PASS:
                if retries >= patience.retries:
                    raise
            retries += 1
            self.asker.retried(call.index)

    async def _answer_in_time(self, call: PreparedCall, timeout_s: float | None) -> TextAnswer:
        if timeout_s is None:
            return await self._gather_when_there_is_room(call)
        try:
            async with asyncio.timeout(timeout_s):
                return await self._gather_when_there_is_room(call)
        except TimeoutError:
            raise DeadlineError(
                f"no answer within {timeout_s:g} s",
                hint="Raise tierkv.request_timeout, or the call's timeout_ms.",
            ) from None

    async def _gather_when_there_is_room(self, call: PreparedCall) -> TextAnswer:
        """Retry after each refusal, without limit while other calls of the statement are in flight.

        A statement fails for its size only if the load of other clients repeatedly leaves no room
        at all.
        """
        refusals = 0
        while True:
            self.sent.now += 1
            try:
                answer = await self._gather(call)
            except OverloadedError as error:
                refusals += self.sent.now == 1
                if refusals > MAX_OVERLOAD_RETRIES:
                    raise
                retry_after_s = error.retry_after_ms / 1000
            else:
                self.sent.make_room()
                return answer
            finally:
                self.sent.now -= 1
            await self.sent.room(retry_after_s)
            self.asker.retried(call.index)

    async def _gather(self, call: PreparedCall) -> TextAnswer:
        pieces: list[str] = []
        last = TextEvent()
        async for last in self.generator.stream(call):
            if not pieces:
                self.plan.prefilled(call.index)
            pieces.append(last.text)
        if last.finish_reason is None or last.usage is None:
            raise RowLevelError("the answer ended without a finish reason")
        return TextAnswer.of("".join(pieces), last, model=call.model.name)


@dataclass(frozen=True, slots=True)
class AskedChat:
    """One turn of a batch.

    Attributes:
        turn: the turn.
        patience: time limit and retries; a turn that was not answered is not stored.
        retried: called when the turn is sent again.
        ended: called with the answer, or with the error of this turn alone.
    """

    turn: SessionCall
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
