"""Running a batch of distinct AI calls: prepare, plan, run, gather.

The executor calls ``evaluate``; each call goes through the TextGenerator like a chat request. A
call that fails for reasons of its own becomes a RowFailure; any other error ends the batch.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from dbfront.answers import AiCall
from dbfront.contracts import (
    CallPlan,
    CallTurn,
    Message,
    PlanSummary,
    PreparedCall,
    TextAnswer,
    TextCall,
    TextEvent,
    TextGenerator,
)
from dbfront.prefix_order import SortedCalls
from kvcore.errors import (
    ContextTooLongError,
    DeadlineError,
    OverloadedError,
    RowLevelError,
    TierKVError,
)
from kvcore.request import BlendSelector

T = TypeVar("T")

MAX_OVERLOAD_RETRIES = 5
_PREPARED_BETWEEN_YIELDS = 64
_PLANNED_AT_ONCE = 256
"""Calls that are planned in the event loop, about 20 ms of work; more are in a thread."""


@dataclass(frozen=True, slots=True)
class CallDefaults:
    """What calls take from their session when they don't say it themselves.

    Attributes:
        timeout_s: time for one call; 0.0 is no limit.
        prefix_order: run neighbours in the prefix tree one after the other.
        plan: and plan which node runs which part of that tree, and what to keep for it.
        max_concurrency: calls in flight.
        blend: False answers exactly where a call does not ask for blending itself.
        recompute_ratio: None takes the namespace's; ``selector`` too.
        chunk_separator: see TextCall.
    """

    model: str | None = None
    system_prompt: str = ""
    temperature: float = 0.0
    max_tokens: int = 512
    seed: int | None = None
    cache: bool = True
    timeout_s: float = 0.0
    prefix_order: bool = True
    plan: bool = True
    max_concurrency: int = 64
    tenant: str = "default"
    blend: bool = True
    recompute_ratio: float | None = None
    selector: BlendSelector | None = None
    chunk_separator: str = ""


@dataclass(frozen=True, slots=True)
class RowFailure:
    """A call that failed by itself; the others go on."""

    error: TierKVError


Outcome = TextAnswer | RowFailure


def text_call(call: AiCall, defaults: CallDefaults) -> TextCall:
    """Make the model call an AI call stands for."""
    options = call.params.options
    system = call.params.system_prompt
    system = defaults.system_prompt if system is None else system
    messages: tuple[Message, ...] = (Message("user", call.prompt),)
    if system:
        messages = (Message("system", system), *messages)
    return TextCall(
        messages=messages,
        model=call.params.model or defaults.model,
        temperature=_given(options.temperature, defaults.temperature),
        top_p=_given(options.top_p, 1.0),
        max_tokens=_given(options.max_tokens, defaults.max_tokens),
        stop=_given(options.stop, ()),
        seed=_given(options.seed, defaults.seed),
        tenant=defaults.tenant,
        priority=_given(options.priority, 0),
        use_cache=_given(options.cache, defaults.cache),
        documents=call.documents,
        chunk_separator=defaults.chunk_separator,
        blend=options.blend if defaults.blend else bool(options.blend),
        recompute_ratio=_given(options.recompute_ratio, defaults.recompute_ratio),
        selector=_given(options.selector, defaults.selector),
    )


async def evaluate(
    calls: Sequence[AiCall],
    generator: TextGenerator,
    defaults: CallDefaults,
    on_outcome: Callable[[AiCall, Outcome], None],
    on_prepared: Callable[[PreparedCall], None] = lambda prepared: None,
) -> PlanSummary:
    """Run every call once and hand each outcome to ``on_outcome`` as it comes.

    ``on_prepared`` is told each call as it will be sent, before the first one is.

    Returns:
        what the plan they ran by was like.

    Raises:
        TierKVError: whatever is not one call's own failure; calls in flight are cancelled. An
            error that ``on_outcome`` raises ends the batch the same way.
    """
    prepared = await _prepare(calls, generator, defaults, on_outcome)
    for _, ready in prepared:
        on_prepared(ready)
    asked = [call for call, _ in prepared]
    plan = await _plan([ready for _, ready in prepared], generator, defaults)
    worker = _Worker(asked, plan, generator, defaults, on_outcome)
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(defaults.max_concurrency, len(prepared))):
                group.create_task(worker.run())
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    finally:
        await plan.close()
    return plan.summary


async def _plan(
    prepared: Sequence[PreparedCall], generator: TextGenerator, defaults: CallDefaults
) -> CallPlan:
    def make() -> CallPlan:
        if defaults.plan and defaults.prefix_order:
            return generator.plan(prepared, max_in_flight=defaults.max_concurrency)
        return SortedCalls(prepared, sort=defaults.prefix_order)

    if len(prepared) <= _PLANNED_AT_ONCE:
        return make()
    return await asyncio.to_thread(make)


async def _prepare(
    calls: Sequence[AiCall],
    generator: TextGenerator,
    defaults: CallDefaults,
    on_outcome: Callable[[AiCall, Outcome], None],
) -> list[tuple[AiCall, PreparedCall]]:
    prepared: list[tuple[AiCall, PreparedCall]] = []
    for index, call in enumerate(calls):
        if index % _PREPARED_BETWEEN_YIELDS == 0:
            await asyncio.sleep(0)
        try:
            prepared.append((call, await generator.prepare(text_call(call, defaults))))
        except (ContextTooLongError, RowLevelError) as error:
            on_outcome(call, RowFailure(error))
    return prepared


@dataclass(slots=True)
class Sent:
    """The calls of a statement that the scheduler has now, and those it refused.

    Attributes:
        now: how many it has.
        refused: one event for each that waits for another try.
    """

    now: int = 0
    refused: deque[asyncio.Event] = field(default_factory=deque)

    def make_room(self) -> None:
        """A call was answered: let one that was refused try again at once."""
        if self.refused:
            self.refused.popleft().set()

    async def room(self, timeout_s: float) -> None:
        """Wait until a call of the same statement was answered, but no longer than told."""
        answered = asyncio.Event()
        self.refused.append(answered)
        try:
            async with asyncio.timeout(timeout_s):
                await answered.wait()
        except TimeoutError:
            pass
        finally:
            if not answered.is_set():  # It may have been, just when the time was over.
                self.refused.remove(answered)


@dataclass(frozen=True, slots=True)
class _Worker:
    """Runs calls when their turn comes; several of its ``run`` share one plan."""

    calls: Sequence[AiCall]
    plan: CallPlan
    generator: TextGenerator
    defaults: CallDefaults
    on_outcome: Callable[[AiCall, Outcome], None]
    sent: Sent = field(default_factory=Sent)

    async def run(self) -> None:
        """Take turns until none is left."""
        while (turn := await self.plan.take()) is not None:
            answered = False
            try:
                outcome: Outcome = await self._answer(turn)
                answered = True
            except (ContextTooLongError, RowLevelError, DeadlineError) as error:
                outcome = RowFailure(error)
            finally:
                self.plan.ended(turn.index, answered=answered)
            self.on_outcome(self.calls[turn.index], outcome)

    async def _answer(self, turn: CallTurn) -> TextAnswer:
        timeout_s = _timeout_s(self.calls[turn.index], self.defaults)
        try:
            async with asyncio.timeout(timeout_s):
                return await self._gather_when_there_is_room(turn)
        except TimeoutError:
            raise DeadlineError(
                f"no answer within {timeout_s:g} s",
                hint="Raise tierkv.request_timeout, or the call's timeout_ms.",
            ) from None

    async def _gather_when_there_is_room(self, turn: CallTurn) -> TextAnswer:
        """Try again when told to; for ever while the statement's own calls are before it.

        A statement fails for its size only if others leave it no room at all, again and again.
        """
        refusals = 0
        while True:
            self.sent.now += 1
            try:
                answer = await self._gather(turn)
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

    async def _gather(self, turn: CallTurn) -> TextAnswer:
        pieces: list[str] = []
        last = TextEvent()
        async for last in self.generator.stream(turn.prepared):
            if not pieces:
                self.plan.prefilled(turn.index)
            pieces.append(last.text)
        if last.finish_reason is None or last.usage is None:
            raise RowLevelError("the answer ended without a finish reason")
        return TextAnswer(
            text="".join(pieces),
            finish_reason=last.finish_reason,
            usage=last.usage,
            ttft_s=last.ttft_s,
            total_s=last.total_s,
            node_id=last.node_id,
        )


def _timeout_s(call: AiCall, defaults: CallDefaults) -> float | None:
    timeout_ms = call.params.options.timeout_ms
    timeout_s = defaults.timeout_s if timeout_ms is None else timeout_ms / 1000
    return timeout_s or None


def _given(value: T | None, default: T) -> T:
    return default if value is None else value
