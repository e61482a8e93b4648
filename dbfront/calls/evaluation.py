"""Runs a batch of AI calls: starts their recipes, asks their questions in waves, collects answers.

dbfront/statement/ai_statement.py creates a CallBatch for each batch and asks its waves. The
questions of a recipe go through the TextGenerator like chat requests
(dbfront/calls/question_runner.py). An error specific to one call becomes the call's outcome; any
other error ends the batch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from tierkv.dbfront.calls.functions import start_recipe
from tierkv.dbfront.calls.question_runner import (
    ROW_ERRORS,
    AskedChat,
    RetryPatience,
    run_chats,
    run_questions,
)
from tierkv.dbfront.calls.recipe import CountTokens, Recipe, Reply, Step
from tierkv.dbfront.contracts import (
    CallDefaults,
    EncodedAhead,
    PlanSummary,
    PreparedCall,
    SessionCall,
    TextAnswer,
    TextCall,
    TextGenerator,
    TokenCounts,
)
from tierkv.kvcore.errors import TierKVError, UserError
from tierkv.sql.calls.ai_call import AiCall

_PREPARED_BETWEEN_YIELDS = 64
_ENCODED_AHEAD = 256
"""Prompts encoded in another thread while the loop prepares the calls before; about 20 ms of work.
"""


_WAVE_TOKENS = 2_000_000
"""Prompt tokens of a wave; a prepared token takes about 40 bytes."""
_SORTED_CHARS = _WAVE_TOKENS


@dataclass(frozen=True, slots=True)
class CallOutcome:
    """The result of a call.

    Attributes:
        value: value of the function; None is NULL.
        answers: model answers charged to the call, also if the call failed later. Each answer is
            charged to exactly one call.
        retries: number of requests of the call that were sent again.
        error: error specific to this call, which does not end the batch; None if successful.
    """

    value: Any = None
    answers: tuple[TextAnswer, ...] = ()
    retries: int = 0
    error: TierKVError | None = None


@dataclass(slots=True, eq=False)
class _Asking:
    """One call's recipe and its open questions.

    Attributes:
        pending: questions without an answer yet.
        answers: answers to the latest questions.
        used: all answers charged to the call.
        retries: number of requests sent again.
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
    """The recipes of a batch, and the Asker of their questions; equal questions are asked once.

    Usage: ``start`` the calls, then ``ask`` every wave prepared by ``next_wave``. An error raised
    by any of these methods ends the batch.

    Attributes:
        wave: questions of the current wave; ``_askers`` has the asking recipes in the same order.
        refused: the call whose argument caused the error that ended the batch; None otherwise.
    """

    def __init__(
        self,
        generator: TextGenerator,
        defaults: CallDefaults,
        ended: Callable[[AiCall, CallOutcome], None],
    ) -> None:
        """Create an empty batch.

        Args:
            generator: access to the models.
            defaults: call defaults of the session.
            ended: called once with the outcome of each call; an error raised by ``ended`` ends the
                batch.
        """
        self.wave: list[PreparedCall] = []
        self.refused: AiCall | None = None
        self._generator = generator
        self._defaults = defaults
        self._ended = ended
        self._askers: list[list[_Asking]] = []
        self._next: dict[TextCall, list[_Asking]] = {}
        self._counting: list[tuple[_Asking, CountTokens]] = []
        self._chatting: list[tuple[_Asking, SessionCall]] = []
        self._chats: list[tuple[_Asking, SessionCall]] = []

    async def start(self, calls: Sequence[AiCall], written: Mapping[AiCall, AiCall]) -> None:
        """Start the recipes of distinct calls, up to the first step of each recipe.

        Args:
            calls: the calls.
            written: calls with a context, with the context as text (``ContextFields.written``).
        """
        defaults = self._defaults.for_batch(len(calls))
        for index, call in enumerate(calls):
            if index % _PREPARED_BETWEEN_YIELDS == 0:
                await asyncio.sleep(0)
            recipe = start_recipe(written.get(call, call), defaults)
            self._go_on(_Asking(call, recipe), None)
        await self._count_all_tokens()

    async def ask(self) -> PlanSummary:
        """Ask the wave; return the summary of the plan.

        Raises:
            TierKVError: any error not specific to one call; calls in flight are cancelled.
        """
        summary = await run_questions(self.wave, self._generator, self._defaults, self)
        chats = [self._asked_chat(*one) for one in self._chats]
        most = self._defaults.max_concurrency
        await run_chats(chats, self._generator, max_concurrency=most)
        await self._count_all_tokens()
        return summary

    async def next_wave(self) -> bool:
        """Prepare the distinct questions of waiting recipes; return False if no recipe waits.

        Questions that cannot be prepared fail here. Recipes may ask more questions in the next
        wave. Questions beyond ``_WAVE_TOKENS`` wait for the next wave as well, so the memory of a
        statement does not grow with its rows.
        """
        asked, self._next = _by_prompt(self._next), {}
        self.wave, self._askers = [], []
        self._chats, self._chatting = self._chatting, []
        questions = list(asked)
        ahead: list[EncodedAhead | None] = []
        tokens = 0
        for index, (question, askers) in enumerate(asked.items()):
            if tokens > _WAVE_TOKENS:
                self._next = {later: asked[later] for later in questions[index:]}
                break
            if index % _PREPARED_BETWEEN_YIELDS == 0:
                await asyncio.sleep(0)
            if index % _ENCODED_AHEAD == 0:  # This window was begun with the window before.
                while len(ahead) < min(index + 2 * _ENCODED_AHEAD, len(questions)):
                    window = questions[len(ahead) : len(ahead) + _ENCODED_AHEAD]
                    ahead += await self._generator.encode_ahead(window)
            try:
                prepared = await self._generator.prepare(question, ahead[index])
            except ROW_ERRORS as error:
                self._fail(askers, error)
            except UserError:
                self.refused = askers[0].call
                raise
            else:
                self.wave.append(prepared)
                self._askers.append(askers)
                tokens += len(prepared.request.token_ids)
        return bool(asked or self._chats)

    def patience(self, index: int) -> RetryPatience:
        """Return the longest timeout and the most retries among the calls with this question."""
        return self._patience(self._askers[index])

    def _patience(self, askers: Sequence[_Asking]) -> RetryPatience:
        session = self._defaults.options
        asked = [asking.call.options.over(session) for asking in askers]
        times = [options.timeout_s for options in asked if options.timeout_s]
        return RetryPatience(
            max(times) if len(times) == len(asked) else None,
            max(options.retries or 0 for options in asked),
        )

    def retried(self, index: int) -> None:
        """Charge a retry to the first call with this question."""
        self._askers[index][0].retries += 1

    def answered(self, index: int, answer: TextAnswer) -> None:
        """Pass an answer to all calls with this question; only the first call is charged.

        A call that failed in the meantime is skipped, because its event is already published.
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
        """Fail all calls with this question."""
        self._fail(self._askers[index], error)

    def _asked_chat(self, asking: _Asking, turn: SessionCall) -> AskedChat:
        def ended(answer: TextAnswer | TierKVError) -> None:
            if isinstance(answer, TierKVError):
                self._fail([asking], answer)
            else:
                asking.used.append(answer)
                self._go_on(asking, (answer,))

        def retried() -> None:
            asking.retries += 1

        return AskedChat(turn, self._patience([asking]), retried, ended)

    def abandon(self) -> None:
        """Answer NULL to all calls with open questions."""
        chatting = [asking for asking, _ in self._chats]
        for asking in chain(chatting, *self._askers):
            if not asking.ended:
                self._end(asking, CallOutcome())

    async def _count_all_tokens(self) -> None:
        """Count tokens for all recipes waiting for counts, until no recipe waits."""
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
            elif isinstance(step, SessionCall):
                self._chatting.append((asking, step))
            else:
                self._asks(asking, step)

    def _asks(self, asking: _Asking, questions: tuple[TextCall, ...]) -> None:
        asking.asked, asking.answers = questions, {}
        asking.pending = set(questions)
        for question in dict.fromkeys(questions):
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


def _by_prompt(asked: dict[TextCall, list[_Asking]]) -> dict[TextCall, list[_Asking]]:
    """Sort questions by prompt if they may take several waves.

    Prompts with a common beginning are then in one wave, and the plan of the wave computes the
    beginning once.
    """
    chars = 0
    for question in asked:
        chars += sum(len(message.content) for message in question.messages or ())
        if chars > _SORTED_CHARS:
            return dict(sorted(asked.items(), key=lambda item: _prompt(item[0])))
    return asked


def _prompt(question: TextCall) -> tuple[str, ...]:
    messages = question.messages or ()
    return (*question.documents, *(message.content for message in messages))
