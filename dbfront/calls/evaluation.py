"""Running a batch of distinct AI calls: start their recipes, ask in waves what they ask, gather.

dbfront/statement/ai_statement.py makes a CallBatch for each batch and asks its waves; whatever a
recipe asks goes through the TextGenerator like a chat request (dbfront/calls/question_runner.py).
A call that fails for reasons of its own has an outcome with an error; any other error ends the
batch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tierkv.dbfront.call_defaults import CallDefaults
from tierkv.dbfront.calls.question_runner import (
    ROW_ERRORS,
    ResendPace,
    RetryPatience,
    run_questions,
)
from tierkv.dbfront.calls.recipe import CallOrder, CountTokens, ModelQuestions, Recipe, Reply, Step
from tierkv.dbfront.calls.recipe_table import start_recipe
from tierkv.dbfront.contracts import (
    PlanSummary,
    PreparedCall,
    TextAnswer,
    TextCall,
    TextGenerator,
    TokenCounts,
)
from tierkv.kvcore.errors import TierKVError, UserError
from tierkv.sql.calls.ai_call import AiCall

_PREPARED_BETWEEN_YIELDS = 64


@dataclass(frozen=True, slots=True)
class CallOutcome:
    """What came of a call.

    Attributes:
        value: of the function; None is NULL.
        answers: the models' answers that it was made of, or that a failed call had before it
            failed; each answer is counted by one call only.
        retries: how often something that the call asked was sent again.
        error: what the call failed with by itself, while the others go on.
    """

    value: Any = None
    answers: tuple[TextAnswer, ...] = ()
    retries: int = 0
    error: TierKVError | None = None


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


class CallBatch:
    """The recipes of a batch, and the Asker of their questions; equal ones are asked once.

    ``start`` the calls, then ``ask`` every wave that ``next_wave`` prepares. An error that leaves
    one of these ends the batch.

    Attributes:
        wave: the questions that are asked now; ``_askers`` has who asked which, in the same order.
        refused: the call whose argument the error speaks of that ended the batch, if it does.
    """

    def __init__(
        self,
        generator: TextGenerator,
        defaults: CallDefaults,
        ended: Callable[[AiCall, CallOutcome], None],
    ) -> None:
        """Make an empty batch.

        Args:
            generator: the way to the models.
            defaults: what calls take from the session.
            ended: told the outcome of each call, once; an error that it raises ends the batch.
        """
        self.wave: list[PreparedCall] = []
        self.refused: AiCall | None = None
        self._generator = generator
        self._defaults = defaults
        self._ended = ended
        self._askers: list[list[_Asking]] = []
        self._next: dict[TextCall, list[_Asking]] = {}
        self._counting: list[tuple[_Asking, CountTokens]] = []

    async def start(self, calls: Sequence[AiCall], contexts: Mapping[AiCall, str]) -> None:
        """Start the recipes of distinct calls, up to the first thing each asks."""
        defaults = self._defaults.for_batch(len(calls))
        for index, call in enumerate(calls):
            if index % _PREPARED_BETWEEN_YIELDS == 0:
                await asyncio.sleep(0)
            recipe = start_recipe(CallOrder(call, defaults, contexts.get(call, "")))
            self._go_on(_Asking(call, recipe), None)
        await self._count_all_tokens()

    async def ask(self) -> PlanSummary:
        """Ask the wave, and say what the plan it ran by was like.

        Raises:
            TierKVError: whatever is not one call's own failure; calls in flight are cancelled.
        """
        defaults = self._defaults
        pace = ResendPace(defaults.max_concurrency, defaults.prefix_order, defaults.plan)
        summary = await run_questions(self.wave, self._generator, pace, self)
        await self._count_all_tokens()
        return summary

    async def next_wave(self) -> bool:
        """Prepare the distinct questions that recipes wait for; False when none does.

        Those that can't be asked fail here, and recipes that go on all the same may ask more.
        """
        asked, self._next = self._next, {}
        self.wave, self._askers = [], []
        for index, (question, askers) in enumerate(asked.items()):
            if index % _PREPARED_BETWEEN_YIELDS == 0:
                await asyncio.sleep(0)
            try:
                prepared = await self._generator.prepare(question)
            except ROW_ERRORS as error:
                self._fail(askers, error)
            except UserError:
                self.refused = askers[0].call
                raise
            else:
                self.wave.append(prepared)
                self._askers.append(askers)
        return bool(asked)

    def patience(self, index: int) -> RetryPatience:
        """Give a question the longest time, and the most tries, of those who ask it."""
        session = self._defaults.options
        asked = [asking.call.options.over(session) for asking in self._askers[index]]
        times = [options.timeout_s for options in asked if options.timeout_s]
        return RetryPatience(
            max(times) if len(times) == len(asked) else None,
            max(options.retries or 0 for options in asked),
        )

    def retried(self, index: int) -> None:
        """Charge another try to the first of those who asked."""
        self._askers[index][0].retries += 1

    def answered(self, index: int, answer: TextAnswer) -> None:
        """Tell an answer to all calls that asked; the first of them is charged for it.

        A call that failed meanwhile is told nothing; its event is already published.
        """
        question = self.wave[index].call
        charged = False
        for asking in self._askers[index]:
            if asking.ended:
                continue
            asking.answers[question] = answer
            asking.pending.discard(question)
            if not charged:
                asking.used.append(answer)
                charged = True
            if not asking.pending:
                self._go_on(asking, tuple(asking.answers[one] for one in asking.asked))

    def failed(self, index: int, error: TierKVError) -> None:
        """Fail everyone who asked."""
        self._fail(self._askers[index], error)

    def abandon(self) -> None:
        """Answer NULL to everyone who still asks."""
        for asking in (asking for askers in self._askers for asking in askers):
            if not asking.ended:
                self._end(asking, CallOutcome())

    async def _count_all_tokens(self) -> None:
        """Count for all recipes that ask for it, until none does."""
        while self._counting:
            counting, self._counting = self._counting, []
            by_model: dict[str | None, list[tuple[_Asking, CountTokens]]] = {}
            for asking, step in counting:
                by_model.setdefault(step.model, []).append((asking, step))
            for model, steps in by_model.items():
                await self._count_tokens(model, steps)

    async def _count_tokens(
        self, model: str | None, steps: Sequence[tuple[_Asking, CountTokens]]
    ) -> None:
        texts = tuple(text for _, step in steps for text in step.texts)
        try:
            counted = await self._generator.count_tokens(texts, model)
        except ROW_ERRORS as error:
            if len(steps) == 1:
                self._fail([steps[0][0]], error)
                return
            for one in steps:
                await self._count_tokens(model, [one])
            return
        except UserError:
            self.refused = steps[0][0].call
            raise
        at = 0
        for asking, step in steps:
            counts = counted.counts[at : at + len(step.texts)]
            at += len(step.texts)
            self._go_on(asking, TokenCounts(counts, counted.context_tokens))

    def _go_on(self, asking: _Asking, reply: Reply | None) -> None:
        try:
            step: Step = asking.recipe.send(reply)
        except StopIteration as end:
            self._end(asking, CallOutcome(end.value, tuple(asking.used), asking.retries))
        except ROW_ERRORS as error:
            self._fail([asking], error)
        else:
            if isinstance(step, CountTokens):
                self._counting.append((asking, step))
            else:
                self._asks(asking, step)

    def _asks(self, asking: _Asking, step: ModelQuestions) -> None:
        asking.asked, asking.answers = step.calls, {}
        asking.pending = set(step.calls)
        for question in dict.fromkeys(step.calls):
            self._next.setdefault(question, []).append(asking)

    def _fail(self, askers: Sequence[_Asking], error: TierKVError) -> None:
        for asking in askers:
            if not asking.ended:
                used = tuple(asking.used)
                self._end(asking, CallOutcome(None, used, asking.retries, error))

    def _end(self, asking: _Asking, outcome: CallOutcome) -> None:
        asking.ended = True
        asking.recipe.close()
        self._ended(asking.call, outcome)
