"""Running a batch of distinct AI calls: start their recipes, plan what they ask, run it, gather.

dbfront/ai_statement.py calls ``evaluate``; whatever a recipe asks goes through the TextGenerator
like a chat request. A call that fails for reasons of its own becomes a RowFailure; any other error
ends the batch.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dbfront.call_defaults import CallDefaults
from dbfront.context_fields import ContextFields
from dbfront.contracts import (
    CallPlan,
    CallTurn,
    PlanSummary,
    PreparedCall,
    TextAnswer,
    TextCall,
    TextEvent,
    TextGenerator,
)
from dbfront.prefix_order import SortedCalls
from dbfront.recipes.book import start_recipe
from dbfront.recipes.recipe import Ask, CountTokens, Order, Recipe, Reply, Step
from kvcore.errors import (
    ContextTooLongError,
    DeadlineError,
    OverloadedError,
    RowLevelError,
    TierKVError,
)
from sql.ai_call import AiCall

MAX_OVERLOAD_RETRIES = 5
_PREPARED_BETWEEN_YIELDS = 64
_PLANNED_AT_ONCE = 256
"""Calls that are planned in the event loop, about 20 ms of work; more are in a thread."""

_ROW_ERRORS = (ContextTooLongError, RowLevelError, DeadlineError)


@dataclass(frozen=True, slots=True)
class CallAnswer:
    """A call's value, and the models' answers it was made of; each is counted by one call only.

    ``retries`` says how often one of them was sent again, because there was no room.
    """

    value: Any
    answers: tuple[TextAnswer, ...] = ()
    retries: int = 0


@dataclass(frozen=True, slots=True)
class RowFailure:
    """A call that failed by itself; the others go on."""

    error: TierKVError
    retries: int = 0


Outcome = CallAnswer | RowFailure


async def evaluate(
    calls: Sequence[AiCall],
    generator: TextGenerator,
    defaults: CallDefaults,
    on_outcome: Callable[[AiCall, Outcome], None],
    on_prepared: Callable[[PreparedCall], None] = lambda prepared: None,
    contexts: ContextFields | None = None,
) -> PlanSummary:
    """Answer every call once and hand each outcome to ``on_outcome`` as it comes.

    ``on_prepared`` is told each request as it will be sent, before the first one of its wave is.
    ``contexts`` writes the calls' contexts; a statement has one for all its batches.

    Returns:
        what the plans they ran by were like, added up.

    Raises:
        TierKVError: whatever is not one call's own failure; calls in flight are cancelled. An
            error that ``on_outcome`` raises ends the batch the same way.
    """
    batch = _Batch(generator, defaults, on_outcome)
    contexts = contexts or ContextFields(defaults.field_reorder)
    await batch.start(calls, await contexts.written(calls))
    summary = PlanSummary()
    while wave := batch.next_wave():
        prepared = await _prepare(wave, batch)
        for _, ready in prepared:
            on_prepared(ready)
        planned = await _run_wave(prepared, batch)
        summary = PlanSummary(
            summary.runs + planned.runs, summary.shared_tokens + planned.shared_tokens
        )
        await batch.count_tokens()
    return summary


@dataclass(slots=True, eq=False)
class _Asking:
    """One call's recipe, and what it waits for.

    Attributes:
        pending: what it asked and has no answer to yet.
        answers: to what it asked last.
        used: all answers it is charged for.
        retries: how often what it asked was sent again.
    """

    call: AiCall
    recipe: Recipe
    asked: tuple[TextCall, ...] = ()
    answers: dict[TextCall, TextAnswer] = field(default_factory=dict)
    pending: set[TextCall] = field(default_factory=set)
    used: list[TextAnswer] = field(default_factory=list)
    retries: int = 0
    ended: bool = False


class _Batch:
    """The recipes of a batch; equal questions of several recipes are asked once."""

    def __init__(
        self,
        generator: TextGenerator,
        defaults: CallDefaults,
        on_outcome: Callable[[AiCall, Outcome], None],
    ) -> None:
        self.generator = generator
        self.defaults = defaults
        self._on_outcome = on_outcome
        self._wave: dict[TextCall, list[_Asking]] = {}
        self._running: dict[TextCall, list[_Asking]] = {}
        self._counting: list[tuple[_Asking, CountTokens]] = []

    async def start(self, calls: Sequence[AiCall], contexts: Mapping[AiCall, str]) -> None:
        """Start all recipes, up to the first thing each asks."""
        for index, call in enumerate(calls):
            if index % _PREPARED_BETWEEN_YIELDS == 0:
                await asyncio.sleep(0)
            recipe = start_recipe(Order(call, self.defaults, contexts.get(call, "")))
            self._go_on(_Asking(call, recipe), None)
        await self.count_tokens()

    def next_wave(self) -> list[TextCall]:
        """Return the distinct questions that are asked now."""
        self._running, self._wave = self._wave, {}
        return list(self._running)

    def answered(self, question: TextCall, answer: TextAnswer) -> None:
        """Tell an answer to everyone who asked; the first of them is charged for it."""
        for order, asking in enumerate(self._running[question]):
            if asking.ended:
                continue
            asking.answers[question] = answer
            asking.pending.discard(question)
            if order == 0:
                asking.used.append(answer)
            if not asking.pending:
                self._go_on(asking, tuple(asking.answers[one] for one in asking.asked))

    def failed(self, question: TextCall, error: TierKVError) -> None:
        """Fail everyone who asked."""
        for asking in self._running[question]:
            if not asking.ended:
                self._end(asking, RowFailure(error, asking.retries))

    def retried(self, question: TextCall) -> None:
        """Charge another try to the first of those who asked."""
        self._running[question][0].retries += 1

    async def count_tokens(self) -> None:
        """Count for all recipes that ask for it, until none does."""
        while self._counting:
            asking, step = self._counting.pop()
            counts = await self.generator.count_tokens(step.texts, step.model)
            self._go_on(asking, counts)

    def timeout_s(self, question: TextCall) -> float | None:
        """Return the time a question has: the longest of those who ask it."""
        times = [_timeout_s(asking.call, self.defaults) for asking in self._running[question]]
        return None if None in times else max(time for time in times if time is not None)

    def _go_on(self, asking: _Asking, reply: Reply | None) -> None:
        try:
            step: Step = asking.recipe.send(reply)
        except StopIteration as end:
            self._end(asking, CallAnswer(end.value, tuple(asking.used), asking.retries))
        except _ROW_ERRORS as error:
            self._end(asking, RowFailure(error, asking.retries))
        else:
            if isinstance(step, CountTokens):
                self._counting.append((asking, step))
            else:
                self._asks(asking, step)

    def _asks(self, asking: _Asking, step: Ask) -> None:
        asking.asked, asking.answers = step.calls, {}
        asking.pending = set(step.calls)
        for question in asking.pending:
            self._wave.setdefault(question, []).append(asking)

    def _end(self, asking: _Asking, outcome: Outcome) -> None:
        asking.ended = True
        asking.recipe.close()
        self._on_outcome(asking.call, outcome)


async def _prepare(wave: Sequence[TextCall], batch: _Batch) -> list[tuple[TextCall, PreparedCall]]:
    prepared: list[tuple[TextCall, PreparedCall]] = []
    for index, question in enumerate(wave):
        if index % _PREPARED_BETWEEN_YIELDS == 0:
            await asyncio.sleep(0)
        try:
            prepared.append((question, await batch.generator.prepare(question)))
        except _ROW_ERRORS as error:
            batch.failed(question, error)
    return prepared


async def _run_wave(
    prepared: Sequence[tuple[TextCall, PreparedCall]], batch: _Batch
) -> PlanSummary:
    asked = [question for question, _ in prepared]
    plan = await _plan([ready for _, ready in prepared], batch.generator, batch.defaults)
    worker = _Worker(asked, plan, batch)
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(batch.defaults.max_concurrency, len(prepared))):
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
    """Runs questions when their turn comes; several of its ``run`` share one plan."""

    questions: Sequence[TextCall]
    plan: CallPlan
    batch: _Batch
    sent: Sent = field(default_factory=Sent)

    async def run(self) -> None:
        """Take turns until none is left."""
        while (turn := await self.plan.take()) is not None:
            question, answered = self.questions[turn.index], False
            failure: TierKVError | None = None
            try:
                answer = await self._answer(turn)
                answered = True
            except _ROW_ERRORS as error:
                failure = error
            finally:
                self.plan.ended(turn.index, answered=answered)
            if failure is None:
                self.batch.answered(question, answer)
            else:
                self.batch.failed(question, failure)

    async def _answer(self, turn: CallTurn) -> TextAnswer:
        timeout_s = self.batch.timeout_s(self.questions[turn.index])
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
            self.batch.retried(self.questions[turn.index])

    async def _gather(self, turn: CallTurn) -> TextAnswer:
        pieces: list[str] = []
        last = TextEvent()
        async for last in self.batch.generator.stream(turn.prepared):
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
            label_probabilities=last.label_probabilities,
            embedding=last.embedding,
        )


def _timeout_s(call: AiCall, defaults: CallDefaults) -> float | None:
    timeout_ms = call.options.timeout_ms
    timeout_s = defaults.timeout_s if timeout_ms is None else timeout_ms / 1000
    return timeout_s or None
